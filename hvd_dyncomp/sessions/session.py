"""The base class of all front ends: levels, meter and residuals; how a step begins, ends and fails."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from hvd_dyncomp import momentum, replicas
from hvd_dyncomp.checks import comes_from, integer, shown
from hvd_dyncomp.controller import Controller, controller_from
from hvd_dyncomp.errors import InFlight
from hvd_dyncomp.exchange import residual_state
from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.handshake import refuse
from hvd_dyncomp.exchange.plan import Plan
from hvd_dyncomp.exchange.settings import Settings, Skip, StepConfig, with_residuals
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.exchange.topology import Topology, phases
from hvd_dyncomp.levels import UNCOMPRESSED, check_level
from hvd_dyncomp.meter import Meter
from hvd_dyncomp.policies import Policy
from hvd_dyncomp.sessions.advice import GONE, INFERENCE, REWOUND
from hvd_dyncomp.transport.base import Transport

logger = logging.getLogger(__name__)


class Session:
    """The base class of all front ends: it takes the gradients of one model through steps.

    A front end calls `_begin`, adds every gradient to the step, and calls `_end`, which waits until the ranks agree and
    all gradients are means. It passes every exception in between to `_fail`. `averaging.py` is the shortest front end.

    A session is *fail-stop*: any exception (`BaseException`) that leaves it within a step may leave gradients and
    residuals half written, on this rank or on ranks that wait for it. Every further step then raises an error that
    names the cause, and all ranks have to start again from a checkpoint.

    Args:
        controller: gives the level: a controller, or a policy or a level for a new controller.
        transport: connects the ranks.
        skip, warmup_steps, warmup_bits, settings: see `hvd_dyncomp.sessions.options.Options`.

    Attributes:
        controller: see above.
        bits: level of the next step: the controller's, or the warm-up's. The first step after a rise to 32 bits is sent
            at 16, and delivers what waits in residuals.
        meter: the `Meter` of what this rank has sent.
        latest_exchange: what optimizers of `less_momentum` ask for when they step; None: there was none.

    Raises:
        TypeError, ValueError: an argument is out of range or of another type.
    """

    _source: Any  # a `Source`, which a subclass makes
    called: str  # in messages
    made_by: str  # the user's call, in messages
    default_controller: float | None = 4  # None: that of `Controller`

    def __init__(
        self,
        controller: Controller | Policy | float | None,
        transport: Transport,
        *,
        skip: Skip | None = None,
        warmup_steps: int = 0,
        warmup_bits: float = UNCOMPRESSED,
        **settings: Any,
    ) -> None:
        unknown = sorted(set(settings) - {field.name for field in dataclasses.fields(Settings)})
        if unknown and unknown[0] in GONE:
            raise TypeError(f"{self.made_by} no longer takes {unknown[0]}: {GONE[unknown[0]]}")
        if unknown:
            raise TypeError(f"{self.made_by} takes no argument {unknown[0]}")
        self.controller = controller_from(self.default_controller if controller is None else controller, transport)
        self._settings = Settings(**settings)
        if skip is not None and not callable(skip):
            raise TypeError(f"skip must be a function of name and parameter, got {shown(skip)}")
        self._skip, self._transport = skip, transport
        self._warmup_steps = integer("warmup_steps", warmup_steps, 0)
        self._warmup_bits = check_level("warmup_bits", warmup_bits)
        self._steps = 0  # that have begun
        self.meter = Meter()
        self._said: set[str] = set()  # what was warned of
        self.latest_exchange: momentum.Exchange | None = None
        self._begun = 0  # steps, for `latest_exchange`; a loaded state does not take it back
        self._watches = False  # whether it looks at optimizers' steps, to warn of their momentum
        momentum.register(self)
        self._plan: Plan | None = None
        self._resumed = False  # since the latest step
        self._epoch: int | None = None  # of the latest step
        self.controller.exchanged = bool(self.controller.exchanged)
        self._saved: Mapping[str, Any] | None = None  # a loaded state that waits for what it needs
        self._step: Step | None = None  # in flight
        # Why no further step begins. Not the error, whose traceback has frames that hold the model: the model's hook
        # holds this, in C++, where Python's garbage collector sees no cycle.
        self._failure = ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.bits:g} bits, {self.meter!r}>"

    def __reduce__(self) -> tuple:
        raise TypeError(
            f"{self.called} belongs to its model and cannot be copied or pickled: make one of a copy of the model, and "
            "load this one's state_dict()"
        )

    @property
    def bits(self) -> float:
        """Level of the next step; see the class."""
        return with_residuals(self._wanted, self._waiting)

    @property
    def _wanted(self) -> float:
        """The same, if no residuals have to be delivered."""
        bits = self.controller.bits
        return max(bits, self._warmup_bits) if self._steps < self._warmup_steps else bits

    @property
    def _control_transport(self) -> Transport:
        """Connects the ranks that it averages over: apart from exchanges, in which another rank may be."""
        return (self._transport if self._plan is None else self._plan.transport).shared

    @property
    def everyone(self) -> Transport:
        """Connects all ranks whose states belong together; likewise."""
        return self._control_transport

    @property
    def shard(self) -> list[int] | None:
        """Which shard of the parameters this rank has, and how many there are; None if they are not sharded."""
        return None

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """(name, parameter) of all that training changes as things are now, whether it is reduced or not.

        Raises:
            RuntimeError: that is not known yet.
        """
        if self._source is None:
            raise RuntimeError("no optimizer is known yet; call it after a step, or after attach(optimizer)")
        return list(self._source.trained())

    def check_replicas(self) -> None:
        """Check that all ranks hold the same parameters, bit for bit. Collective: every rank calls it, between steps.

        The first step after each `Controller.step` makes the same check, unless the controller has
        `check_replicas=False`; that of an `Averager` does not. Call this method in programs that do not call
        `Controller.step`, and after the last epoch.

        Raises:
            LockstepError: a parameter differs, or a rank has not trained yet; on every rank.
        """
        if self._control_transport.size > 1:
            replicas.compare(self._control_transport, self.trained, "hvd_dyncomp.quantizer.replicas")

    def drop_residuals(self) -> None:
        """Set all residuals to zero, for a new training run, such as another fold of a cross-validation.

        Call it on every rank, between steps, in the training thread.

        Raises:
            RuntimeError: gradients are in flight; nothing has changed.
        """
        self._check_between_steps("drop_residuals")
        for bucket in self._plan.buckets if self._plan is not None else ():
            bucket.residuals.drop()
        self._saved = None

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by parameter name, the step count and the meter. Save one state per rank.

        The state holds only tensors, numbers, strings, lists and dicts. Call this method between steps, in the training
        thread.

        Returns:
            "residuals": by parameter name, a bfloat16 tensor of the parameter's shape in main memory, which is 2 bytes
            per value that is compressed; "shard_residuals": by bucket, what this rank keeps of the second quantization,
            bfloat16 as well: with N > 2 workers about 2 / N bytes per value; "steps": number of steps, an int; "meter":
            what `Meter.state_dict` returns; "rank" and "world_size": ints. Further keys say for which ranks and
            parameters the state is.

        Raises:
            RuntimeError: gradients are in flight.
        """
        self._check_between_steps("state_dict")
        if self._failure:
            logger.warning(
                "this state has the residuals of an interrupted step; resume from an earlier state instead: %s",
                self._failure,
            )
        # These last: residuals may be a whole loaded state, and steps and meter have moved on since.
        return {**self._residuals(), "steps": self._steps, "meter": self.meter.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that the same rank has saved, in a run with the same parameters.

        On as many ranks, on the same hosts, a run then continues bit for bit. On another number of ranks, or if another
        division of ranks among hosts changes the exchange, residuals begin at zero, and rank 0 logs a warning.

        Call it between steps, in the training thread.

        Args:
            state: what `state_dict` has returned.

        Raises:
            ValueError: `state` is not a quantizer's, or belongs to another rank or other parameters; nothing has
                changed.
            RuntimeError: gradients are in flight, or an error has ended a step; nothing has changed.
        """
        self._check_between_steps("load_state_dict")
        self._check_failure()
        with comes_from("state_dict()", state):
            state = residual_state.checked(state)
            steps = integer("steps", state["steps"], 0)
            Meter().load_state_dict(state["meter"])
        self._restore(state)
        self._steps = steps
        self.meter.load_state_dict(state["meter"])
        self._resumed = True

    def _connect(self, ranks: Transport) -> None:
        """Connect the ranks for this model's exchanges. Collective.

        The last of what a front end does when it is made, behind `on_all_ranks`.
        """
        plan: Any = self._plan
        among = phases(plan.topology, ranks.rank, by_host=plan.hierarchical)
        self._source.transport = ranks.for_exchanges(among)

    def _new_plan(self, hosts: Sequence[str]) -> Plan:
        """The plan, for ranks on these hosts."""
        with torch.inference_mode(False):  # steps will write its residuals
            return Plan(self._source, self._settings, self._skip, Topology.of(hosts))

    def _ranks(self) -> tuple[Transport, str]:
        """The transport and the label for the case that there is no plan."""
        return self._source.transport, self._source.label

    def _plan_of_step(self) -> Plan:
        """The plan of the step that begins. Raises: Exception: there can be none."""
        return self._plan  # type: ignore[return-value]  # made with this object

    def _level(self, bits: float) -> float:
        """The level of the step that begins, when the controller asks for `bits`.

        Raises:
            ValueError: that is not possible, on any rank.
        """
        self._plan.check_level(bits)  # type: ignore[union-attr]  # there is one
        return bits

    @property
    def _waiting(self) -> bool:
        """Whether residuals wait to be delivered in a step of all buckets; the same on all ranks."""
        return self._plan is not None and any(bucket.residuals.carries for bucket in self._plan.buckets)

    def _residuals(self) -> Mapping[str, Any]:
        """Both residuals by parameter name (`residual_state.export`), with rank, world size and hosts."""
        return self._plan.residuals()  # type: ignore[union-attr]  # there is one

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Replace the residuals by those of a state. Raises what `load_state_dict` does; nothing has changed then."""
        self._plan.restore(state)  # type: ignore[union-attr]  # there is one

    def _check_between_steps(self, what: str) -> None:
        if self._step is not None:
            raise InFlight(f"{what} must be called between steps, but gradients are in flight")

    def _begin(self, *, absent: Collection[str] = (), wrong: Exception | None = None) -> Step:
        """Begin a step. A rank that cannot take part tells the others why, and raises its error when they know it.

        Args:
            absent: as in `Step`.
            wrong: why this rank cannot, if that is known already.

        Raises:
            RuntimeError: an error has ended an earlier step.
            Exception: this rank cannot take part. The error is final.
        """
        self._check_failure()
        self._begun += 1
        number = self._steps
        try:
            if wrong is not None:
                raise wrong
            if torch.is_inference_mode_enabled():  # what is made in it cannot be written later
                raise RuntimeError(INFERENCE)
            plan = self._plan_of_step()
            alone = plan.source.world_size == 1
            config = StepConfig(number, UNCOMPRESSED if alone else self._wanted, self.controller.epoch)
            config = config.with_residuals(self._waiting and not alone)
            self._steps += 1
            config = config._replace(bits=self._level(config.bits))
            self._warn_if_rewound(config.epoch)
            self.meter.at(config.epoch, config.bits).steps += 1
            self.controller.exchanged = True
            self._step = self._new_step(plan, config, absent=absent, values=self._values(config.epoch))
            self._step.start()
        except Exception as error:  # raised once the others, which wait for this rank, know it
            self._step, self._failure = None, _interrupted(f"step {number}", error)
            refuse(*self._ranks(), error, number=number, bits=self.bits)
            raise
        return self._step

    def _values(self, epoch: int) -> Mapping[str, int] | None:
        """What a step that begins is to compare, as in `Step`: values, in the first one after `Controller.step`."""
        before, self._epoch = self._epoch, epoch
        goes_on = before in (None, epoch) or not self.controller.check_replicas or self._control_transport.size == 1
        return None if goes_on else replicas.numbers(self.trained())

    def _new_step(
        self, plan: Plan, config: StepConfig, *, absent: Collection[str], values: Mapping[str, int] | None
    ) -> Step:
        """A step that has not begun; arguments as in `Step`."""
        return Step(
            plan,
            config=config,
            meter=self.meter,
            absent=absent,
            to_agree_on={"tensors that are None": sorted(absent), **self._to_agree_on()},
            values=values,
            buckets=self._taking_part(),
        )

    def _taking_part(self) -> Sequence[Bucket] | None:
        """The buckets of the step that begins, as in `Step`."""
        return None

    def _to_agree_on(self) -> dict[str, Any]:
        """What else than plan and config must be the same on all ranks in a step; as in `Step`."""
        return {}

    def _end(self, step: Step) -> None:
        """Wait for the means of a step, and note their level. Raises what `Step.collect` does."""
        step.collect()
        self._note_exchange(step.bits)
        self._step = None

    def _note_exchange(self, bits: float) -> None:
        """Note, for optimizers that step next, that means have come at so many bits. Twice in a step is as once."""
        waiting = self._plan.feedback_parameters if self._plan is not None else frozenset()
        self.latest_exchange = momentum.Exchange(self._begun, bits, waiting)
        if bits < 1 and waiting and self._transport.rank == 0 and not self._watches:
            self._watches = True
            momentum.watch_steppers(self)

    def _advise(self, about: str, text: str) -> None:
        """Log a warning on rank 0, once for each subject that it is `about`; none if the text is empty."""
        if text and self._transport.rank == 0 and about not in self._said:
            self._said.add(about)
            logger.warning(text)

    def _warn_if_rewound(self, epoch: int) -> None:
        last = max((epoch for epoch, _ in self.meter.records), default=0)
        if self._resumed and last > epoch:
            self._advise("rewound", REWOUND.format(last, epoch))
        self._resumed = False

    def _check_failure(self) -> None:
        """Raise a RuntimeError if an error has ended an earlier step."""
        if self._failure:
            raise RuntimeError(self._failure)

    def _fail(self, error: BaseException) -> None:
        """End a step because of an error that has left it: no further one begins."""
        step, self._step = self._step, None
        if step is None and isinstance(error, Exception):  # nothing was under way; `_begin` has seen to its own errors
            return
        name = "a step" if step is None else f"step {step.number}"
        self._failure = self._failure or _interrupted(name, error)
        if step is not None:
            step.abandon()
        if step is None or not step.refused:
            (self._transport if self._plan is None else self._plan.transport).abort()


def _interrupted(name: str, error: BaseException) -> str:
    """What every further step says."""
    cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return (
        f"{name} was interrupted by {cause}. Gradients and residuals may be only partly updated: restart all ranks "
        "from a checkpoint"
    )
