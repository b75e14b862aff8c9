"""Where all ranks that train a model are together: at the end of a backward pass that has reduced its gradients."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp.autograd import NO_PASS, call_at_end, computes, current_pass
from hvd_dyncomp.torch_names import check_names

SECONDS = 10.0  # to wait for the other ranks where a reducing pass ends; they are there, except in `model.join()`
_POLL_SECONDS = 0.01


class ReducingPasses:
    """Calls a function at the end of each backward pass in which a model has reduced its gradients.

    The model's own allreduce is over there, so every rank of its group comes to the same end. A forward call shows
    nothing of that kind: a rank may look at its model alone, in any mode, and go on.

    Args:
        model: none of its gradients has been computed in the pass that is under way.
        at_end: gets the model, and the pass's number from 1. What it raises, the program's `backward()` raises.

    Attributes:
        reduces: whether the model reduces in the next pass: it does if its latest call with gradients was not in
            `no_sync`.
    """

    def __init__(self, model: DistributedDataParallel, at_end: Callable[[DistributedDataParallel, int], None]) -> None:
        self._model, self._at_end = weakref.ref(model), at_end
        self.reduces = False
        self._passes = 0
        self._pass = NO_PASS  # whose end will be noticed
        self._gradients = 0
        self._knows_graph = False  # of a model with `static_graph`
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            for parameter in model.module.parameters()
            if parameter.requires_grad
        ]

    def close(self) -> None:
        """Call the function no more."""
        for handle in self._handles:
            handle.remove()

    def _on_gradient(self, _: torch.Tensor) -> None:
        self._gradients += 1
        if current_pass() != self._pass:
            self._pass = current_pass()
            # After what the model has told the pass to call at its end, which ends the model's reduction.
            call_at_end(lambda: call_at_end(self._on_end))

    def _on_end(self) -> None:
        model, all_came = self._model(), self._gradients >= len(self._handles)
        # A pass within another one (reentrant checkpoints): the model reduces where the last gradient has come.
        within = computes()
        if within and not all_came:
            return
        self._gradients, self._pass = 0, NO_PASS
        if within and model is not None and model.static_graph and not self._knows_graph:
            self._knows_graph = True  # the first time, such a model reduces where the outermost pass ends
        elif model is not None and self.reduces:
            self._passes += 1
            self._at_end(model, self._passes)


class Meetings:
    """Finds out, without a wait that has no end, whether all ranks of a process group are in the same place."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()  # by group; by name, as a program may make its groups anew

    def all_here(self, group: dist.ProcessGroup) -> bool:
        """Whether every rank of a group makes this call within `SECONDS` of the first. All ranks get the same answer.

        The calls of a rank for one group are numbered. Ranks meet in the job's store, and whoever sees the last one
        come, or has waited for too long, decides there, once for all of them.

        Raises:
            RuntimeError: the job has no store, or the store has ended.
        """
        ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
        place = f"hvd_dyncomp.run.{group.group_name}.{ranks}"
        self._held[place] += 1
        check_names(dist.distributed_c10d, ("_get_default_store",))
        store = dist.distributed_c10d._get_default_store()
        if store is None:
            raise RuntimeError("its process group has no store, as with MPI's backend")
        came, decision = (f"{place}.{self._held[place]}.{what}" for what in ("came", "decision"))
        if store.add(came, 1) == group.size():
            return bool(store.compare_set(decision, "", "yes") == b"yes")
        end = time.monotonic() + SECONDS
        while not store.check([decision]) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        return bool(store.compare_set(decision, "", "no") == b"yes")


def await_reduction(model: DistributedDataParallel) -> None:
    """Wait until the GPU has reduced a model's gradients, so until the other ranks are in the same pass, too.

    Over NCCL the end of a backward pass comes before that. No effect on CPUs, where backward itself waits.
    """
    for device in {parameter.device for parameter in model.parameters() if parameter.is_cuda}:
        torch.cuda.synchronize(device)
