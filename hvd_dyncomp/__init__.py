"""Gradient compression for PyTorch's DistributedDataParallel and FSDP2, for Horovod, and for loops of your own.

    quantizer = hvd_dyncomp.ddp.compress(DistributedDataParallel(model), 4)

sends gradients in 4 bits per value instead of 32. `fsdp` compresses what replicas of a sharded model average,
`DynamicQuantizer` the gradients of a Horovod optimizer, and an `Averager` whatever your own loop hands over.

A constant level needs nothing else. `Controller` moves the level on all ranks at once, as a policy decides:
`StepFunction`, `Plateau`, `CriticalRegime`, `LinkAware`, `Static` or `Schedule`. `less_momentum` is for few bits,
`AllRanks` for checkpoints that keep what rank 0 has, `PerRank` for those of `torch.distributed.checkpoint`.
"""

import importlib
from typing import TYPE_CHECKING

from hvd_dyncomp.controller import Controller
from hvd_dyncomp.errors import ControllerError, HorovodMissing, LockstepError
from hvd_dyncomp.levels import LEVELS
from hvd_dyncomp.meter import Meter, Traffic
from hvd_dyncomp.momentum import less_momentum
from hvd_dyncomp.policies import (
    CriticalRegime,
    Decision,
    LinkAware,
    Plateau,
    Policy,
    Record,
    Schedule,
    Static,
    StepFunction,
)

if TYPE_CHECKING:
    from hvd_dyncomp import ddp, fsdp  # noqa: F401  # editors complete them
    from hvd_dyncomp.averaging import Averager
    from hvd_dyncomp.sessions.all_ranks import AllRanks
    from hvd_dyncomp.sessions.per_rank import PerRank

__version__ = "0.1.0"

__all__ = [
    "LEVELS",
    "AllRanks",
    "Averager",
    "Controller",
    "ControllerError",
    "CriticalRegime",
    "Decision",
    "DynamicQuantizer",
    "LinkAware",
    "LockstepError",
    "Meter",
    "PerRank",
    "Plateau",
    "Policy",
    "Record",
    "Schedule",
    "Static",
    "StepFunction",
    "Traffic",
    "less_momentum",
]

_LATE = {"Averager": "averaging", "AllRanks": "sessions.all_ranks", "PerRank": "sessions.per_rank"}
_MODULES = ("ddp", "fsdp")

# Without Horovod, `hvd_dyncomp.ddp`, `hvd_dyncomp.fsdp`, `Averager`, policies and kernels still work.
# `DynamicQuantizer` needs Horovod: its first use raises an error that says what is missing.
_horovod_missing = ""
try:
    import hvd_dyncomp.on_horovod.elastic  # noqa: F401  # registers with Horovod
    from hvd_dyncomp.on_horovod.quantizer import DynamicQuantizer
except HorovodMissing as _error:
    _horovod_missing = str(_error)


def __getattr__(name: str):
    if _horovod_missing and name == "DynamicQuantizer":
        raise ImportError(_horovod_missing)
    # Imported late: nobody pays for what is not used.
    if name in _MODULES:
        return importlib.import_module(f"hvd_dyncomp.{name}")
    if name in _LATE:
        return getattr(importlib.import_module(f"hvd_dyncomp.{_LATE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__, *_MODULES})  # an interpreter completes what is imported late, too
