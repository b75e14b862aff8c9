"""May a residual be stored as bfloat16? An experiment, for docs/tables/simulations.md.

    python launch/study.py --simulate storage

One value of eight has a large gradient, noisy around 1; the others have a small one that never changes. At few bits
the small ones travel only after their residuals have become large, and bfloat16 has 8 digits: rounded to nearest, a
residual of more than 512 times the gradient stands still. Printed, as Markdown, is the relative error of all that was
delivered of the small gradients, with what the residuals still hold: what is lost for good. Rounded up or down at
random is what the library does; float32 loses only what equation 1a cuts off.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from common.markdown import markdown
from common.values import count, natural
from hvd_dyncomp.kernels import reference
from screening.codec import BLOCK_SIZE

Storage = tuple[torch.dtype, Callable[[torch.Tensor, int], torch.Tensor]]

# What a residual is, and what makes it of float32 and of a step's dither.
STORAGES: dict[str, Storage] = {
    "float32": (torch.float32, lambda residual, _: residual),
    "bfloat16, to nearest": (torch.bfloat16, lambda residual, _: residual.to(torch.bfloat16)),
    "bfloat16, at random": (torch.bfloat16, reference.stored),
}
LEVELS = (1 / 8, 1 / 4, 1 / 2, 2, 4)


def lost(storage: Storage, bits: float, small: float, *, steps: int, blocks: int, seed: int) -> float:
    """Relative error of delivered + residual, over the small gradients of all steps."""
    dtype, rounded = storage
    generator, values = torch.Generator().manual_seed(seed), blocks * BLOCK_SIZE
    large = torch.randperm(values, generator=generator) % 8 == 0
    residual, exact = torch.zeros(values, dtype=dtype), torch.zeros(values, dtype=torch.float64)
    delivered, dithers = torch.zeros_like(exact), random.Random(seed)
    shape: dict[str, Any] = {"bits": bits, "block_size": BLOCK_SIZE}
    with patch.object(reference, "stored", rounded):
        for _ in range(steps):
            gradient = torch.where(large, 1 + torch.randn(values, generator=generator), small)
            payload = reference.encode(gradient, residual, dither=dithers.getrandbits(32), **shape)
            delivered += reference.decode(payload, **shape)
            exact += gradient
    error = (delivered + residual - exact)[~large].norm() / exact[~large].norm()
    return float(error)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this experiment can be told, and its defaults."""
    parser.add_argument("--steps", type=count, default=3000, metavar="N", help="steps of each sum (default 3000)")
    parser.add_argument("--blocks", type=count, default=4, metavar="N", help=f"of {BLOCK_SIZE} values (default 4)")
    parser.add_argument("--seed", type=natural, default=0, help="of gradients and dithers (default 0)")


def run(args: argparse.Namespace) -> None:
    """Compute all and print the table."""
    torch.set_num_threads(1)
    sizes = {"steps": args.steps, "blocks": args.blocks, "seed": args.seed}
    rows = [
        (f"{bits:g} bits, {small:g}", *(f"{lost(storage, bits, small, **sizes):.3f}" for storage in STORAGES.values()))
        for bits in LEVELS
        for small in (0.01, 0.001)
    ]
    print(markdown(("level, small gradient", *STORAGES), rows))
