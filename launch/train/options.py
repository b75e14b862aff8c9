"""The flags of train_resnet.py: what they are, which of them exclude each other, and what a bad one is told.

Nothing here needs Horovod or another rank.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, NoReturn

from common.errors import RunError
from common.values import (
    DEVICES,
    accuracies,
    bit_levels,
    bit_schedule,
    count,
    folder,
    level,
    model_name,
    natural,
    positive,
)
from hvd_dyncomp import Policy, Schedule, Static, StepFunction
from train.data import DATASETS
from train.models import MODELS

COMPRESSIONS = ("none", "fp16", "static", "dynamic")
POLICIES = ("step", "schedule")
_NOT_GIVEN = object()
# Flags that a run may be resumed without; everything else must be the same.
_FREE = ("output_dir", "data_dir", "download", "resume", "stop_after", "tensorboard", "profile", "device")

# When flags mean something that do not always, in the words of the refusal.
_DYNAMIC, _STATIC = "--compression dynamic", "--compression static"
_STEP, _SCHEDULE = f"{_DYNAMIC} --policy step", f"{_DYNAMIC} --policy schedule"

EPILOG = """examples:
  horovodrun -np 2 python launch/train_resnet.py
  horovodrun -np 2 python launch/train_resnet.py --bits 4
  torchrun --nproc-per-node 2 launch/train_resnet.py      with DistributedDataParallel
  mpirun -np 2 python launch/train_resnet.py --levels 1,2,4 --output-dir runs/low
  horovodrun -np 2 python launch/train_resnet.py --resume --output-dir runs/low --levels 1,2,4

The defaults train a ResNet-8 for 6 epochs: on two CPU cores and the 60,000 images of Fashion-MNIST that takes three
to four minutes. ResNet-20 takes two and a half times as long.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RunError(message)


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults shown, except where a help text says for itself what leaving the flag out does."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or isinstance(action.default, bool):
            return action.help
        return super()._get_help_string(action)


def build_parser() -> argparse.ArgumentParser:
    """The parser of train_resnet.py, without the rules between flags that ``parse`` adds."""
    about = "Train a ResNet on several workers while a controller moves the bit-width of the gradients."
    look: dict[str, Any] = {"formatter_class": _Help, "allow_abbrev": False}
    parser = _Parser(prog="train_resnet.py", description=about, epilog=EPILOG, **look)
    _add_task(_adder(parser, "model and data"))
    _add_training(_adder(parser, "training"))
    _add_compression(_adder(parser, "gradient compression"))
    _add_run(_adder(parser, "run"))
    return parser


Add = Callable[..., None]


def _adder(parser: argparse.ArgumentParser, title: str) -> Add:
    """Adds flags to a group; ``only`` says with which choices a flag means something."""
    group = parser.add_argument_group(title)

    def add(flag: str, *, only: str = "", **more: Any) -> None:
        group.add_argument(flag, **more).only = only  # type: ignore[attr-defined]

    return add


def _add_task(add: Add) -> None:
    add("--model", type=model_name, default="resnet8", metavar="NAME", help=f"{', '.join(MODELS)}, or any resnet<6n+2>")
    add("--dataset", choices=("auto", *DATASETS), default="auto", help="auto: the best that is there already")
    add("--data-dir", type=folder, default="data", metavar="DIR", help="where data sets lie and are downloaded to")
    add("--download", action="store_true", help="download the data set if it is not there")
    add("--val-size", type=natural, default=0, metavar="N", help="images held out for the controller; 0: a twelfth")
    add("--limit-train", type=natural, default=0, metavar="N", help="train on N images only; 0: on all")


def _add_training(add: Add) -> None:
    add("--epochs", type=count, default=6, metavar="N", help="epochs of the whole plan")
    add("--batch-size", type=count, default=64, metavar="N", help="images per worker and step")
    add("--lr", type=positive, default=0.05, help="learning rate of one worker; multiplied by their number")
    add("--seed", type=natural, default=0, help="of weights, held-out images, order and augmentation")


def _add_compression(add: Add) -> None:
    add("--compression", choices=COMPRESSIONS, default="dynamic", help="none and fp16 are Horovod's own")
    add("--policy", only=_DYNAMIC, choices=POLICIES, default="step", help="what moves the level")
    add("--bits", only=_STATIC, type=level, default=4, metavar="B", help="a constant level: --compression static")
    example = "levels by epoch, the first being 0; e.g. 0:32,2:4"
    add("--schedule", only=_SCHEDULE, type=bit_schedule, metavar="E:B,...", help=example)
    levels = {"metavar": "B,...", "help": "bits per value, ascending or descending"}
    add("--levels", only=_STEP, type=bit_levels, default="4,8,16", **levels)
    begins = "validation accuracies at which the next level begins, one fewer than levels"
    add("--thresholds", only=_STEP, type=accuracies, default="0.80,0.88", metavar="A,...", help=begins)
    which = "which epochs at a level lead to uncompressed epochs: those without a better accuracy, or all"
    add("--stagnation", only=_STEP, choices=("plateau", "time", "none"), default="plateau", help=which)


def _add_run(add: Add) -> None:
    where = "metrics and checkpoints, seen by all ranks (default: a new one in runs/)"
    add("--output-dir", type=folder, metavar="DIR", help=where)
    add("--device", choices=DEVICES, default="auto", help="auto: GPUs where all ranks can use one")
    last = "go on from the last epoch in --output-dir, if there is one, with the flags it began with"
    add("--resume", action="store_true", help=last)
    add("--stop-after", type=count, metavar="N", help="end after epoch N of the plan, as an interruption would")
    add("--tensorboard", action="store_true", help="scalars of every epoch in OUTPUT_DIR/tensorboard, too")
    add("--profile", action="store_true", help="some steps of the first epoch, as a trace: OUTPUT_DIR/profile.json.gz")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check a command line; ``argv`` as in argparse.

    Returns:
        One attribute per flag; ``stagnation`` is None for "none".

    Raises:
        RunError: one line that names the flag and its value.
        SystemExit: after ``--help``.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    # A second look, in which flags that were not given keep a mark: a default is no contradiction, a flag is.
    marked = argparse.Namespace(**dict.fromkeys(vars(args), _NOT_GIVEN))
    given = {dest: value for dest, value in vars(parser.parse_args(argv, marked)).items() if value is not _NOT_GIVEN}
    if "bits" in given and not {"compression", "policy"} & given.keys():
        args.compression = "static"
    _check(parser, args, given)
    args.stagnation = None if args.stagnation == "none" else args.stagnation
    return args


def make_policy(args: argparse.Namespace) -> Policy | None:
    """The policy that the flags describe; None for ``--compression none`` and ``fp16``."""
    if args.compression in ("none", "fp16"):
        return None
    if args.compression == "static":
        return Static(args.bits)
    if args.policy == "schedule":
        return Schedule(args.schedule)
    return StepFunction(args.levels, args.thresholds, stagnation=args.stagnation, total_epochs=args.epochs)


def compression_of(args: argparse.Namespace) -> str:
    """Which compression a run shows, for its first line."""
    if args.compression == "dynamic" and args.policy == "step":
        levels = "-".join(f"{level:g}" for level in args.levels)
        return f"the paper's scheme, {levels} bits by validation accuracy (constant 4 bits, as advised: --bits 4)"
    return f"compression {args.compression}" + (f", {args.bits:g} bits" if args.compression == "static" else "")


def bits_of(args: argparse.Namespace) -> int:
    """Bits a value where Horovod's or torch's own compression is chosen."""
    return 16 if args.compression == "fp16" else 32


def config(args: argparse.Namespace) -> dict[str, Any]:
    """What decides the course of a run, as JSON returns it: all flags but those that it may be resumed without."""
    chosen = {key: value for key, value in vars(args).items() if key not in _FREE}
    if args.schedule is not None:
        chosen["schedule"] = sorted(args.schedule.items())
    return json.loads(json.dumps(chosen))


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """Everything in which two configurations differ, with both values; an empty string where they are the same."""
    keys = sorted(theirs.keys() | ours.keys())
    return ", ".join(
        f"{key} {theirs.get(key)} (now {ours.get(key)})" for key in keys if theirs.get(key) != ours.get(key)
    )


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace, given: dict[str, object]) -> None:
    """Refuse flags that contradict each other or that would silently do nothing."""
    dynamic = args.compression == "dynamic"
    chosen = f"--compression {args.compression}" + (f" --policy {args.policy}" if dynamic else "")
    applies = {
        "": True,
        _DYNAMIC: dynamic,
        _STATIC: args.compression == "static",
        _STEP: dynamic and args.policy == "step",
        _SCHEDULE: dynamic and args.policy == "schedule",
    }
    for action in parser._actions:
        only = getattr(action, "only", "")
        if action.dest in given and not applies[only]:
            value = given[action.dest]
            what = action.option_strings[0] + ("" if isinstance(value, bool) else f" {_as_typed(value)}")
            parser.error(f"{what}: only with {only}, not with {chosen}")
    if args.policy == "schedule" and args.schedule is None:
        parser.error("--policy schedule: needs --schedule, for example --schedule 0:32,2:4")
    thresholds, levels = _as_typed(args.thresholds), _as_typed(args.levels)
    if args.policy == "step" and len(args.thresholds) != len(args.levels) - 1:
        parser.error(f"--thresholds {thresholds}: one fewer than --levels {levels} is needed")
    if args.resume and args.output_dir is None:
        parser.error("--resume: needs the --output-dir of the run to go on with")
    if args.stop_after and args.stop_after > args.epochs:
        parser.error(f"--stop-after {args.stop_after}: there are only --epochs {args.epochs}")


def _as_typed(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}:{bits}" for key, bits in value.items())
    return ",".join(str(item) for item in value) if isinstance(value, tuple) else str(value)
