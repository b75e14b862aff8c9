"""What to do with residuals when the number of workers changes: an experiment, for docs/tables/simulations.md.

    python launch/study.py --simulate resize

Gradients are Gaussian, and workers come and go: 4, 2, 3, 1, 2 hosts of one worker each, or hosts of several. At every
change error feedback owes something to each; what it owes to a worker that leaves is lost. Printed, as Markdown, is the
relative error of the sum of all means that were delivered, for what can be done with the residuals of those who stay:

    drop            to zero
    keep            as they are; a shard's residual, whose shard is no more, joins its owner's own
    rescale own     own residuals by new size / old size, so that residual / size, which is what arrives, stays what it
                    was; residuals of shards are dropped
    rescale near    both, but what a worker owes outside its new section is dropped
    rescale         all
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from common.markdown import markdown
from common.values import count, natural
from screening.codec import BLOCK_SIZE
from screening.workers import Workers

# By turns, the workers on each host.
COURSES = {
    "one worker a host": ((1,) * 4, (1,) * 2, (1,) * 3, (1,), (1,) * 2),
    "several": ((2, 2), (2, 2, 2), (3, 3), (2, 1), (2, 2)),
}
RULES = ("drop", "keep", "rescale own", "rescale near", "rescale")


def resized(workers: Workers, hosts: Sequence[int], rule: str) -> Workers:
    """Those who stay after a change, and new ones, who owe nothing. The library's own rule is "rescale"."""
    size = sum(hosts)
    residuals = [workers.residuals(rank) for rank in range(workers.size)] if rule != "drop" else []
    for own in residuals:
        if rule == "keep":
            own["factor"] = 1 / size  # as if they had come from so many workers
        if rule == "rescale own":
            for shard in own["shard_residuals"].values():
                shard["values"].zero_()
    after = workers.resized(hosts, residuals)
    if rule == "rescale near":
        after.forget_what_is_far()
    return after


def error(course: Sequence[Sequence[int]], rule: str, bits: float, *, steps: int, blocks: int, seed: int) -> float:
    """Relative error after `steps` steps at each of the sizes."""
    generator = torch.Generator().manual_seed(seed)
    values = blocks * BLOCK_SIZE
    workers = Workers(course[0], values)
    delivered, exact = torch.zeros(values), torch.zeros(values)
    for turn, hosts in enumerate(course):
        workers = resized(workers, hosts, rule) if turn else workers
        for _ in range(steps):
            gradients = [torch.randn(values, generator=generator) for _ in range(sum(hosts))]
            exact += torch.stack(gradients).mean(0)
            delivered += workers.mean(gradients, bits)
    return float((delivered - exact).norm() / exact.norm())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this experiment can be told, and its defaults."""
    parser.add_argument("--steps", type=count, default=10, metavar="N", help="steps at each size (default 10)")
    parser.add_argument("--blocks", type=count, default=60, metavar="N", help=f"of {BLOCK_SIZE} values (default 60)")
    parser.add_argument("--seed", type=natural, default=0, help="of the gradients (default 0)")


def run(args: argparse.Namespace) -> None:
    """Compute all and print the table."""
    torch.set_num_threads(1)
    sizes = {"steps": args.steps, "blocks": args.blocks, "seed": args.seed}
    for name, course in COURSES.items():
        rows = [(str(bits), *(f"{error(course, rule, bits, **sizes):.4f}" for rule in RULES)) for bits in (1, 2, 4, 8)]
        print(f"{markdown((f'bits, {name}', *RULES), rows)}\n")
