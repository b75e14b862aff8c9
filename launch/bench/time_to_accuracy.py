"""How long training takes, over a slow link or none, until it is as good as the uncompressed training became.

    python launch/bench accuracy --rate 100mbit
    python launch/bench accuracy --rate shm --methods none,fp16,4bit    # all workers on this host: no root

launch/train_resnet.py trains to its end, one method after the other. Writes DIR/accuracy-MODEL.json; in its name are
also the rate, if it is not 100mbit, -gloo and -cuda.

Seconds are those of the training steps; evaluation, which is the same for all, is left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import gpus
from bench.results import SHARED_MEMORY, about, origin, save, suffix, typed
from bench.start import place, start
from bench.steps import add_shared_arguments, checked_rate
from bench.tables import rate_title
from common.device import choose_for
from common.launcher import TRAINER
from common.markdown import DASH, markdown
from common.values import at_least_zero, count, folder, model_name, names, positive
from netlab.hosts import WITH_HOROVOD
from train.metrics import read_lines

TITLES = {
    "none": "Horovod",
    "fp16": "Horovod fp16",
    "4bit": "ours, 4 bits",
    "0.25bit": "ours, 0.25 bit",
    "dynamic": "ours, dynamic 2-4-8",
}
_FLAGS = {
    "none": ("--compression", "none"),
    "fp16": ("--compression", "fp16"),
    "4bit": ("--compression", "static", "--bits", "4"),
    "0.25bit": ("--compression", "static", "--bits", "0.25"),
    "dynamic": ("--compression", "dynamic", "--levels", "2,4,8", "--thresholds", "0.75,0.85"),
}
_RATE = "100mbit"


def file_name(model: str, rate: str = _RATE, by: str = "mpirun", device: str = "cpu") -> str:
    """Where a model's results are: over links of a rate, by a launcher, on a type of device."""
    return f"accuracy-{model}{'' if rate == _RATE else f'-{rate}'}{suffix(device, by)}.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told, and its defaults."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--rate", type=checked_rate, default=_RATE, metavar="RATE", help=f"of the links; shm: none (default {_RATE})")
    add("--methods", type=_methods, default=tuple(_FLAGS), metavar="NAME,...", help=f"default {','.join(_FLAGS)}")
    add("--dataset", default="fashion-mnist", metavar="NAME", help="of train_resnet.py (default fashion-mnist)")
    add("--data-dir", type=folder, default="data", metavar="DIR", help="of train_resnet.py (default data)")
    add("--model", type=model_name, default="resnet20", metavar="NAME", help="of train_resnet.py (default resnet20)")
    add("--epochs", type=count, default=5, metavar="N", help="of every training (default 5)")
    add("--limit-train", type=count, default=12000, metavar="N", help="training images (default 12000)")
    add("--val-size", type=count, default=500, metavar="N", help="validation images (default 500)")
    add("--batch-size", type=count, default=8, metavar="N", help="images per worker and step (default 8)")
    add("--lr", type=positive, default=0.0125, help="learning rate of one worker (default 0.0125)")
    add("--tolerance", type=at_least_zero, default=0.5, metavar="P", help="points that may be missing (default 0.5)")
    add("--workers", type=count, default=2, metavar="N", help="one host each, but over shm (default 2)")
    add_shared_arguments(parser, WITH_HOROVOD)


def _methods(text: str) -> tuple[str, ...]:
    chosen = names(_FLAGS)(text)
    if "none" not in chosen:
        raise argparse.ArgumentTypeError(f"{text!r} lacks none, whose accuracy is the goal")
    return chosen


def run(args: argparse.Namespace) -> None:
    """Train every method, write the JSON file and show it as Markdown.

    Raises:
        RunError: the network cannot be made, no GPU can be used that should, or a training failed.
    """
    device = choose_for(args.device, args.workers, horovod=args.launcher in WITH_HOROVOD)
    path = args.output_dir / file_name(args.model, args.rate, args.launcher, device)
    found = gpus.found(args.workers, args.launcher) if device == "cuda" else {}
    environment = {"HOROVOD_CYCLE_TIME": f"{args.cycle_time:g}"}  # the rest is set by train_resnet.py itself
    environment |= gpus.OVER_LINKS if found else {}
    flags = ["--dataset", args.dataset, "--model", args.model, "--epochs", str(args.epochs)]
    flags += ["--limit-train", str(args.limit_train), "--batch-size", str(args.batch_size)]
    flags += ["--val-size", str(args.val_size)]
    flags += ["--lr", f"{args.lr:g}"]
    flags += ["--seed", str(args.seed), "--device", device]
    results: dict[str, Any] = {
        "benchmark": "accuracy",
        "model": args.model,
        "rate": args.rate,
        "workers": args.workers,
        "device": device,
        "flags": flags,
        "tolerance": args.tolerance,
        "about": {**about(args.command, args.seed, environment, args.launcher), **found},
        "runs": {},
    }
    hosts, per_host = (1, args.workers) if args.rate == SHARED_MEMORY else (args.workers, 1)
    rate = "none" if hosts == 1 else args.rate
    with place(hosts, per_host, args.launcher, rate) as there, tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for name in args.methods:
            output = Path(folder, name)
            program = [sys.executable, str(TRAINER), *flags, *_FLAGS[name]]
            program += ["--data-dir", args.data_dir, "--output-dir", str(output)]
            before = there.counters()
            print(f"{TITLES[name]}: training", file=sys.stderr, flush=True)
            start(there.command(program), environment, "train_resnet.py")
            sent = [now - then for now, then in zip(there.counters(), before, strict=True)]
            results["runs"][name] = {"sent": sent, "epochs": [_epoch(line) for line in read_lines(output)]}
            save(path, results)
    print(table(results))


def _epoch(line: dict[str, Any]) -> dict[str, float]:
    return {
        "seconds": line["seconds_compute"] + line["seconds_exchange"],
        "test_accuracy": line["test_accuracy"],
        "level": line["level"],
    }


def target(results: Mapping[str, Any]) -> float:
    """The accuracy to be reached: that of the uncompressed run at its end, less the tolerance."""
    return results["runs"]["none"]["epochs"][-1]["test_accuracy"] - results["tolerance"] / 100


def curve(run: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Seconds of training up to the end of each epoch, and the accuracies there."""
    seconds, total = [], 0.0
    for epoch in run["epochs"]:
        total += epoch["seconds"]
        seconds.append(total)
    return seconds, [epoch["test_accuracy"] for epoch in run["epochs"]]


def reached(run: Mapping[str, Any], accuracy: float) -> float | None:
    """Seconds up to the end of the first epoch that is as good; None if none is."""
    return next((s for s, found in zip(*curve(run), strict=True) if found >= accuracy), None)


def figure_name(results: Mapping[str, Any]) -> str:
    """How the figure of a file's results is called."""
    by = results["about"].get("launcher", "mpirun")  # in files from before it could be another
    name = file_name(results["model"], results["rate"], by, results.get("device", "cpu"))
    return str(Path(name).with_suffix(".png"))


def title(results: Mapping[str, Any]) -> str:
    """What was trained, and what is not as by default."""
    rate = "" if results["rate"] == _RATE else f", {rate_title(results['rate'])}"
    return f"{results['model']}{rate}{', Gloo' if results['about'].get('launcher') == 'gloo' else ''}"


def caption(results: Mapping[str, Any]) -> str:
    """What was trained, how, and with what."""
    about = results["about"]
    return (
        f"`{typed(about['command'])}`: train_resnet.py `{' '.join(results['flags'])}`, {results['workers']} workers, "
        f"one run each. The goal is the uncompressed run's last test accuracy less {results['tolerance']:g} points; "
        f"seconds are those of training steps.{origin([about])}{gpus.sentence(about, results['workers'])}"
    )


def table(results: Mapping[str, Any]) -> str:
    """Markdown: seconds to the target, seconds in all, accuracy at the end, bytes by the interfaces' counters."""
    goal = target(results)
    rows: list[tuple[str, ...]] = []
    base = reached(results["runs"]["none"], goal)
    for name, run in results["runs"].items():
        when, (seconds, accuracies) = reached(run, goal), curve(run)
        faster = f"{base / when:.2f}" if base and when else DASH
        sent = f"{max(run['sent']) / 1e6:.0f}" if run["sent"] else DASH  # nothing leaves a single host
        levels = " ".join(str(epoch["level"]) for epoch in run["epochs"])
        to_goal = "not reached" if when is None else f"{when:.0f}"
        rows.append((TITLES[name], to_goal, faster, f"{seconds[-1]:.0f}", f"{100 * accuracies[-1]:.2f}", sent, levels))
    head = (
        f"{rate_title(results['rate'])}", f"s to {100 * goal:.2f} %", "times faster", "s in all",
        "test accuracy, %", "MB sent, evaluation included", "bits by epoch",
    )  # fmt: skip
    return markdown(head, rows)
