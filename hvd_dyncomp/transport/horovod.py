"""The transport over Horovod. Beside commands, the only file that imports Horovod."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hvd_dyncomp.errors import HorovodMissing
from hvd_dyncomp.transport import mpi_settings
from hvd_dyncomp.transport.background import Background
from hvd_dyncomp.transport.base import Transport, of_all
from hvd_dyncomp.transport.launched import missing

try:
    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError
    from horovod.torch.compression import Compressor
    from horovod.torch.elastic.state import StateHandler, get_handler_registry
    from horovod.torch.mpi_ops import _allgather_async, _alltoall_async, _basics  # with receivers of ours
except ImportError as _error:
    raise HorovodMissing(
        "hvd_dyncomp needs Horovod built for torch: run 'make setup' in a clone of hvd_dyncomp, "
        "or build it as https://horovod.readthedocs.io/en/stable/install.html says"
    ) from _error

__all__ = [
    "Compressor",
    "HorovodTransport",
    "StateHandler",
    "averaging_factor",
    "register_state_handler",
]

logger = logging.getLogger(__name__)

_advised: set[str] = set()
_labels: Counter[int] = Counter()
_owners: dict[int, list[torch.Tensor]] = {}  # of tensors that Horovod has, by handle
_BACKGROUND_SECONDS = 0.02  # between two calls of what goes on in the background
_WAY_SECONDS = 2e-4  # a bucket; longer gained no more
# With either, by its source, Horovod reports a GPU's collective as over when it has only begun, and makes the default
# stream wait for it. None of our streams is the default one.
_EARLY = ("HOROVOD_ENABLE_ASYNC_COMPLETION", "HOROVOD_ENABLE_XLA_OPS")


class HorovodTransport(Transport):
    """The ranks of a Horovod process set, or all ranks."""

    def __init__(self, process_set: Any = None) -> None:
        self._process_set = process_set

    # rank, size and local_size: ValueError if `hvd.init()` has not been called.

    @property
    def rank(self) -> int:
        return hvd.rank() if self._process_set is None else self._process_set.rank()

    @property
    def size(self) -> int:
        return hvd.size() if self._process_set is None else self._process_set.size()

    @property
    def local_size(self) -> int:
        return hvd.local_size()

    @property
    def changes(self) -> bool:  # type: ignore[override]  # which no program sets
        return os.environ.get("HOROVOD_ELASTIC", "") == "1"  # of Horovod's elastic launchers

    def unsupported_reason(self, device: torch.device) -> str:
        if device.type != "cuda":
            return ""
        # By its source, it would start a copy to main memory and send before the copy is over.
        if torch.version.hip is not None:  # torch calls AMD's GPUs "cuda", too
            if not hvd.rocm_built():
                return "Horovod was built without ROCm; build it with HOROVOD_GPU=ROCM"
        elif not hvd.cuda_built():
            return "Horovod was built without CUDA; build it with HOROVOD_GPU_OPERATIONS=NCCL, or HOROVOD_GPU=CUDA"
        for name in _EARLY:
            if os.environ.get(name, "").lstrip(" 0")[:1].isdigit():  # as Horovod reads it
                return f"{name} is set, so gradients would be read before they have arrived; unset it"
        return ""

    def within(self, process_set: Any) -> HorovodTransport:
        return HorovodTransport(process_set)

    def new_label(self, kind: str) -> str:
        # By process set: Horovod knows names of all transports of one.
        number = self._everyone.process_set_id
        _labels[number] += 1
        return f"{kind}{_labels[number]}"

    def alltoall(
        self,
        tensor: torch.Tensor,
        ranks: Sequence[int],
        splits: list[int],
        arriving: list[int],
        name: str,
        out: torch.Tensor | None = None,
    ) -> int:
        # It needs no process set: nothing is sent to ranks that get 0 bytes.
        lengths = torch.tensor(of_all(self.size, ranks, splits), dtype=torch.int32, device="cpu")
        received = tensor.new_empty(sum(arriving)) if out is None else out
        return self._request(_alltoall_async, tensor, lengths, received, lengths.new_empty(0), name=name)

    def allgather(self, tensor: torch.Tensor, name: str, arriving: list[int] | None = None) -> int:
        with torch.inference_mode(False):  # Horovod's thread writes, and is in no such mode
            sent = tensor.clone() if tensor.is_inference() else tensor
            return self._request(_allgather_async, sent, sent.new_empty(sum(arriving or ())), name=name)

    def sum(self, tensor: torch.Tensor, name: str) -> int:
        return self._request(functools.partial(hvd.allreduce_async_, op=hvd.Sum), tensor, name=name)

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.float64)  # on CPUs; and a sum may be too large for float16

    def poll(self, handle: int) -> bool:
        return hvd.poll(handle)

    def wait(self, handle: int) -> torch.Tensor:
        try:
            received = hvd.synchronize(handle)
        except HorovodInternalError:
            # Horovod's thread may be ending, as after the loss of a rank. Then it frees what is queued, with a lock of
            # its own in hand. This takes that lock without Python's; requests would have Python's in hand.
            _basics.MPI_LIB_CTYPES.horovod_number_of_process_sets()
            raise
        finally:
            _owners.pop(handle, None)
        return received[0] if isinstance(received, tuple) else received

    def in_background(self, work: Callable[[], bool]) -> None:
        _background.add(work)

    def yield_cpu(self) -> None:
        # Horovod's thread polls and yields. On a core that backward keeps busy it gets every other turn, but needs
        # several in a row to find new requests and to put them on the socket.
        time.sleep(_WAY_SECONDS)

    def advise(self, devices: Iterable[torch.device]) -> None:
        if hvd.rank() == 0:
            for advice in filter(None, (_about_ranks(), self._about_mpi(devices), _about_streams(devices))):
                if advice not in _advised:
                    logger.warning(advice)
                    _advised.add(advice)

    def _about_mpi(self, devices: Iterable[torch.device]) -> str:
        """The settings that this job's Open MPI lacks; docs/horovod.md has their cost."""
        if not hvd.mpi_enabled():
            return ""
        by_mpi = not hvd.nccl_built() or any(device.type == "cpu" for device in devices)
        wanted = mpi_settings.settings(
            few_cores=2 * self.local_size > len(os.sched_getaffinity(0)),
            over_tcp=by_mpi and hvd.size() > self.local_size,
        )
        missing = [f"{name}={value}" for name, value in wanted.items() if name not in os.environ]
        if not missing:
            return ""
        return f"steps are longer than necessary with Open MPI's defaults (docs/horovod.md); export {' '.join(missing)}"

    def _request(self, start: Callable[..., int], *tensors: torch.Tensor, name: str) -> int:
        owners = [_owner(tensor) for tensor in tensors]
        handle = start(*tensors, name=name, process_set=self._everyone)
        _owners[handle] = owners
        return handle

    @property
    def _everyone(self) -> Any:
        return hvd.global_process_set if self._process_set is None else self._process_set


def _owner(tensor: torch.Tensor) -> torch.Tensor:
    """An owner of a tensor beside Python and Horovod, so that Horovod's thread can let go of it without Python's lock.

    Where that thread ends, it has a lock of its own in hand, which the program may want with Python's in hand.
    """
    owner = tensor.detach()
    owner.grad = tensor
    return owner


def _about_ranks() -> str:
    """Where another launcher than Horovod's has started ranks that each train alone, without a word of Horovod's."""
    elastic = "HOROVOD_SIZE" in os.environ  # or not: it says how many there were at first
    return "" if elastic else missing(hvd.size())


def _about_streams(devices: Iterable[torch.device]) -> str:
    """By its source, Horovod's thread waits for a GPU's default stream before each alltoall."""
    gpus = [device for device in devices if device.type == "cuda"]
    if all(torch.cuda.current_stream(gpu) != torch.cuda.default_stream(gpu) for gpu in gpus):
        return ""
    return (
        "gradients are made in the default stream, and Horovod waits for that stream before it sends; call "
        "torch.cuda.set_stream(torch.cuda.Stream()) before you make model and optimizer (docs/horovod.md, GPUs)"
    )


def _pause() -> None:
    time.sleep(_BACKGROUND_SECONDS)


_background = Background(_pause)


def averaging_factor(op: object, world_size: int) -> float:
    """The factor of a sum over ranks under Horovod's reduction `op`.

    Raises:
        ValueError: the reduction is not linear in the gradients (Adasum, Min, ...).
    """
    if op == hvd.Average:
        return 1.0 / world_size
    if op == hvd.Sum:
        return 1.0
    name = "Adasum" if op == hvd.Adasum else repr(op)
    raise ValueError(f"DynamicQuantizer works with op=hvd.Average and op=hvd.Sum, got op={name}")


def register_state_handler(kind: type, handler: type[StateHandler]) -> None:
    """Make `hvd.elastic.TorchState` keep objects of a class with a handler, instead of pickling them."""
    registry = get_handler_registry()
    if (kind, handler) not in registry:
        registry.append((kind, handler))
