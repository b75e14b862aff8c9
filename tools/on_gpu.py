"""Runs the checks of gpu_checks.py, stage by stage, and shows what came of them in a table. Started by on_gpu.sh.

What earlier calls on this machine found is shown, too, and not run again unless its stage is named.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "launch"), str(HERE.parent / "tests")]

from bench.results import commit, load, save  # noqa: E402
from common import launcher  # noqa: E402
from common.device import nccl_shares_gpus  # noqa: E402
from common.lines import say  # noqa: E402
from common.markdown import markdown  # noqa: E402
from gpu_checks import ALL, LINKS, PROFILE, ROOT, STAGES, Check, Checks  # noqa: E402

ROWS, LOG = "gpu.json", "gpu.log"
_LEAST = 10.0  # seconds in which a check can come to anything


@dataclass(frozen=True)
class Row:
    """What came of a check: "ok", "failed", "too late", "no time" (not begun) or "not here"."""

    stage: str
    name: str
    state: str
    result: str
    goal: str
    seconds: float


def run(check: Check, log: Path, left: float) -> Row:
    """Run one, whatever it does, and note all that it says.

    Args:
        left: seconds that there are for it, whatever its own limit is.
    """
    began = time.monotonic()

    def row(state: str, result: str) -> Row:
        return Row(check.stage, check.name, state, result, check.goal, round(time.monotonic() - began, 1))

    if check.lack:
        return row("not here", check.lack)
    if check.needs and shutil.which(check.needs) is None:
        return row("not here", f"{check.needs} is not in PATH")
    if left < _LEAST:
        return row("no time", f"{left:.0f} s are left")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **check.environment}
    try:
        ended = launcher.run(check.command, timeout=min(check.seconds, left), env=environment, cwd=ROOT)
        said, state = ended.stdout, "ok" if ended.returncode == 0 else "not here" if check.may_fail else "failed"
    except subprocess.TimeoutExpired as expired:
        said, state = expired.output or "", "too late"
    except OSError as error:
        said, state = str(error), "failed"
    with log.open("a") as file:
        file.write(f"== {check.stage} {check.name}: {state}\n$ {' '.join(check.command)}\n{said}\n")
    try:
        return row(state, check.read(said))
    except Exception as error:  # noqa: BLE001  # the next check is to run
        return row("failed" if state == "ok" else state, f"{type(error).__name__}: {error}")


def table(rows: Sequence[Row]) -> str:
    """Markdown, a line a check."""
    cells: list[tuple[str, ...]] = [
        (f"{row.stage} {row.name}", row.state, row.result[:200], row.goal, f"{row.seconds:.0f}")
        for row in sorted(rows, key=lambda row: row.stage)
    ]
    return markdown(("check", "", "result", "goal", "s"), cells)


def machine() -> dict[str, Any]:
    """What the figures are of. On one GPU several ranks share it."""
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    backend = {"ranks_over": backend_of_ranks(), "preloaded": Path(os.environ.get("LD_PRELOAD", "")).name}
    return {"gpus": names, "cores": os.cpu_count(), **versions, **backend, "commit": commit()}


def backend_of_ranks() -> str:
    """Of two ranks with GPUs: NCCL, unless they share one and it does not take that."""
    return "nccl" if torch.cuda.device_count() > 1 or nccl_shares_gpus() else "gloo"


def kept(results: Path, out: Path) -> None:
    """Copies what is worth keeping: the table, the log, the benchmarks' files, the profile."""
    out.mkdir(parents=True, exist_ok=True)
    for path in (*results.glob("*.json"), results / LOG):
        if path.exists():
            shutil.copy(path, out)
    for path in results.glob(f"*4bit*/{PROFILE}"):
        shutil.copy(path, out / f"{path.parent.name}.{PROFILE}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="on_gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--stage", action="append", choices=STAGES, metavar="X", help="of A to E; may be repeated")
    add("--seconds", type=float, default=ALL, help=f"no check begins or goes on after that (default {ALL})")
    add("--pretend", action="store_true", help="on CPUs, small: for the rehearsal")
    add("--cache", type=Path, required=True, help=argparse.SUPPRESS)
    add("--built", type=Path, required=True, help=argparse.SUPPRESS)
    add("--began", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    end = (args.began or time.time()) + args.seconds
    results = args.cache / ("pretended" if args.pretend else f"results-{commit().replace(' ', '-') or 'unversioned'}")
    results.mkdir(parents=True, exist_ok=True)
    out = Path(os.environ.get("OUT", "runs/gpu"))
    earlier = [Row(**row) for row in load(results / ROWS).get("rows", [])]
    rows = {row.name: row for row in earlier if args.stage is None or row.stage not in args.stage}
    done = {name for name, row in rows.items() if row.state == "ok"}
    for stage in args.stage or STAGES:
        while True:
            # Anew each time: what there is to run depends on whether links can be had.
            links = LINKS in rows and rows[LINKS].state == "ok"
            place = {"backend": backend_of_ranks(), "links": links, "pretend": args.pretend}
            checks = Checks(results, args.built, **place).all()
            check = next((one for one in checks if one.stage == stage and one.name not in done), None)
            if check is None:
                break
            say(f"on_gpu: {stage} {check.name}, at most {check.seconds:.0f} s", sys.stdout)
            rows[check.name] = run(check, results / LOG, end - time.time())
            done.add(check.name)
            save(results / ROWS, {"machine": machine(), "rows": [asdict(row) for row in rows.values()]})
            kept(results, out)
    say(f"\n{table(list(rows.values()))}\n\nresults: {out}", sys.stdout)
    return int(any(row.state not in ("ok", "not here") for row in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
