"""How much may a residual add to a gradient? An experiment, for docs/tables/simulations.md.

    python launch/study.py --simulate bound

Printed, as Markdown, for several rules that bound the residual of a block by the block's gradient:

    reached     how large residuals become beside gradients without a bound
    error       relative error of the sum of all means that were delivered, where nothing is wrong: a rule must not cut
    arrived     share of a gradient that is non-zero in few places that arrived after 30 steps
    recovery    norm of the update over that of the true mean, 1, 2, 3 and 4 steps after a step with values 10,000 times
                as large, whose update was thrown away

With two workers every value is quantized once, with three twice.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator

import torch

from common.markdown import markdown
from common.values import count, natural
from hvd_dyncomp.kernels.reference import decode, encode, residual_bound

BLOCK_SIZE = 512
Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def clamped(limit: Callable[[torch.Tensor], torch.Tensor]) -> Rule:
    return lambda gradient, residual: residual.clamp(-limit(gradient), limit(gradient))


def largest(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.abs().amax(dim=1, keepdim=True)


def norm(values: torch.Tensor) -> torch.Tensor:
    return values.norm(dim=1, keepdim=True)


def scaled(factor: float) -> Rule:
    """To at most `factor` times the gradient's norm: what the kernels do, with 2 from one bit on."""
    return lambda g, residual: residual * (factor * norm(g) / norm(residual).clamp(min=1e-30)).clamp(max=1)


RULES: dict[str, Rule] = {
    "unbounded": lambda gradient, residual: residual,
    **{f"clamp at {c} max": clamped(lambda g, c=c: c * largest(g)) for c in (1, 2, 4, 8)},  # type: ignore[misc]
    **{f"clamp at {c} rms": clamped(lambda g, c=c: c * norm(g) / math.sqrt(BLOCK_SIZE)) for c in (4, 8)},  # type: ignore[misc]
    **{f"norm to {c}": scaled(c) for c in (2, 4, 6, 8)},
}


class Workers:
    """Simulated workers with their residuals under a rule."""

    def __init__(self, size: int, values: int, bits: float, rule: Rule) -> None:
        self.bits, self.rule = bits, rule
        self.own, self.shards = [torch.zeros(values) for _ in range(size)], torch.zeros(values)

    def mean(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        total = sum((self._sent(g, own) for g, own in zip(gradients, self.own, strict=True)), torch.zeros(()))
        return (self._sent(total, self.shards) if len(self.own) > 2 else total) / len(self.own)

    def _sent(self, gradient: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """What others decode; updates the residual."""
        rows = gradient.view(-1, BLOCK_SIZE)
        x = (rows + self.rule(rows, residual.view_as(rows))).view(-1)
        sent = decode(encode(x, None, bits=self.bits, block_size=BLOCK_SIZE), bits=self.bits, block_size=BLOCK_SIZE)
        residual.copy_(x - sent)
        return sent


def gradients(kind: str, size: int, steps: int, values: int, seed: int) -> Iterator[list[torch.Tensor]]:
    """Per step, one gradient a worker."""
    generator = torch.Generator().manual_seed(seed)
    constant = torch.randn(values, generator=generator)
    places = torch.arange(values) % BLOCK_SIZE < {"1/16": BLOCK_SIZE // 16, "1/512": 1}.get(kind, BLOCK_SIZE)
    for step in range(steps):
        drawn = torch.randn(size, 4, values, generator=generator)
        noise = drawn[:, 0]
        if kind == "Student t3":
            noise = noise / (drawn[:, 1:].square().sum(dim=1) / 3).sqrt()
        if kind in ("mixed", "rarely large", "slow"):
            noise = noise + constant / 3
        if kind == "constant":
            noise = noise * 0.3 + constant
        if kind.startswith("1/"):
            noise = (1 + 0.3 * noise) * places
        if kind == "rarely large" and step % 10 == 0:
            noise = noise * 10
        if kind == "slow":
            noise = noise * math.exp(1.5 * math.sin(step / 5))
        yield list(noise)


class Sums:
    """What a rule delivers of a kind of gradient, and what it should have."""

    def __init__(self, rule: str, kind: str, size: int, bits: int, steps: int, values: int, seed: int) -> None:
        workers = Workers(size, values, bits, RULES[rule])
        self.delivered, self.exact = torch.zeros(values), torch.zeros(values)
        for each in gradients(kind, size, steps, values, seed):
            self.exact += torch.stack(each).mean(0)
            self.delivered += workers.mean(each)

    @property
    def error(self) -> float:
        return float((self.delivered - self.exact).norm() / self.exact.norm())

    @property
    def arrived(self) -> float:
        return float((self.delivered * self.exact).sum() / self.exact.square().sum())


def recovery(rule: str, every: int, size: int, bits: int, values: int, seed: int) -> str:
    """Norms of the updates after a step in which every so-manyth value is 10,000 times as large."""
    workers, norms = Workers(size, values, bits, RULES[rule]), []
    for step, each in enumerate(gradients("mixed", size, 15, values, seed)):
        if step == 10:
            for gradient in each:
                gradient[::every] *= 10_000
        update, exact = workers.mean(each), torch.stack(each).mean(0)
        norms.append(f"{float(update.norm() / exact.norm()):.3g}")
    return " ".join(norms[11:])


def reached(kind: str, size: int, bits: float, values: int, seed: int) -> str:
    """Without a bound: the largest |e| / |g| of a block in 100 steps, and how many are above the bound."""
    workers, ratios = Workers(size, values, bits, RULES["unbounded"]), []
    for each in gradients(kind, size, 100, values, seed):
        ratios.append(norm(workers.own[0].view(-1, BLOCK_SIZE)) / norm(each[0].view(-1, BLOCK_SIZE)))
        workers.mean(each)
    found = torch.cat(ratios)
    return f"{float(found.max()):.1f} ({100 * float((found > residual_bound(bits)).float().mean()):.1f} %)"


# Kind, workers, bits, steps.
ERRORS = [
    ("Student t3", 3, 1, 30),
    ("Student t3", 3, 4, 30),
    ("slow", 3, 1, 30),
    ("rarely large", 2, 1, 100),
    ("rarely large", 3, 2, 100),
    ("constant", 2, 1, 100),
    ("constant", 3, 2, 100),
]
KINDS = ("Gauss", "Student t3", "mixed", "rarely large", "slow", "constant")
SPARSE = [("1/16", 2, 1), ("1/16", 3, 2), ("1/512", 2, 2), ("1/512", 2, 4)]
SPIKES = [(1, 2, 1), (1, 2, 2), (1, 3, 2), (1, 3, 4), (BLOCK_SIZE, 2, 2), (BLOCK_SIZE, 3, 2)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this experiment can be told, and its defaults."""
    parser.add_argument("--blocks", type=count, default=16, metavar="N", help=f"of {BLOCK_SIZE} values (default 16)")
    parser.add_argument("--seed", type=natural, default=0, help="of the gradients (default 0)")


def run(args: argparse.Namespace) -> None:
    """Compute all and print the tables."""
    torch.set_num_threads(1)
    values = args.blocks * BLOCK_SIZE
    levels = (0.125, 0.25, 0.5, 1, 2, 4)
    rows = [(kind, *(reached(kind, 2, bits, values, args.seed) for bits in levels)) for kind in KINDS]
    print("reached\n\n" + markdown(("gradients", *(f"{bits} bit" for bits in levels)), rows) + "\n")
    heads = [f"{kind}, N = {size}, {bits} bit" for kind, size, bits, _ in ERRORS]
    rows = [(rule, *(f"{Sums(rule, *case, values, args.seed).error:.3f}" for case in ERRORS)) for rule in RULES]
    print("error\n\n" + markdown(("rule", *heads), rows))
    heads = [f"{kind} non-zero, N = {size}, {bits} bit" for kind, size, bits in SPARSE]
    rows = [(rule, *(f"{Sums(rule, *case, 30, values, args.seed).arrived:.2f}" for case in SPARSE)) for rule in RULES]
    print("\narrived\n\n" + markdown(("rule", *heads), rows))
    heads = [f"{'all' if every == 1 else 'one'}, N = {size}, {bits} bit" for every, size, bits in SPIKES]
    rows = [(rule, *(recovery(rule, *case, values, args.seed) for case in SPIKES)) for rule in RULES]
    print("\nrecovery\n\n" + markdown(("rule", *heads), rows))
