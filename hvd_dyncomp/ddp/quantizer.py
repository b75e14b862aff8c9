"""The quantizer of a model, and the hook by which the model hands it buckets of gradients."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp.autograd import call_at_end, computes, current_pass
from hvd_dyncomp.controller import Controller
from hvd_dyncomp.ddp.backward import Backward
from hvd_dyncomp.ddp.model import ModelGradients, check_kind, check_model, register
from hvd_dyncomp.policies import Policy
from hvd_dyncomp.sessions.advice import CAPTURED
from hvd_dyncomp.sessions.agreement import description, on_all_ranks
from hvd_dyncomp.sessions.session import Session
from hvd_dyncomp.transport.torch_distributed import transport


class Quantizer(Session):
    """The quantizer that `compress` returns.

    Attributes:
        controller: decides the level.
        bits: level of the next step: that of the controller or of the warm-up.
        meter: the `Meter` of the bytes that this rank has sent. It does not count sparse gradients.

    `loss.backward()` raises, on every rank:

    - `LockstepError`: the ranks differ in parameters, settings, level or step.
    - `ConnectionError`: another rank has ended.
    - `TimeoutError`: another rank does not answer in time.
    - `RuntimeError`: an error has ended an earlier step.
    """

    called, made_by = "a quantizer of hvd_dyncomp.ddp", "compress"

    def __init__(
        self,
        model: DistributedDataParallel,
        controller: Controller | Policy | float | None = None,
        **arguments: Any,
    ) -> None:
        check_kind(model)
        # A group with NCCL only sends the groups' name by the current GPU, which may not be the model's.
        on_own_gpu = torch.cuda.device(model.device) if model.device.type == "cuda" else contextlib.nullcontext()
        with on_own_gpu:
            ranks = transport(model.process_group)
        label = ranks.new_label("model")  # also of calls that fail: it must be the same on all ranks
        with on_all_ranks(ranks) as mine:
            check_model(model)
            super().__init__(controller, ranks, **arguments)
            embeddings = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
            sparse, skip = {module.weight for module in embeddings if module.sparse}, self._skip
            self._skip = lambda name, parameter: parameter in sparse or (skip is not None and skip(name, parameter))
            self._source = ModelGradients(model, ranks, label)
            # All of them: the model's buckets keep what has been frozen since they were made.
            self._names = {parameter: name for name, parameter in model.module.named_parameters()}
            self._plan = self._new_plan(ranks.hosts())
            self._lock = threading.Lock()
            self._backward: Backward | None = None
            self._gradients = 0  # of the model's pass, how many have come
            self._error: BaseException | None = None  # that backward has not raised yet
            mine += description(self._source.named)
        with on_own_gpu:
            self._connect(ranks)
        register(model, self, _hook)
        self._source.watch()

    def on_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take a bucket of the model; return its future. All gradients become means together.

        Blocks only over NCCL, where a step's first collectives wait for the greetings. After an error it takes nothing
        more.
        """
        if self._backward is None and self._error is None:  # a pass begins
            self._gradients = 0
        self._gradients += len(bucket.parameters())
        if self._error is not None:
            raise self._error
        with torch.no_grad(), self._lock:
            backward = self._backward or self._new_backward(bucket)
            self._end_with_this_pass(backward)
            future = backward.future_of(bucket)
            backward.on_bucket(bucket, self._names)
            # Not is_last(), which torch says of no bucket in the first pass with `static_graph`.
            backward.complete = self._gradients == self._source.count
        if backward.complete and not backward.ends_itself:
            self._at_end(backward)
        return future

    def broken(self, bucket: dist.GradBucket, error: BaseException) -> torch.futures.Future[torch.Tensor]:
        """End the step because of an error in the hook; return a future that hands the bucket back unreduced."""
        self._break(error)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _new_backward(self, bucket: dist.GradBucket) -> Backward:
        self._source.synced()
        captured = bucket.buffer().is_cuda and torch.cuda.is_current_stream_capturing()
        self._backward = Backward(
            self._begin(wrong=RuntimeError(CAPTURED) if captured else None),
            slots=self._plan.slots,  # type: ignore[union-attr]  # there is one
            end=self._end,
        )
        return self._backward

    def _end_with_this_pass(self, backward: Backward) -> None:
        """Have the step ended where the current pass ends, if all gradients are in then.

        Backward may run within backward (reentrant checkpoints), and the model waits for its buckets where that pass
        ends which has brought the last one.
        """
        if current_pass() != backward.latest_pass:
            backward.ends_itself = computes() and call_at_end(functools.partial(self._at_end, backward))  # type: ignore[arg-type]
            backward.latest_pass = current_pass()

    def _break(self, error: BaseException) -> None:
        """End the step because of an error, which is raised when the model has ended its pass.

        The model waits for all its buckets, and could never be used again if the error left backward before that.
        """
        self._fail(error)
        self._error = self._error or error
        if self._backward is not None:
            self._backward.give_up()
            self._backward = None
        # After what the model has told the pass to call at its end.
        if not call_at_end(lambda: call_at_end(self._raise)):
            self._raise()

    def _at_end(self, backward: Backward) -> None:
        """End the step where backward ends."""
        if backward is not self._backward or (computes() and not backward.complete):
            return  # it has ended in an inner pass, or this is one, and more gradients will come
        try:
            if backward.complete:
                backward.collect()
            self._backward = None
        except BaseException as error:  # noqa: BLE001  # as in a hook
            self._break(error)

    def _raise(self) -> None:
        """Raise what was kept until the model has ended its pass: not where an inner one ends and more will come."""
        if computes() and self._gradients < self._source.count:
            return
        error, self._error = self._error, None
        if error is not None:
            raise error


def _hook(quantizer, bucket):  # without annotations: torch compares them with classes, and here they are text
    try:
        return quantizer.on_bucket(bucket)
    except BaseException as error:  # noqa: BLE001
        return quantizer.broken(bucket, error)
