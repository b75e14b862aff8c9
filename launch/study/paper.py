"""Trains the paper's scenarios and two more, and writes its table with our numbers in it.

Every scenario is trained by train_resnet.py under horovodrun, seed by seed: what else the machine does in the
meantime then touches all scenarios alike. A study that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common.docs import DOCS
from common.errors import RunError
from common.values import accuracies, count, natural
from study import paper_table
from study.paper_table import RESULTS, TABLE
from study.scenarios import SCENARIOS, Result, Study, shared_flags
from train.data import DATASETS, best_present


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the paper's study can be told, and its defaults."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.set_defaults(run=run)
    add = parser.add_argument_group("what is trained").add_argument
    add("--seeds", nargs="+", type=natural, default=[0, 1], metavar="N", help="one run of each scenario per seed")
    add("--epochs", type=count, default=15, metavar="N", help="epochs of every run")
    add("--dataset", choices=("auto", *DATASETS), default="auto", help="auto: the best that is there already")
    add("--data-dir", default="data", metavar="DIR", help="where data sets lie and are downloaded to")
    add(
        "--thresholds",
        type=two_thresholds,
        default="0.85,0.90",
        metavar="A,A",
        help="validation accuracies at which dynamic runs climb (default %(default)s)",
    )
    add = parser.add_argument_group("where it goes").add_argument
    add("--runs-dir", default="runs/study", metavar="DIR", help="logs, metrics and checkpoints of the runs")
    add("--output-dir", type=Path, default=DOCS, metavar="DIR", help=f"of {TABLE} and {RESULTS}")
    add("--tables-only", action="store_true", help="train nothing; show the runs that are finished")


def two_thresholds(text: str) -> str:
    """Two ascending accuracies separated by a comma; returned as typed."""
    if len(accuracies(text)) != 2:
        raise argparse.ArgumentTypeError(f"{text!r}: three levels need two thresholds")
    return text


def collect(args: argparse.Namespace, study: Study) -> list[Result]:
    """The results of all runs, trained where they are not there yet."""
    results = []
    for seed in args.seeds:
        for scenario in SCENARIOS:
            result = study.result(scenario, seed, args.thresholds)
            if result is None and args.tables_only:
                print(f"{scenario.title}, seed {seed}: not finished; left out", flush=True)
                continue
            if result is None:
                result = study.train(scenario, seed, args.thresholds, lambda text: print(text, flush=True))
            results.append(result)
            print(paper_table.sentence(result), flush=True)
    return results


def run(args: argparse.Namespace) -> None:
    """Train what is missing, and write the page and the file of numbers.

    Raises:
        RunError: there is no data set, a run failed, or another one lies in its place.
        OSError: a file cannot be read or written.
        subprocess.TimeoutExpired: a run took longer than it may.
    """
    if args.dataset == "auto":
        args.dataset = best_present(Path(args.data_dir))
    study = Study(Path(args.runs_dir), shared_flags(args))
    results = collect(args, study)
    if not results:
        raise RunError(f"no finished run in {args.runs_dir}")
    output = args.output_dir or DOCS
    paper_table.write(output, results, command=args.command, thresholds=args.thresholds)
    print(f"wrote {output / TABLE} and {output / RESULTS}", flush=True)
