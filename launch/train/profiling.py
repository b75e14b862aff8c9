"""--profile: some steps as torch's profiler sees them, in a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from common.errors import RunError

FILE = "profile.json.gz"  # in the output folder
STEPS = 2  # that are recorded
LEAST = 2 + STEPS  # steps that an epoch needs: one that is left out, and one in which the profiler begins


def profile_of_steps(folder: Path, device: torch.device, steps: int) -> profile:
    """A profiler that writes `FILE` after two of the first steps of an epoch, which has so many.

    Raises:
        RunError: there are too few steps.
    """
    if steps < LEAST:
        raise RunError(f"--profile: needs epochs of at least {LEAST} steps, and they have {steps}")
    # Its library tells each beginning and end on stderr, and reads this when it is first used.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    return profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])],
        # In the first steps buckets are made, and on a GPU kernels are compiled.
        schedule=schedule(wait=min(8, steps - 1 - STEPS), warmup=1, active=STEPS, repeat=1),
        on_trace_ready=lambda seen: seen.export_chrome_trace(str(folder / FILE)),
        experimental_config=_all_threads(),
    )


def _all_threads() -> torch._C._profiler._ExperimentalConfig | None:
    """Has the quantizer's own thread be seen as well, where torch can; by default only the program's is."""
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except (AttributeError, TypeError):  # an older torch, or another one
        return None
