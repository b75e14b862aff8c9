"""The base class of all front ends: levels, meter and residuals; how a step begins, ends and fails."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch

from hvd_dyncomp import momentum, replicas
from hvd_dyncomp.checks import comes_from, integer, shown
from hvd_dyncomp.controller import Controller, controller_from
from hvd_dyncomp.errors import InFlight
from hvd_dyncomp.exchange import residual_state
from hvd_dyncomp.exchange.handshake import refuse
from hvd_dyncomp.exchange.plan import Plan
from hvd_dyncomp.exchange.settings import Settings, Skip, StepConfig
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.exchange.topology import phases
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.meter import Meter
from hvd_dyncomp.policies import Policy
from hvd_dyncomp.sessions.advice import GONE, INFERENCE, REWOUND, Advice
from hvd_dyncomp.sessions.step_levels import StepLevels
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
        skip, warmup_steps, warmup_bits, settings: see `DynamicQuantizer`.

    Attributes:
        controller: see above.
        bits: level of the next step: the controller's, or the warm-up's.
        meter: the `Meter` of what this rank has sent.
        latest_exchange: what optimizers of `less_momentum` ask for when they step; None: there was none.

    Raises:
        TypeError, ValueError: an argument is out of range or of another type.
    """

    _source: Any  # a `Source`, which a subclass makes
    called: str  # in messages
    made_by: str  # the user's call, in messages
    default_controller: float | None = 4  # None: that of `Controller`
    knows_its_model = True  # from the beginning; otherwise a step makes the plan

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
        self._levels = StepLevels(self.controller, warmup_steps=warmup_steps, warmup_bits=warmup_bits)
        self.meter = Meter()
        self._advice = Advice()
        self.latest_exchange: momentum.Exchange | None = None
        self._begun = 0  # steps, for `latest_exchange`; a loaded state does not take it back
        self._watches = False  # whether it looks at optimizers' steps, to warn of their momentum
        momentum.register(self)
        self._plan: Plan | None = None
        self._saved: Mapping[str, Any] | None = None  # residuals that the next plan takes over
        self._resumed = False  # since the latest step
        self._epoch: int | None = None  # of the latest step
        self.controller.exchanged = bool(self.controller.exchanged)
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
        return self._levels.bits

    @property
    def _ours(self) -> Transport:
        """Connects the ranks that it averages over: apart from exchanges, in which another rank may be."""
        return (self._transport if self._plan is None else self._plan.transport).shared

    @property
    def everyone(self) -> Transport:
        """Connects all ranks whose states belong together; likewise."""
        return self._ours

    @property
    def share(self) -> tuple[list[int] | None, int]:
        """Which shard of the parameters this rank has, if they are sharded; and how many ranks have the same."""
        return None, self.everyone.size

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
        if self._ours.size > 1:
            replicas.compare(self._ours, self.trained, "hvd_dyncomp.quantizer.replicas")

    def drop_residuals(self) -> None:
        """Set all residuals to zero, for a training run that starts anew, such as another fold of a cross-validation.

        Call it on every rank, between steps, in the training thread.

        Raises:
            RuntimeError: gradients are in flight; nothing has changed.
        """
        self._check_between_steps("drop_residuals")
        self._saved = None
        for bucket in self._plan.buckets if self._plan is not None else ():
            bucket.residuals.drop()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by parameter name, the step count and the meter. Save one state per rank.

        The state holds only tensors, numbers, strings, lists and dicts. Call this method between steps, in the training
        thread.

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
        return {**self._residuals(), **self._levels.state_dict(), "meter": self.meter.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that the same rank has saved, in a run with the same parameters.

        Call it between steps, in the training thread. If you call it before the first gradient, the parameters in the
        state are checked only at the first gradient.

        Raises:
            ValueError: `state` is not a quantizer's, or belongs to another rank or other parameters; nothing has
                changed.
            RuntimeError: gradients are in flight, or an error has ended a step; nothing has changed.
        """
        self._check_between_steps("load_state_dict")
        self._check_failure()
        with comes_from("state_dict()", state):
            state = residual_state.checked(state)
            integer("steps", state["steps"], 0)
            Meter().load_state_dict(state["meter"])
        if self._plan is not None:
            residual_state.check(self._plan.buckets, state, self._plan.source.rank, self._plan.source.world_size)
        self._plan, self._saved = None, state
        self._levels.load_state_dict(state)
        self.meter.load_state_dict(state["meter"])
        self._resumed = True
        if self.knows_its_model:
            self._plan, self._saved = self._new_plan(), None

    def _connect(self, ranks: Transport) -> None:
        """Connect the ranks for this model's exchanges. Collective.

        The last of what a front end does when it is made, behind `on_all_ranks`.
        """
        by_host = self._settings.hierarchical is None
        self._source.transport = ranks.for_exchanges(lambda hosts: phases(hosts, ranks.rank, by_host=by_host))

    def _new_plan(self) -> Plan:
        """The plan, with what is in `_saved`."""
        with torch.inference_mode(False):  # steps will write its residuals
            return Plan(self._source, self._settings, self._skip, self._saved)

    def _ranks(self) -> tuple[Transport, str]:
        """The transport and the label for the case that there is no plan."""
        return self._source.transport, self._source.label

    def _from_backward(self) -> bool:
        """Whether backward has run since the last exchange. There is a plan."""
        return True

    def _residuals(self) -> Mapping[str, Any]:
        """Both residuals by parameter name (`residual_state.export`), with rank, world size, factor and hosts."""
        if self._plan is not None:
            return self._plan.residuals()
        if self._saved is not None:
            return self._saved
        return {"rank": None, "world_size": 1, "factor": 1.0, "hosts": None, **residual_state.export([])}

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
        try:
            if wrong is not None:
                raise wrong
            if torch.is_inference_mode_enabled():  # what is made in it cannot be written later
                raise RuntimeError(INFERENCE)
            if self._plan is None:
                self._plan = self._new_plan()
                self._saved = None
            from_backward = self._from_backward()
            config = self._levels.next(alone=self._plan.source.world_size == 1)
            self._plan.check_level(config.bits)
            self._warn_if_rewound(config.epoch)
            self.meter.at(config.epoch, config.bits).steps += 1
            self.controller.exchanged = True
            values = self._values(config.epoch)
            self._step = self._new_step(self._plan, config, absent=absent, from_backward=from_backward, values=values)
            self._step.start()
        except Exception as error:  # raised once the others, which wait for this rank, know it
            self._step, self._failure = None, _interrupted(f"step {self._levels.steps}", error)
            refuse(*self._ranks(), error, number=self._levels.steps, bits=self.bits)
            raise
        return self._step

    def _values(self, epoch: int) -> Mapping[str, int] | None:
        """What a step that begins is to compare, as in `Step`: values, in the first one after `Controller.step`."""
        before, self._epoch = self._epoch, epoch
        goes_on = before in (None, epoch) or not self.controller.check_replicas or self._ours.size == 1
        return None if goes_on else replicas.numbers(self.trained())

    def _new_step(self, plan: Plan, config: StepConfig, *, absent: Collection[str], **arguments: Any) -> Step:
        """A step that has not begun; arguments as in `Step`."""
        return Step(
            plan,
            config=config,
            meter=self.meter,
            absent=absent,
            to_agree_on={"tensors that are None": sorted(absent), **self._to_agree_on()},
            **arguments,
        )

    def _to_agree_on(self) -> dict[str, Any]:
        """What else than plan and config must be the same on all ranks in a step; as in `Step`."""
        return {}

    def _end(self, step: Step) -> None:
        """Wait for the means of a step, and note their level. Raises what `Step.collect` does."""
        step.collect()
        bits = self._bits_of_means(step)
        if bits is not None:
            self._note_exchange(bits)
        self._step = None

    def _bits_of_means(self, step: Step) -> float | None:
        """At how many bits the means of a step came; None if they are those of the step before, reduced again."""
        return step.bits

    def _note_exchange(self, bits: float) -> None:
        """Note, for optimizers that step next, that means have come at so many bits. Twice in a step is as once."""
        waiting = self._plan.feedback_parameters if self._plan is not None else frozenset()
        self.latest_exchange = momentum.Exchange(self._begun, bits, waiting)
        if bits < 1 and waiting and self._transport.rank == 0 and not self._watches:
            self._watches = True
            momentum.watch_steppers(self)

    def _advise(self, about: str, text: str) -> None:
        """Log a warning on rank 0, once for each subject that it is `about`; none if the text is empty."""
        if self._transport.rank == 0:
            self._advice.warn(about, text)

    def _warn_if_rewound(self, epoch: int) -> None:
        last = max((epoch for epoch, _ in self.meter.records), default=0)
        if self._resumed and last > epoch and self._transport.rank == 0:
            self._advice.warn("rewound", REWOUND.format(last, epoch))
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
