"""--profile: some steps as torch's profiler sees them, in a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from common.errors import RunError

FILE = "profile.json.gz"  # in the output folder
STEPS = 2  # that are recorded
_WARMUP = 1  # that the profiler takes to begin
_MOST_WAIT = 8  # before those: buckets are made, and on a GPU kernels are compiled
LEAST = 1 + _WARMUP + STEPS  # steps that an epoch needs


class Profile:
    """Of an epoch's first steps, after a few that are left out. On rank 0 only.

    Args:
        output_dir: where the file goes.
        device: that is trained on.
        steps: of the epoch.

    Attributes:
        where: in words.

    Raises:
        RunError: there are too few steps.
    """

    def __init__(self, output_dir: Path, device: torch.device, steps: int) -> None:
        if steps < LEAST:
            raise RunError(f"--profile: needs epochs of at least {LEAST} steps, and they have {steps}")
        self._path = output_dir / FILE
        wait = min(_MOST_WAIT, steps - _WARMUP - STEPS)
        seen = f"steps {wait + _WARMUP + 1} to {wait + _WARMUP + STEPS}"
        self.where = f"profile of {seen} of the first epoch, for ui.perfetto.dev or chrome://tracing: {self._path}"
        # Its library tells each beginning and end on stderr, and reads this when it is first used.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=_WARMUP, active=STEPS, repeat=1),
            experimental_config=_all_threads(),
        )

    def begin(self) -> None:
        """To be called before the epoch's first step."""
        self._profiler.start()

    def step(self) -> None:
        """To be called after each step."""
        self._profiler.step()

    def write(self) -> None:
        """To be called after the epoch.

        Raises:
            OSError: the file cannot be written.
        """
        self._profiler.stop()
        with tempfile.TemporaryDirectory(dir=self._path.parent, prefix="profile-") as folder:
            whole = Path(folder, FILE)  # torch packs what is called .gz
            self._profiler.export_chrome_trace(str(whole))
            os.replace(whole, self._path)


def _all_threads() -> torch._C._profiler._ExperimentalConfig | None:
    """Has the quantizer's own thread be seen as well, where torch can; by default only the program's is."""
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except (AttributeError, TypeError):  # an older torch, or another one
        return None
