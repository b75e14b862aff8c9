"""What every rank of a benchmark does: `python -m bench.worker PART SPEC`. Started by start.py, not by hand.

PART is a module of this folder, and SPEC is JSON: what its `work` is told. "device" ("cpu" or "cuda", by default
"cpu"), "ddp" (what carries torch's tensors, by default "gloo") and "methods" are read here.
"""

from __future__ import annotations

import importlib
import json
import sys

import torch

from bench.steppers import start_torch
from common.device import choose
from hvd_dyncomp.commands import ranks


def main() -> None:
    part, spec = sys.argv[1], json.loads(sys.argv[2])
    backend = spec.get("ddp", "gloo")
    ranks.start(backend)
    torch.set_num_threads(1)
    device = choose(spec.get("device", "cpu"))
    start_torch(backend, spec["methods"])
    importlib.import_module(f"bench.{part}").work(spec, device)
    ranks.end()


if __name__ == "__main__":
    main()
