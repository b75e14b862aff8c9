"""What memory.py runs on every rank, for one method in processes of its own. Not started by hand.

Its one argument is JSON: method, values, seed, device ("cpu" or "cuda"), ddp (what carries torch's tensors), file.
Rank 0 writes the file: for each rank the bytes by which the peak of its memory is higher than that of the same steps
without an exchange.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.steppers import start_torch
from common.device import choose
from hvd_dyncomp.commands.probe.methods import ALONE, Stepper
from hvd_dyncomp.commands.probe.tensors import Tensors
from hvd_dyncomp.transport import ranks
from hvd_dyncomp.transport.base import gather_json

TENSOR = 2**22  # values of each but the last
STEPS = 3
_FEW = 4096


def peaks(device: torch.device) -> dict[str, int]:
    """Bytes that this process has held at most until now: of the host's memory, and of its GPU's."""
    found = {"host": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.max_memory_allocated(device)
    return found


def take(steps: int, name: str, parameters: list[Tensor], gradient: Tensor) -> None:
    """Steps of a stepper, each of which hands over the same gradient for all parameters."""
    model = Tensors(parameters, [gradient[: parameter.numel()] for parameter in parameters])
    stepper = Stepper(name, model, lambda model: model())
    for _ in range(steps):
        stepper.step()
    stepper.finish()


def measure(spec: dict[str, Any], device: torch.device) -> dict[str, int]:
    """Collective."""
    values = spec["values"]
    generator = torch.Generator().manual_seed(1000 * spec["seed"] + ranks.transport().rank)
    gradient = torch.randn(min(values, TENSOR), generator=generator).to(device)
    parameters = [torch.zeros(TENSOR, device=device) for _ in range(values // TENSOR)]
    if values % TENSOR:
        parameters.append(torch.zeros(values % TENSOR, device=device))
    # Code, kernels and threads are there before, and do not pass for bytes of values.
    take(1, spec["method"], [torch.zeros(_FEW, device=device)], gradient[:_FEW])
    take(STEPS, ALONE, parameters, gradient)
    before = peaks(device)
    take(STEPS, spec["method"], parameters, gradient)
    return {name: peak - before[name] for name, peak in peaks(device).items()}


def main() -> None:
    spec = json.loads(sys.argv[1])
    ranks.start(spec["ddp"])
    torch.set_num_threads(1)
    device = choose(spec["device"])
    start_torch(spec["ddp"], [spec["method"]])
    everybody = gather_json(ranks.transport(), measure(spec, device), "memory.measured")
    if ranks.transport().rank == 0:
        Path(spec["file"]).write_text(json.dumps(everybody), encoding="utf-8")
    ranks.end()


if __name__ == "__main__":
    main()
