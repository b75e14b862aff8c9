"""The backend of torch.distributed by which FSDP2 and `replicate` have their gradients averaged over replicas.

torch itself calls `allreduce` of the group of replicas, once for each unit (what one call of `fully_shard` has put
together) and only where one is due. Nothing of FSDP2 is changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvd_dyncomp.autograd import NO_PASS, call_at_end, current_pass
from hvd_dyncomp.fsdp.quantizer import Quantizer
from hvd_dyncomp.torch_names import check_names
from hvd_dyncomp.transport.torch_distributed import transport

NAME = "hvd_dyncomp"
# How torch's methods that exchange something begin.
_COLLECTIVES = (
    *("all", "barrier", "broadcast", "gather", "monitored_barrier", "recv", "reduce", "scatter", "send"),
    *("start_coalescing", "end_coalescing"),
)
UNCLAIMED = (
    "backward has called all_reduce with {} values on the replicas' process group, but no unit of an attached model "
    "has. Either a model of this mesh is not attached (attach all of them, or none), or its all-reduce hook was "
    "replaced, or the program itself calls all_reduce within backward: it needs a group of its own for that"
)
ELSEWHERE = (
    "FSDP has averaged an attached model over another process group than that of the backend hvd_dyncomp: the program "
    "has several meshes of these ranks. Give fully_shard the one with backend_override, and attach its group: "
    'attach(model, replicas=mesh.get_group("replicate"))'
)


class Attached:
    """What is known of the models that some ranks average: shared by all groups of these ranks.

    Torch takes equal meshes for the same, whatever their backends are. So `device_mesh` of a parameter may be another
    mesh than `fully_shard` was given, with another group.

    Attributes:
        quantizers: those of models for which `attach` was called.
    """

    def __init__(self) -> None:
        self.quantizers: weakref.WeakSet[Quantizer] = weakref.WeakSet()
        self._noted: tuple[torch.Tensor, bool] | None = None  # that no unit has claimed yet

    def note(self, flat: torch.Tensor, sums: bool) -> None:
        """Note what an all-reduce was asked for: FSDP says next which unit's that is.

        Raises:
            RuntimeError: nobody has claimed the one before.
        """
        self.check()
        self._noted = flat, sums

    def claim(self, flat: torch.Tensor) -> bool | None:
        """Take what was noted, if it is this tensor.

        Returns:
            Whether the sum is wanted instead of the mean. None: there is nothing to do, as where autograd runs no pass.

        Raises:
            RuntimeError: FSDP has asked another group.
        """
        if self._noted is None or self._noted[0].data_ptr() != flat.data_ptr():
            if current_pass() != NO_PASS:
                raise RuntimeError(ELSEWHERE)
            return None
        (_, sums), self._noted = self._noted, None
        return sums

    def check(self) -> None:
        """Raises: RuntimeError: nobody has claimed what was noted."""
        if self._noted is not None:
            (flat, _), self._noted = self._noted, None
            raise RuntimeError(UNCLAIMED.format(flat.numel()))


class Replicas(dist.ProcessGroup):
    """The process group of the ranks that have the same shards. All but gradients goes through Gloo or NCCL.

    Gradients are dense tensors that are summed or averaged while a backward pass is under way. `dist.all_reduce`
    returns at once for what a model's `attach` knows; it is a mean when the pass has ended.

    Args:
        store, rank, timeout: torch's.
        ranks: of the group, as numbers in the whole job.
        settings: controller and arguments of `register_backend`.

    Attributes:
        settings: see above.
        config: which backend sends what, as `dist.get_backend_config` says it.
        attached: models for which `attach` was called.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta, settings: Mapping[str, Any]
    ) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # torch's stub lacks what its own docstring has
        # Not by `super()`: sums over a group whose class is Python's sometimes hang (torch 2.13, Gloo).
        self._stock = dist.ProcessGroup(store, rank, len(ranks))  # type: ignore[call-arg, arg-type]  # likewise
        check_names(self, ("_register_backend", "_set_default_backend"))
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("cpu", store), rank, len(ranks), timeout)
        self._send_by(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self.config = "cpu:gloo"
        if torch.cuda.is_available() and dist.is_nccl_available():
            check_names(dist, ("ProcessGroupNCCL",))
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("cuda", store), rank, len(ranks), options)
            self._send_by(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
            self.config += ",cuda:nccl"
        self.settings = settings
        self._quantizer: Quantizer | None = None
        self.attached = _attached.setdefault(tuple(ranks), Attached())
        latest[tuple(ranks)] = self

    def _send_by(self, device: torch.device, kind: Any, backend: Any) -> None:
        backend._set_sequence_number_for_group()
        for group in (self, self._stock):
            group._register_backend(device, kind, backend)
            group._set_default_backend(kind)

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer of models without `attach`. The first use is collective over the group, and blocks."""
        if self._quantizer is None:
            quantizer = Quantizer(**self.settings)
            quantizer.connect(self, "fsdp", transport(), {})
            self._quantizer = quantizer
        return self._quantizer

    def allreduce(self, tensors: Any, opts: Any = None, **options: Any) -> Any:  # type: ignore[override]  # of three
        """What `dist.all_reduce` calls, with a list and options."""
        if self.size() == 1 or not _are_gradients(tensors, opts) or not call_at_end(self.attached.check):
            return self._stock.allreduce(tensors, *([] if opts is None else [opts]), **options)
        [flat], sums = tensors, opts.reduceOp == dist.ReduceOp.SUM
        if self.attached.quantizers:
            self.attached.note(flat, sums)
        else:
            self.quantizer.on_call(flat, sums=sums)
        return _Done()


def _are_gradients(tensors: Any, opts: Any) -> bool:
    """Whether tensors are such that they may be a unit's gradients. FSDP averages, or sums and divides by itself."""
    if not isinstance(opts, dist.AllreduceOptions) or len(tensors) != 1:
        return False
    if not (opts.reduceOp == dist.ReduceOp.AVG or opts.reduceOp == dist.ReduceOp.SUM):  # no hash, and == one way only
        return False
    return tensors[0].is_floating_point() and tensors[0].layout is torch.strided and tensors[0].is_contiguous()


def _passed_on(name: str) -> Any:
    def method(self: Replicas, *arguments: Any, **options: Any) -> Any:
        return getattr(self._stock, name)(*arguments, **options)

    return method


for _name in vars(dist.ProcessGroup):
    if _name.lstrip("_").startswith(_COLLECTIVES) and _name != "allreduce":
        setattr(Replicas, _name, _passed_on(_name))


class _Done(dist.Work):
    """Of an all-reduce whose result comes later, or is there."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


# By ranks.
latest: weakref.WeakValueDictionary[tuple[int, ...], Replicas] = weakref.WeakValueDictionary()
_attached: dict[tuple[int, ...], Attached] = {}
