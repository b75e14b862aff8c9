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
    at_least_zero,
    bit_levels,
    bit_schedule,
    count,
    folder,
    fraction,
    level,
    model_name,
    natural,
    positive,
    power_of_two,
)
from hvd_dyncomp import CriticalRegime, Plateau, Policy, Schedule, Static, StepFunction
from train.data import DATASETS
from train.models import MODELS

COMPRESSIONS = ("none", "fp16", "static", "dynamic")
POLICIES = ("step", "plateau", "critical", "static", "schedule")
_NOT_GIVEN = object()
# Flags that a run may be resumed without; everything else must be the same.
_FREE = ("output_dir", "data_dir", "download", "resume", "stop_after", "tensorboard", "profile", "device")

# When flags mean something that do not always, in the words of the refusal. Those of policies name the policies.
_DYNAMIC, _QUANTIZED = "--compression dynamic", "--compression static or dynamic"
_BITS = "--compression static, or --compression dynamic --policy static"

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
    _add_step_policy(_adder(parser, "the step policy: accuracy reached, loss stalled, training stuck"))
    _add_other_policies(_adder(parser, "other policies: plateau, critical (changing gradients)"))
    _add_run(_adder(parser, "run"))
    return parser


Add = Callable[..., None]


def _adder(parser: argparse.ArgumentParser, title: str) -> Add:
    """Adds flags to a group; ``only`` says with which choices a flag means something."""
    group = parser.add_argument_group(title)

    def add(flag: str, *, only: str | tuple[str, ...] = "", **more: Any) -> None:
        if isinstance(only, tuple):
            only = f"--compression dynamic --policy {' or '.join(only)}"
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
    add("--warmup-epochs", type=at_least_zero, default=1.0, metavar="E", help="epochs from --lr up to the scaled rate")
    add("--lr-schedule", choices=("cosine", "step"), default="cosine", help="step: a tenth at 50 and at 75 %%")
    add("--momentum", type=fraction, default=0.9, help="of SGD; Nesterov's at 1 and 2 bits, none below")
    add("--weight-decay", type=at_least_zero, default=1e-4, metavar="W", help="of SGD")
    add("--clip-norm", type=positive, metavar="NORM", help="larger norms of a step's mean gradients are clipped to it")
    add("--seed", type=natural, default=0, help="of weights, held-out images, order and augmentation")


def _add_compression(add: Add) -> None:
    add("--compression", choices=COMPRESSIONS, default="dynamic", help="none and fp16 are Horovod's own")
    add("--policy", only=_DYNAMIC, choices=POLICIES, default="step", help="what moves the level")
    add("--bits", only=_BITS, type=level, default=4, metavar="B", help="a constant level: --compression static")
    example = "levels by epoch, the first being 0; e.g. 0:32,2:4"
    add("--schedule", only=("schedule",), type=bit_schedule, metavar="E:B,...", help=example)
    blocks = {"type": power_of_two, "default": 512, "metavar": "N", "help": "values that share one scale"}
    add("--block-size", only=_QUANTIZED, **blocks)
    hosts = "within each host first, then between hosts; auto: where hosts have equally many workers, and more than one"
    add("--hierarchical", only=_QUANTIZED, choices=("auto", "off"), default="auto", help=f"exchange {hosts}")
    steps = "the first N steps have at least --level-warmup-bits, whatever the policy says"
    add("--level-warmup-steps", only=_QUANTIZED, type=natural, default=0, metavar="N", help=steps)
    bits = "see there; 32 is uncompressed"
    add("--level-warmup-bits", only=_QUANTIZED, type=level, default=32, metavar="B", help=bits)
    forget = {"action": "store_false", "help": "forget what rounding left over"}
    add("--no-error-feedback", only=_QUANTIZED, dest="error_feedback", **forget)


def _add_step_policy(add: Add) -> None:
    step, also_plateau = ("step",), ("step", "plateau")
    levels = {"metavar": "B,...", "help": "bits per value, ascending (step: or descending)"}
    add("--levels", only=("step", "plateau", "critical"), type=bit_levels, default="4,8,16", **levels)
    begins = "validation accuracies at which the next level begins, one fewer than levels"
    add("--thresholds", only=step, type=accuracies, default="0.80,0.88", metavar="A,...", help=begins)
    counts = {"default": 0.01, "metavar": "R", "help": "relative improvement that counts"}
    add("--min-improvement", only=also_plateau, type=fraction, **counts)
    epochs = {"type": count, "metavar": "N"}
    add("--loss-patience", only=step, default=3, help="epochs in a row without it before a step up", **epochs)
    which = "which epochs at a level lead to uncompressed epochs: those without a better accuracy, or all"
    add("--stagnation", only=step, choices=("plateau", "time", "none"), default="plateau", help=which)
    add("--stagnation-patience", only=step, default=5, help="such epochs before that", **epochs)
    add("--uncompressed-epochs", only=step, default=2, help="how many uncompressed epochs", **epochs)
    after = "epochs after that, or after a plateau, which do not count"
    add("--cooldown", only=also_plateau, type=natural, default=3, metavar="N", help=after)
    highest = "uncompressed epochs at the highest level, too"
    add("--uncompressed-at-top", only=step, action="store_true", help=highest)


def _add_other_policies(add: Add) -> None:
    plateau, critical = ("plateau",), ("critical",)
    watched = ("val_loss", "val_accuracy", "train_loss")
    add("--monitor", only=plateau, choices=watched, default="val_loss", help="where a plateau is looked for")
    without = "epochs without progress that make no plateau yet"
    add("--patience", only=plateau, type=natural, default=2, metavar="N", help=without)
    change = "relative change of the gradients' norm: critical"
    add("--eta", only=critical, type=at_least_zero, default=0.5, metavar="R", help=change)
    between = "epochs between the two norms that are compared"
    add("--interval", only=critical, type=count, default=1, metavar="N", help=between)


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
    if args.compression == "static" or args.policy == "static":
        return Static(args.bits)
    if args.policy == "schedule":
        return Schedule(args.schedule)
    if args.policy == "plateau":
        return Plateau(
            args.levels,
            monitor=args.monitor,
            mode="max" if args.monitor == "val_accuracy" else "min",
            patience=args.patience,
            threshold=args.min_improvement,
            cooldown=args.cooldown,
        )
    if args.policy == "critical":
        low, high = args.levels
        return CriticalRegime(low, high, eta=args.eta, interval=args.interval)
    return StepFunction(
        levels=args.levels,
        thresholds=args.thresholds,
        min_improvement=args.min_improvement,
        loss_patience=args.loss_patience,
        stagnation=args.stagnation,
        stagnation_patience=args.stagnation_patience,
        uncompressed_epochs=args.uncompressed_epochs,
        cooldown=args.cooldown,
        uncompressed_at_top=args.uncompressed_at_top,
        total_epochs=args.epochs,
    )


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
        _BITS: args.compression == "static" or (dynamic and args.policy == "static"),
        _QUANTIZED: dynamic or args.compression == "static",
    }
    for action in parser._actions:
        only = getattr(action, "only", "")
        # Of policies' flags, the last words are the policies.
        fits = applies.get(only, dynamic and args.policy in only.removeprefix(f"{_DYNAMIC} --policy ").split(" or "))
        if action.dest in given and not fits:
            value = given[action.dest]
            what = action.option_strings[0] + ("" if isinstance(value, bool) else f" {_as_typed(value)}")
            parser.error(f"{what}: only with {only}, not with {chosen}")
    _check_policy(parser, args)
    if "level_warmup_bits" in given and not args.level_warmup_steps:
        parser.error(f"--level-warmup-bits {args.level_warmup_bits}: needs --level-warmup-steps, of at least 1")
    if args.resume and args.output_dir is None:
        parser.error("--resume: needs the --output-dir of the run to go on with")
    if args.stop_after and args.stop_after > args.epochs:
        parser.error(f"--stop-after {args.stop_after}: there are only --epochs {args.epochs}")
    if args.warmup_epochs > args.epochs:
        parser.error(f"--warmup-epochs {args.warmup_epochs:g}: longer than --epochs {args.epochs}")


def _check_policy(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """What policies need, and how many levels in which order."""
    if args.policy == "schedule" and args.schedule is None:
        parser.error("--policy schedule: needs --schedule, for example --schedule 0:32,2:4")
    thresholds, levels = _as_typed(args.thresholds), _as_typed(args.levels)
    if args.policy == "step" and len(args.thresholds) != len(args.levels) - 1:
        parser.error(f"--thresholds {thresholds}: one fewer than --levels {levels} is needed")
    if args.policy != "step" and list(args.levels) != sorted(args.levels):
        parser.error(f"--levels {levels}: must ascend with --policy {args.policy}")
    if args.policy == "critical" and len(args.levels) != 2:
        parser.error(f"--policy critical: needs --levels of two, for example --levels 4,16, not {levels}")


def _as_typed(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}:{bits}" for key, bits in value.items())
    return ",".join(str(item) for item in value) if isinstance(value, tuple) else str(value)
