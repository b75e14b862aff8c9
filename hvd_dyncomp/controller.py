"""`Controller`: the level that all ranks share, and the one collective call per epoch that moves it."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from numbers import Real
from typing import Any

from hvd_dyncomp.checks import boolean, comes_from, finite, integer, one_of, shown
from hvd_dyncomp.errors import ControllerError, LockstepError
from hvd_dyncomp.levels import UNCOMPRESSED, check_level
from hvd_dyncomp.policies import Decision, Policy, Record, Static, StepFunction
from hvd_dyncomp.policies.base import check_history, check_metrics
from hvd_dyncomp.policies.metrics import not_finite, of_all_ranks
from hvd_dyncomp.transport import given, given_or_initialized
from hvd_dyncomp.transport.base import Transport, gather_json

logger = logging.getLogger(__name__)

LATE_SECONDS = 10.0  # of waiting in `Controller.step`, after which a rank warns
LATE = (
    "rank %d has waited %g s in Controller.step for other ranks: every rank must call controller.step(...) after each "
    "epoch, and after as many backward passes as the others, with num_samples=0 if it does not validate; use 'if %s == "
    "0:' only for code that prints or saves"
)
IDLE = (
    "no quantizer of this controller exchanged gradients in epoch %d, so replicas may differ. Possible causes: another "
    "model was wrapped or another optimizer was created later, compression= was left out, every pass ran in no_sync, "
    "the model's parameters were replaced after it was wrapped, or controller.step was called before training or twice "
    "after one epoch. quantizer.check_replicas() compares the replicas"
)


class Controller:
    """The level of all ranks, in bits per value; `step` moves it, on every rank in the same call.

    In a training loop: train an epoch, validate, call `controller.step(...)`, then step the learning-rate schedule. In
    this order, because a plateau from a learning rate that is too high looks like a plateau from compression: the
    controller must see the metrics before the learning rate reacts to them.

    Args:
        policy: decides the levels; default `StepFunction()`, which needs an accuracy in every `step`. A level such as 4
            or 0.25 stands for `Static(level)`, which needs no metrics. The policy must be the same on all ranks.
        on_error: what happens when the policy fails on rank 0: "raise" the same `ControllerError` on every rank, or
            "hold" the level with a warning.
        nan_patience: epochs with non-finite metrics hold the level. After this many in a row nothing is compressed (32
            bits) until the metrics are finite again.
        check_replicas: whether quantizers check, in their first step after each call of `step`, that all ranks hold the
            same parameters, bit for bit. The check reads every parameter once (46 ms for 25.6 million float32 values,
            on one core). Pass False, on all ranks, if the ranks are meant to differ.
        transport: connects the ranks that call `step`. Default, decided at the first use: Horovod, all ranks, if it is
            initialized, or else torch's default process group; none if there is one process.

    Attributes:
        history: one `Record` per finished epoch, oldest first; `record.bits` is the level decided after that epoch.
        exchanged: whether a quantizer of this controller has exchanged gradients in this epoch; None: there is none.

    Raises:
        ValueError: an argument is out of range.
        TypeError: `policy` is neither a `Policy` nor a number, its `config()` is not plain data, or its first decision
            is not a `Decision`; or `transport` is not a `Transport`.

    Examples:
        >>> from hvd_dyncomp import Schedule
        >>> controller = Controller(Schedule({0: 32, 2: 4}), nan_patience=3)
        >>> controller.epoch, controller.bits
        (0, 32)
        >>> controller.state_dict()["config"]
        {'on_error': 'raise', 'nan_patience': 3, 'policy': 'Schedule', 'levels': [[0, 32], [2, 4]]}
    """

    def __init__(
        self,
        policy: Policy | float | None = None,
        *,
        on_error: str = "raise",
        nan_patience: int = 2,
        check_replicas: bool = True,
        transport: Transport | None = None,
    ) -> None:
        if policy is None:
            policy = StepFunction()
        elif isinstance(policy, Real) and not isinstance(policy, bool):
            policy = Static(check_level("policy", policy))
        if not isinstance(policy, Policy):
            raise TypeError(f"policy must be a Policy such as StepFunction(), or a level, got {shown(policy)}")
        self.policy = policy
        _check_config(self.policy)
        self.on_error = one_of("on_error", on_error, ("raise", "hold"))
        self.nan_patience = integer("nan_patience", nan_patience, 1)
        self.check_replicas = boolean("check_replicas", check_replicas)
        self._transport = None if transport is None else given(transport)
        self.history: list[Record] = []
        self.exchanged: bool | None = None
        self._bits = _checked("the policy's first decision", self.policy.decide([])).bits

    def __repr__(self) -> str:
        return f"Controller({shown(self.policy)}: {self._bits} bits in epoch {self.epoch})"

    @property
    def transport(self) -> Transport:
        """What connects the ranks that call `step`: an object with their number, `size`, and this one's, `rank`.

        `ddp.transport` makes one over a process group. The first use may be collective, and block.

        Raises:
            ValueError: neither Horovod nor torch's process group is initialized, though there are several processes.
        """
        if self._transport is not None:
            return self._transport
        found = given_or_initialized(None)
        if found.size > 1:  # a single process may still get company
            self._transport = found
        return found

    @property
    def bits(self) -> float:
        """The current level, bits per value; 32 means uncompressed."""
        return self._bits

    @property
    def epoch(self) -> int:
        """The epoch in progress, counted from 0: one more than the last that `step` finished."""
        return self.history[-1].epoch + 1 if self.history else 0

    def step(self, metrics: Mapping[str, float], *, epoch: int | None = None, num_samples: float = 1) -> float:
        """Average the metrics of an epoch over all ranks and move the level. Collective: every rank calls it.

        Of the metrics in `policy.least`, the least value of all ranks counts instead.

        Call it between steps, when no gradient is in flight. If the history already has the epoch, nothing changes and
        a warning is logged, so a resumed run may repeat the call. A rank that waits here for others for 10 s logs a
        warning.

        Args:
            metrics: this rank's values by name, the same names on every rank: numbers, or tensors of one element.
            epoch: number of the finished epoch, from 0; default `self.epoch`.
            num_samples: weight of this rank's metrics, for instance the number of images it validated on.

        Returns:
            The level of the next epoch, the same on every rank.

        Raises:
            ControllerError: the policy failed on rank 0 (unless on_error="hold"), or a rank passed unusable metrics.
                The message has the cause and the rank.
            LockstepError: the ranks passed different metric names or epochs, or differ in level or configuration.
            ValueError: nothing connects the ranks; see `transport`.

        Examples:
            >>> from hvd_dyncomp import Schedule
            >>> controller = Controller(Schedule({0: 8, 1: 4}))
            >>> controller.step({"val_loss": 0.5}, num_samples=1000)
            4
            >>> controller.history
            [Record(epoch=0, metrics={'val_loss': 0.5}, bits=4, reason='scheduled from epoch 1', usable=True)]
        """
        report = self._report(metrics, epoch, num_samples)
        with _warning_if_late(self.transport):
            reports = gather_json(self.transport, report, "hvd_dyncomp.controller.metrics")
        self._check_reports(reports)
        finished = reports[0]["epoch"]
        if finished < self.epoch:
            logger.warning("Controller.step: epoch %d was stepped before; nothing changes", finished)
            self._check_lockstep()
            return self._bits
        answer = self._decide(finished, of_all_ranks(reports, self.policy.least)) if self.transport.rank == 0 else None
        answer = gather_json(self.transport, answer, "hvd_dyncomp.controller.decision")[0]
        if "error" in answer:
            raise ControllerError(answer["error"])
        if self.transport.rank == 0 and self.transport.size > 1 and all(report["idle"] for report in reports):
            logger.warning(IDLE, self.epoch)
        before = self._bits
        self.history.append(record := Record(**answer))
        self._bits = record.bits
        try:
            self._check_lockstep()
        except (ControllerError, LockstepError):  # on all ranks
            self.history.pop()
            self._bits = before
            raise
        if self.exchanged:
            self.exchanged = False
        return self._bits

    def _report(self, metrics: Any, epoch: Any, num_samples: Any) -> dict[str, Any]:
        """What this rank tells the others. Never raises: the others would wait for ever."""
        try:
            finished = integer("epoch", self.epoch if epoch is None else epoch, 0)
            weight, values = finite("num_samples", num_samples, 0), check_metrics(metrics)
        except Exception as error:  # noqa: BLE001  # converting a user's object may raise anything
            return {"error": f"{type(error).__name__}: {error}"}
        idle = self.exchanged is False
        return {"epoch": finished, "history": self.epoch, "weight": weight, "metrics": values, "idle": idle}

    def _check_reports(self, reports: list[dict[str, Any]]) -> None:
        for rank, report in enumerate(reports):
            if "error" in report:
                raise ControllerError(f"Controller.step failed on rank {rank}: {report['error']}")
        # "history" too: if only some ranks had seen an epoch before, only they would return early.
        for what in ("epoch", "history", "metrics"):
            seen = [sorted(r["metrics"]) if what == "metrics" else r[what] for r in reports]
            for rank, value in enumerate(seen):
                if value != seen[0]:
                    raise LockstepError(f"Controller.step: rank 0 has {what} {seen[0]}, rank {rank} has {what} {value}")
        if not any(report["weight"] for report in reports):
            raise ControllerError("Controller.step: num_samples must be more than 0 on some rank, got 0 on all")

    def _decide(self, epoch: int, metrics: dict[str, float]) -> dict[str, Any]:
        """On rank 0: the new record, or the error, as plain data. Never raises: the other ranks wait for the answer."""
        try:
            (bits, reason), usable = self._choose(epoch, metrics)
        except Exception as error:  # a policy is the user's code
            cause = f"{type(error).__name__}: {error}"
            if self.on_error == "raise":
                logger.exception("the policy failed after epoch %d", epoch)
                return {"error": f"the policy failed on rank 0 after epoch {epoch}: {cause}"}
            bits, reason, usable = self._bits, f"held: the policy failed with {cause}", False
            logger.warning("after epoch %d: %s", epoch, reason)
        logger.info("after epoch %d: %s bits (%s); %s", epoch, bits, reason, metrics)
        return asdict(Record(epoch, metrics, bits, reason, usable))

    def _choose(self, epoch: int, metrics: dict[str, float]) -> tuple[Decision, bool]:
        """The next decision, and whether policies may see this epoch later."""
        bad = not_finite(metrics)
        if not bad:
            usable = [replace(record) for record in self.history if record.usable]  # the policy's to keep
            return _checked("the policy's decision", self.policy.decide([*usable, Record(epoch, metrics)])), True
        in_a_row = 1
        for record in reversed(self.history):
            if not not_finite(record.metrics):
                break
            in_a_row += 1
        over = in_a_row >= self.nan_patience
        then = "nothing is compressed until all are finite" if over else "the level stays"
        logger.warning("after epoch %d: non-finite metrics %s: %s", epoch, bad, then)
        if over:
            return Decision(UNCOMPRESSED, f"uncompressed: {', '.join(bad)} not finite for {in_a_row} epochs"), False
        return Decision(self._bits, f"held: {', '.join(bad)} not finite"), False

    def _check_lockstep(self) -> None:
        everyone = gather_json(self.transport, self._fingerprint(), "hvd_dyncomp.controller.lockstep")
        for rank, theirs in enumerate(everyone):
            if "error" in theirs:
                raise ControllerError(f"the policy's config() failed on rank {rank}: {theirs['error']}")
        for rank, theirs in enumerate(everyone):
            found = _first_difference(everyone[0], theirs)
            if found:
                what, first, other = found[0], *map(shown, found[1:])
                raise LockstepError(f"after Controller.step rank 0 has {what} {first}, rank {rank} has {other}")

    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same on all ranks. Never raises: the other ranks wait for it."""
        try:
            state = self.state_dict()
            config, history = json.dumps(state["config"]), json.dumps(state["history"], sort_keys=True)
        except Exception as error:  # noqa: BLE001  # a policy is the user's code
            return {"error": f"{type(error).__name__}: {error}"}
        # The history as a checksum: it grows with every epoch.
        state = {
            "config": json.loads(config),
            "epoch": self.epoch - 1,
            "bits": self._bits,
            "history checksum": zlib.crc32(history.encode()),
        }
        return {**state, "check_replicas": self.check_replicas}

    def sync(self) -> None:
        """Take over rank 0's history and level, for workers that join a run. Collective: every rank calls it.

        Raises:
            LockstepError: another rank makes another collective call of this package.
            TimeoutError, ConnectionError: over a process group: another rank does not call it in time, or has ended.
            ValueError: nothing connects the ranks; see `transport`.
        """
        states = gather_json(self.transport, self.state_dict(), "hvd_dyncomp.controller.sync")
        self.load_state_dict(states[0])

    def state_dict(self) -> dict[str, Any]:
        """Return history, level and configuration as plain data, the same on every rank.

        Returns:
            "bits": the level; "history": a list of one dict per `Record`, with its fields; "config": a dict with
            `on_error`, `nan_patience` and what the policy's `config()` returns, which `load_state_dict` compares.
        """
        config = {"on_error": self.on_error, "nan_patience": self.nan_patience, **self.policy.config()}
        return {"bits": self._bits, "history": [asdict(record) for record in self.history], "config": config}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the history and the level. This controller keeps its own configuration, and a warning names each
        difference from the saved one. If the policies differ, this policy decides the level from the loaded history.

        Args:
            state: what `state_dict` has returned, on any rank. It is plain data, so it may have been saved as JSON.

        Raises:
            ValueError: `state` does not come from `Controller.state_dict()`; nothing has changed.
        """
        with comes_from("Controller.state_dict()", state):
            history = list(check_history([Record(**record) for record in state["history"]]))
            bits, config = check_level("bits", state["bits"]), json.loads(json.dumps(state["config"]))
            if not isinstance(config, dict):
                raise TypeError(f"config must be a dict, got {shown(config)}")
            if history and history[-1].bits != bits:
                raise ValueError(f"bits must be the level after the last epoch, {history[-1].bits}, got {bits}")
        mine = json.loads(json.dumps(self.state_dict()["config"]))
        if {**mine, **_NO_POLICY} != {**config, **_NO_POLICY}:
            bits = self._replay(history, bits)
        for key in sorted({*mine, *config}):
            if mine.get(key) != config.get(key):
                logger.warning(
                    "Controller: the loaded state has %s=%r; this controller keeps %r",
                    key,
                    config.get(key),
                    mine.get(key),
                )
        self.history, self._bits = history, bits

    def _replay(self, history: list[Record], bits: float) -> float:
        """The level of another policy after this history, also in its last record; `bits` if it cannot say."""
        try:
            decided = _checked("the policy's decision", self.policy.decide([each for each in history if each.usable]))
        except Exception as error:  # noqa: BLE001  # other metrics: the next epoch's may have what it wants
            logger.warning(
                "Controller: this policy cannot use the loaded history (%s); the saved level stays until the next step",
                shown(error),
            )
            return bits
        if history:
            history[-1] = replace(history[-1], bits=decided.bits, reason=f"another policy: {decided.reason}")
        return decided.bits


@contextlib.contextmanager
def _warning_if_late(transport: Transport) -> Iterator[None]:
    """Around code that waits for all ranks: warn once if it takes long. The thread works with every transport."""
    said = (LATE, transport.rank, LATE_SECONDS, transport.rank_call)
    timer = threading.Timer(LATE_SECONDS, logger.warning, said)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# In a configuration: what is the controller's own.
_NO_POLICY = {"on_error": None, "nan_patience": None}


def _first_difference(mine: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """Name and both values of the first difference between two fingerprints. In a configuration: of the argument."""
    for key in {**mine, **theirs}:
        one, other = mine.get(key), theirs.get(key)
        if one != other:
            inside = isinstance(one, dict) and isinstance(other, dict) and key == "config"
            return _first_difference(one, other) if inside else (key, one, other)  # type: ignore[arg-type]
    return None


def _check_config(policy: Policy) -> None:
    """Refuse a configuration that is not JSON: ranks and checkpoints compare configurations."""
    config = policy.config()
    try:
        json.dumps(config, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"policy must return plain data from config(), got {shown(config)}: {error}") from error
    if not isinstance(config, dict):
        raise TypeError(f"policy must return a dict from config(), got {shown(config)}")
    if not isinstance(
        policy.least, (tuple, list, set, frozenset)
    ):  # on rank 0 only it would be an error after an epoch
        raise TypeError(f"policy must have names of metrics in least, got {shown(policy.least)}")


def _checked(what: str, decision: Any) -> Decision:
    """A policy's decision, checked: a policy may be the user's code."""
    if not isinstance(decision, tuple) or len(decision) != 2:
        raise TypeError(f"{what} must be a Decision(bits, reason), got {shown(decision)}")
    if not isinstance(decision[1], str):
        raise TypeError(f"{what} must have a string as its reason, got {shown(decision[1])}")
    return Decision(check_level(f"bits of {what}", decision[0]), decision[1])


def controller_from(given: Controller | Policy | float | None, transport: Transport | None) -> Controller:
    """The controller for the argument of a quantizer: a controller, a policy, a level, or None for the default policy.

    Args:
        transport: of a new controller.

    Raises:
        TypeError, ValueError: `given` is something else, or not a level.
    """
    if isinstance(given, Controller):
        return given
    if isinstance(given, Real) and not isinstance(given, bool):
        given = check_level("controller", given)
    elif given is not None and not isinstance(given, Policy):
        raise TypeError(f"controller must be a Controller, a Policy or a level, got {shown(given)}")
    return Controller(given, transport=transport)
