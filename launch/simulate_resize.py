"""What to do with residuals when the number of workers changes: an experiment with Gaussian gradients.

    python launch/simulate_resize.py

Workers come and go (4, 2, 3, 1, 2). At every change error feedback owes something to each; what a worker that leaves is
owed is lost in any case. Printed, as Markdown, is the relative error of everything that was applied against the sum
of the exact means, for what can be done with the residuals of those who stay:

    keep      as they are
    rescale   by new size / old size, so that residual / size, which is what arrives, stays what it was
    drop      to zero
"""

from __future__ import annotations

import argparse

import torch
from table import markdown
from values import count, natural

from hvd_dyncomp.kernels.reference import decode, encode

BLOCK_SIZE = 512
SIZES = (4, 2, 3, 1, 2)
RULES = {
    "keep": lambda old, new: 1.0,
    "rescale": lambda old, new: new / old,
    "drop": lambda old, new: 0.0,
}


def error(rule: str, bits: int, *, steps: int, blocks: int, seed: int) -> float:
    """Relative error after `steps` steps at each of the sizes."""
    generator = torch.Generator().manual_seed(seed)
    values = blocks * BLOCK_SIZE
    residuals: list[torch.Tensor] = []
    applied, exact = torch.zeros(values), torch.zeros(values)
    for size in SIZES:
        scale = RULES[rule](len(residuals), size) if residuals else 1.0
        residuals = [residual * scale for residual in residuals[:size]]
        residuals += [torch.zeros(values) for _ in range(size - len(residuals))]
        for _ in range(steps):
            gradients = [torch.randn(values, generator=generator) for _ in range(size)]
            # A single worker exchanges nothing: its residual is released into its gradient.
            sent = [
                encode(gradient, residual, bits=bits, block_size=BLOCK_SIZE) if size > 1 else None
                for gradient, residual in zip(gradients, residuals, strict=True)
            ]
            for gradient, residual, payload in zip(gradients, residuals, sent, strict=True):
                if payload is None:
                    applied += gradient + residual
                    residual.zero_()
                else:
                    applied += decode(payload, bits=bits, block_size=BLOCK_SIZE) / size
                exact += gradient / size
    return float((applied - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=count, default=10, metavar="N", help="steps at each size (default 10)")
    parser.add_argument("--blocks", type=count, default=64, metavar="N", help=f"of {BLOCK_SIZE} values (default 64)")
    parser.add_argument("--seed", type=natural, default=0)
    args = parser.parse_args()
    sizes = {"steps": args.steps, "blocks": args.blocks, "seed": args.seed}
    rows = [(str(bits), *(f"{error(rule, bits, **sizes):.4f}" for rule in RULES)) for bits in (1, 2, 4, 8)]
    print(markdown(("bits", *RULES), rows))


if __name__ == "__main__":
    main()
