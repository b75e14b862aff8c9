"""`Averager`: means of tensors over ranks, at the controller's level, without any hook. Begin to read here.

    averager = hvd_dyncomp.Averager(model.named_parameters(), 4)
    loss.backward()
    averager.mean_([parameter.grad for parameter in model.parameters()])
    optimizer.step()

A step of any front end does what `mean_` does, in this order: begin, hand over every tensor, agree, exchange, end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import torch

from hvd_dyncomp.checks import shown
from hvd_dyncomp.controller import Controller
from hvd_dyncomp.exchange.memory import overlapping
from hvd_dyncomp.exchange.source import Source
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.policies import Policy
from hvd_dyncomp.sessions.agreement import AVERAGER, description, on_all_ranks
from hvd_dyncomp.sessions.options import Options, checked_names
from hvd_dyncomp.sessions.session import Session
from hvd_dyncomp.transport import given_or_initialized
from hvd_dyncomp.transport.base import Transport

# From so many bits on, a mean may replace what it is of: the error of one is small.
_BITS_OF_VALUES = 8
PARAMETERS = (
    "tensors must not be the parameters themselves, as {} is, at less than 8 bits: the error of each mean is corrected "
    "in later means, which is right for values that are added up, but not for values that a mean replaces. Average the "
    "change of each parameter since the latest mean instead: change = parameter - before; averager.mean_([change, "
    "...]); parameter = before + change; then keep a copy of parameter as the next before"
)


class Averager(Session):
    """Average tensors over all ranks, compressed to the controller's number of bits, with error feedback.

        averager = Averager(model.named_parameters(), 4)
        loss.backward()
        averager.mean_([parameter.grad for parameter in model.parameters()])
        optimizer.step()

    Use it in training loops for which there is no hook: under `torchrun` after `init_process_group`, or under
    `horovodrun` after `hvd.init`. The tensors are gradients, or any other tensors of the parameters' shapes, such as
    the changes of the parameters since the last average.

    Args:
        named_parameters: (name, parameter) pairs, the same on all ranks. They define the names in `state_dict`, and the
            shapes, devices and order of the tensors. Tensors of complex parameters are sent uncompressed.
        controller: gives the number of bits; default: a constant level of 4 bits. For a policy or a level, a new
            controller is created.
        transport: sends the bytes. Default: the controller's, if one is given; Horovod, if it is initialized; or else
            torch's default process group (`hvd_dyncomp.ddp.transport()`).
        options: see `hvd_dyncomp.sessions.options.Options`.

    Creating an `Averager` is collective and blocks. Create it on every rank, and create several of them in the same
    order. The ranks compare the parameters' names and shapes and, unless the controller has `check_replicas=False`,
    their values.

    Attributes:
        controller: see above.
        bits: level of the next step: that of the controller or of the warm-up.
        meter: the `Meter` of what this rank has sent.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value; nothing connects the ranks.
        LockstepError: another rank has raised such an error, or the ranks have different parameters in hand. On all
            ranks that have no error of their own.
        TimeoutError, ConnectionError: over a process group: another rank does not make one in time, or has ended.

    Examples:
        >>> from hvd_dyncomp.simulate import World
        >>> def program(transport):
        ...     averager = Averager([("weight", torch.zeros(2000))], 16, transport=transport)
        ...     gradient = torch.full((2000,), float(transport.rank))
        ...     averager.mean_([gradient])
        ...     return round(gradient[0].item(), 6)
        >>> World(2).run(program)
        [0.5, 0.5]
    """

    called, made_by = "an Averager", "Averager"

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        controller: Controller | Policy | float | None = None,
        *,
        transport: Transport | None = None,
        **options: Unpack[Options],
    ) -> None:
        if transport is None and isinstance(controller, Controller):
            transport = controller.transport
        ranks = given_or_initialized(transport)
        label = ranks.new_label("averager")  # also of calls that fail: it must be the same on all ranks
        hosts = ranks.hosts()
        with on_all_ranks(ranks, AVERAGER) as mine:
            named = checked_names(named_parameters)
            super().__init__(controller, ranks, **options)
            self._source = _Tensors(named, ranks, label)
            self._plan = self._new_plan(hosts)
            self._dtypes: dict[str, str] = {}  # of a step's tensors, where they are not the parameters'
            if ranks.size > 1:
                mine += description(self._source.named, values=self.controller.check_replicas)
        self._connect(ranks)
        ranks.advise({tensor.device for _, tensor in self._source.named})

    @torch.no_grad()
    def mean_(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Replace every tensor by its mean over all ranks. Collective; blocks; one step of the meter.

        Average tensors that are added up: gradients, or changes of parameters since the latest mean. The error of one
        mean is corrected in later means, so that the sum of the means is right. Therefore, below 8 bits, do not
        average tensors that the mean replaces: parameters (which raise a ValueError), exponential moving averages,
        batch norm's statistics, an optimizer's moments. Average their changes, or use an `Averager` of 8 bits or more.

        Args:
            tensors: one tensor for each parameter, in order, with the parameter's shape and device. Its dtype may be
                any floating dtype (complex for complex parameters) that is the same on all ranks; its strides may be
                any. Pass None for a parameter for which no rank has a tensor in this step, such as a frozen one; a rank
                without a batch passes zeros.

        Raises:
            TypeError, ValueError: `tensors` does not match the parameters, or contains a parameter itself at less than
                8 bits; no tensor has changed. The other ranks raise a LockstepError.
            LockstepError: the ranks differ in parameters, settings, level or step, in dtypes, or in which tensors are
                None; or another rank has an error. On all ranks.
            RuntimeError: an error has ended an earlier step.
        """
        try:
            self._mean(tensors)
        except BaseException as error:
            self._fail(error)
            raise

    def _mean(self, tensors: Sequence[torch.Tensor | None]) -> None:
        given: dict[str, torch.Tensor] = {}
        wrong: Exception | None = None
        try:
            given = self._source.checked(tensors)
            if self.bits < _BITS_OF_VALUES and self._source.world_size > 1:
                self._source.check_changes(given)
        except (TypeError, ValueError) as error:
            wrong = error
        absent, began = [name for name, _ in self._source.named if name not in given], time.perf_counter()
        self._dtypes = {
            name: str(given[name].dtype) for name, p in self._source.named if given.get(name, p).dtype != p.dtype
        }
        step = self._begin(absent=absent, wrong=wrong)
        self._average(step, given)
        step.traffic.seconds += time.perf_counter() - began

    def _values(self, epoch: int) -> None:
        """They are compared when it is made only: between local steps they differ rightly."""

    def _to_agree_on(self) -> dict[str, Any]:
        # What travels uncompressed is summed as it is.
        return {"dtypes": self._dtypes}

    def _average(self, step: Step, given: Mapping[str, torch.Tensor]) -> None:
        slots = self._plan.slots if step.bits != UNCOMPRESSED else {}  # type: ignore[union-attr]  # there is a plan
        rest = {name: given[name] for name in given if name not in slots}
        step.reduce("rest", rest)
        # From the last to the first, as backward makes gradients, and as buckets are filled.
        for name in reversed(list(given)):
            if name in slots:
                step.add(slots[name], given[name])
        self._end(step)


class _Tensors(Source):
    """The tensors of an averager."""

    own_memory = True  # `checked` sees to it

    def __init__(self, named: list[tuple[str, torch.Tensor]], transport: Transport, label: str) -> None:
        super().__init__(transport)
        self.named, self.label = named, label

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        return self.named

    def checked(self, tensors: Any) -> dict[str, torch.Tensor]:
        """By name, those that are not None.

        Raises:
            TypeError, ValueError: they do not fit the parameters.
        """
        if not isinstance(tensors, Sequence) or len(tensors) != len(self.named):
            got = (f"{len(tensors)} of them, " if isinstance(tensors, Sequence) else "") + shown(tensors)
            raise TypeError(f"tensors must be a sequence of {len(self.named)} tensors or None, got {got}")
        for number, ((name, parameter), tensor) in enumerate(zip(self.named, tensors, strict=True)):
            if tensor is not None:
                _check_fits(f"tensors[{number}] ({name})", tensor, parameter)
        given = {name: tensor for (name, _), tensor in zip(self.named, tensors, strict=True) if tensor is not None}
        shared = [list(given)[number] for number in overlapping(list(given.values()))]
        if shared:
            raise ValueError(
                f"tensors must not share memory, because their means may differ, but that of {shared[0]} is in another "
                "one's; give a copy of it"
            )
        return given

    def check_changes(self, given: Mapping[str, torch.Tensor]) -> None:
        """Raises: ValueError: a tensor is a parameter itself."""
        for name, parameter in self.named:
            tensor = given.get(name)
            if tensor is None or not tensor.numel() or parameter.layout is not torch.strided:
                continue
            same_memory = tensor.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
            if same_memory and overlapping([parameter, tensor]):
                raise ValueError(PARAMETERS.format(name))


def _check_fits(what: str, tensor: Any, parameter: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise TypeError(f"{what} must be a dense tensor or None, got {shown(tensor)}")
    if hasattr(tensor, "to_local"):  # a DTensor: kernels would write to memory that it does not have
        raise TypeError(f"{what} must not be a DTensor: give tensor.to_local(), or use hvd_dyncomp.fsdp")
    if tensor.is_inference():
        raise ValueError(
            f"{what} must not be made in inference mode, because it cannot be written; use torch.no_grad()"
        )
    if tensor.shape != parameter.shape or tensor.device != parameter.device:
        raise ValueError(
            f"{what} must have shape {tuple(parameter.shape)} and be on {parameter.device}, got shape "
            f"{tuple(tensor.shape)} on {tensor.device}"
        )
    if any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(f"{what} must have memory for each value, got strides {tensor.stride()}; give a copy of it")
    if not (tensor.is_complex() if parameter.is_complex() else tensor.is_floating_point()):
        kind = "complex" if parameter.is_complex() else "floating"
        raise ValueError(f"{what} must have a {kind} dtype, got {tensor.dtype}")
