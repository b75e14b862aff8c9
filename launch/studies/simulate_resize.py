"""What to do with residuals when the number of workers changes: an experiment, for docs/design.md.

    python launch/study.py --simulate resize

Gradients are Gaussian, and workers come and go: 4, 2, 3, 1, 2 of them. At every change error feedback owes something
to each; what it owes to a worker that leaves is lost. Printed, as Markdown, is the relative error of the sum of all
means that were delivered, for what can be done with the residuals of those who stay:

    drop            to zero
    keep            as they are; a shard's residual, whose shard is no more, joins its owner's own
    rescale own     own residuals by new size / old size, so that residual / size, which is what arrives, stays what it
                    was; residuals of shards are dropped
    rescale         both
"""

from __future__ import annotations

import argparse

import torch

from common.markdown import markdown
from common.values import count, natural
from hvd_dyncomp.kernels.reference import decode, decode_sum, encode

BLOCK_SIZE = 512
SIZES = (4, 2, 3, 1, 2)
RULES = ("drop", "keep", "rescale own", "rescale")


class Workers:
    """Residuals of simulated workers, and the mean that their exchange delivers."""

    def __init__(self, size: int, values: int, bits: int) -> None:
        self.size, self.values, self.bits = size, values, bits
        self.own = [torch.zeros(values) for _ in range(size)]
        self.shards = torch.zeros(values)

    def resized(self, size: int, rule: str) -> Workers:
        """Those who stay after a change, and new ones, who owe nothing."""
        after = Workers(size, self.values, self.bits)
        scale = size / self.size if rule.startswith("rescale") else 1.0
        each = self.values // self.size
        for rank in range(min(size, self.size) if rule != "drop" else 0):
            after.own[rank] = self.own[rank].clone()
            if rule != "rescale own":
                mine = slice(rank * each, (rank + 1) * each)
                after.own[rank][mine] += self.shards[mine]
            after.own[rank] *= scale
        return after

    def mean(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """As the exchange does it: one worker sends nothing, two send all to each other, more share the sum."""
        if self.size == 1:
            released, self.own[0] = self.own[0], torch.zeros(self.values)
            return gradients[0] + released
        sent = [self._encode(gradient, own) for gradient, own in zip(gradients, self.own, strict=True)]
        total = decode_sum(sent, bits=self.bits, block_size=BLOCK_SIZE)
        if self.size > 2:
            total = decode(self._encode(total, self.shards), bits=self.bits, block_size=BLOCK_SIZE)
        return total / self.size

    def _encode(self, values: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return encode(values, residual, bits=self.bits, block_size=BLOCK_SIZE)


def error(rule: str, bits: int, *, steps: int, blocks: int, seed: int) -> float:
    """Relative error after `steps` steps at each of the sizes."""
    generator = torch.Generator().manual_seed(seed)
    values = blocks * BLOCK_SIZE
    workers = Workers(SIZES[0], values, bits)
    delivered, exact = torch.zeros(values), torch.zeros(values)
    for size in SIZES:
        workers = workers.resized(size, rule) if size != workers.size else workers
        for _ in range(steps):
            gradients = [torch.randn(values, generator=generator) for _ in range(size)]
            exact += torch.stack(gradients).mean(0)
            delivered += workers.mean(gradients)
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
    rows = [(str(bits), *(f"{error(rule, bits, **sizes):.4f}" for rule in RULES)) for bits in (1, 2, 4, 8)]
    print(markdown(("bits", *RULES), rows))
