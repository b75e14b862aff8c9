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
sys.path[:0] = [str(HERE), str(HERE.parent / "launch")]

from bench.results import commit, load, save  # noqa: E402
from common import launcher  # noqa: E402
from common.lines import say  # noqa: E402
from common.markdown import markdown  # noqa: E402
from gpu_checks import BUILD, LINKS, PROFILE, ROOT, STAGES, Check, Checks  # noqa: E402

ROWS, LOG = "gpu.json", "gpu.log"


@dataclass(frozen=True)
class Row:
    """What came of a check: "ok", "failed", "too late" or "not here"."""

    stage: int
    name: str
    state: str
    result: str
    goal: str
    seconds: float


def run(check: Check, log: Path) -> Row:
    """Run one, whatever it does, and note all that it says."""
    began = time.monotonic()
    if check.fresh is not None:
        shutil.rmtree(check.fresh, ignore_errors=True)

    def row(state: str, result: str) -> Row:
        return Row(check.stage, check.name, state, result, check.goal, round(time.monotonic() - began, 1))

    if check.needs and shutil.which(check.needs) is None:
        return row("not here", f"{check.needs} is not in PATH")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **check.environment}
    try:
        ended = launcher.run(check.command, timeout=check.seconds, env=environment, cwd=ROOT)
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
        (f"{row.stage} {row.name}", row.state, row.result[:150], row.goal, f"{row.seconds:.0f}")
        for row in sorted(rows, key=lambda row: row.stage)
    ]
    return markdown(("check", "", "result", "goal", "s"), cells)


def machine() -> dict[str, Any]:
    """What the figures are of."""
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    return {"gpus": names, "cores": os.cpu_count(), **versions, "commit": commit()}


def kept(results: Path, out: Path) -> None:
    """Copies what is worth keeping: the table, the log, the benchmarks' files, the profile."""
    out.mkdir(parents=True, exist_ok=True)
    for path in (*results.glob("*.json"), results / LOG, results / PROFILE):
        if path.exists():
            shutil.copy(path, out)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="on_gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--stage", type=int, action="append", choices=STAGES, metavar="N", help="of 1 to 5; may be repeated")
    add("--pretend", action="store_true", help="on CPUs, small: for the rehearsal")
    add("--cache", type=Path, required=True, help=argparse.SUPPRESS)
    add("--data", type=Path, required=True, help=argparse.SUPPRESS)
    add("--built-in", type=float, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    results = args.cache / ("pretended" if args.pretend else f"results-{commit().replace(' ', '-') or 'unversioned'}")
    results.mkdir(parents=True, exist_ok=True)
    out = Path(os.environ.get("OUT", "runs/gpu"))
    earlier = [Row(**row) for row in load(results / ROWS).get("rows", [])]
    rows = {row.name: row for row in earlier if args.stage is None or row.stage not in args.stage}
    rows["build"] = Row(0, "build", "ok", f"Horovod and the package; at most {BUILD} s are planned", "", args.built_in)
    done = {name for name, row in rows.items() if row.state == "ok"}
    for stage in args.stage or STAGES:
        while True:
            # Anew each time: what there is to run depends on whether links can be had.
            links = LINKS in rows and rows[LINKS].state == "ok"
            checks = Checks(results, args.data, links=links, pretend=args.pretend).all()
            check = next((one for one in checks if one.stage == stage and one.name not in done), None)
            if check is None:
                break
            say(f"on_gpu: {stage} {check.name}, at most {check.seconds:.0f} s", sys.stdout)
            rows[check.name] = run(check, results / LOG)
            done.add(check.name)
            save(results / ROWS, {"machine": machine(), "rows": [asdict(row) for row in rows.values()]})
            kept(results, out)
    say(f"\n{table(list(rows.values()))}\n\nresults: {out}", sys.stdout)
    return int(any(row.state in ("failed", "too late") for row in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
