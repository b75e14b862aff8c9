"""`Controller`: the level that all workers share, and the one collective per epoch that moves it."""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from numbers import Real
from typing import Any

from hvd_dyncomp.checks import finite, integer, one_of, shown
from hvd_dyncomp.errors import ControllerError, LockstepError
from hvd_dyncomp.exchange.lookout import Lookout
from hvd_dyncomp.levels import UNCOMPRESSED, check_level
from hvd_dyncomp.policies import Decision, Policy, Record, Static, StepFunction
from hvd_dyncomp.policies.base import check_history, check_metrics
from hvd_dyncomp.transport import given_or_horovod
from hvd_dyncomp.transport.base import Transport, finish_gather_json, gather_json, start_gather_json

logger = logging.getLogger(__name__)


class Controller:
    """Holds the level; `step` moves it, on every worker in the same call.

    Call order in a training loop: train an epoch, validate, `controller.step(...)`, then the learning-rate schedule.
    (A plateau that a too-high learning rate causes looks like one that compression causes: let the controller see the
    metrics before the learning rate reacts to them.)

    Args:
        policy: decides the levels; default `StepFunction()`. A level, such as 4 or 0.25, stands for `Static` of it. The
            same on all ranks.
        on_error: when the policy fails on rank 0, "raise" the same `ControllerError` on every rank, or "hold" the
            level with a warning.
        nan_patience: non-finite metrics hold the level; after this many epochs of them in a row compression is
            released to 32 bits, until they are finite again.
        transport: among the ranks that call `step`; default Horovod, all workers. Without Horovod,
            `hvd_dyncomp.ddp.transport()`.

    Attributes:
        transport: see above.
        history: one `Record` per finished epoch, oldest first; `record.bits` is what was decided after that epoch.

    Raises:
        ValueError: an argument is out of range.
        TypeError: `policy` is neither a `Policy` nor a number, or its `config()` is not plain data, or its first
            decision none; or `transport` is no `Transport`.
        ImportError: there is no Horovod, and no `transport`.

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
        self.transport = given_or_horovod(transport)
        self.history: list[Record] = []
        self._bits = _checked("the policy's first decision", self.policy.decide([])).bits

    def __repr__(self) -> str:
        return f"Controller({shown(self.policy)}: {self._bits} bits in epoch {self.epoch})"

    @property
    def bits(self) -> float:
        """The level in force, bits per value; 32 means uncompressed."""
        return self._bits

    @property
    def epoch(self) -> int:
        """Number of the epoch in progress: one more than the last that `step` has seen."""
        return self.history[-1].epoch + 1 if self.history else 0

    def step(self, metrics: Mapping[str, float], *, epoch: int | None = None, num_samples: float = 1) -> float:
        """Averages the metrics of an epoch over all workers and moves the level. Collective: every rank calls it.

        No gradient may be in flight. An epoch that the history has already is a no-op with a warning, so that a
        resumed run may repeat the call.

        Args:
            metrics: this worker's values, the same names on every rank: numbers, or tensors of one element.
            epoch: number of the finished epoch; by default they are counted from 0.
            num_samples: weight of this worker's metrics, for instance the images it validated on.

        Returns:
            The level of the next epoch, the same on every rank.

        Raises:
            ControllerError: the policy failed on rank 0 (unless on_error="hold"), or a rank passed metrics that cannot
                be used; the message has the cause and the rank.
            LockstepError: the ranks called with different metrics or epochs, or disagree about level or configuration;
                or another rank goes on training instead (if its optimizer works among all workers).
        """
        reports = self._gathered(self._report(metrics, epoch, num_samples))
        self._check_reports(reports)
        finished = reports[0]["epoch"]
        if finished < self.epoch:
            logger.warning("Controller.step: epoch %d was stepped before; nothing changes", finished)
            return self._bits
        answer = self._decide(finished, _weighted_means(reports)) if self.transport.rank == 0 else None
        answer = gather_json(self.transport, answer, "hvd_dyncomp.controller.decision")[0]
        if "error" in answer:
            raise ControllerError(answer["error"])
        record = Record(**answer)
        self.history.append(record)
        self._bits = record.bits
        self._check_lockstep()
        return self._bits

    def _gathered(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's report. If this one waits for ranks that train instead, all raise a `LockstepError`."""
        transport = self.transport
        if transport.size == 1:
            return [report]
        lookout = Lookout(self, transport)
        handle = start_gather_json(transport, report, "hvd_dyncomp.controller.metrics")
        lookout.wait(handle)
        reports = finish_gather_json(transport, handle)
        everybody = gather_json(transport, lookout.labels, "hvd_dyncomp.controller.waited")
        lookout.end(label for labels in everybody for label in labels)
        return reports

    def _report(self, metrics: Any, epoch: Any, num_samples: Any) -> dict[str, Any]:
        """What this rank tells the others. Never raises: a rank that raised here would leave them waiting."""
        try:
            finished = integer("epoch", self.epoch if epoch is None else epoch, 0)
            weight, values = finite("num_samples", num_samples, 0), check_metrics(metrics)
        except Exception as error:  # noqa: BLE001  # converting a user's object may raise anything
            return {"error": f"{type(error).__name__}: {error}"}
        return {"epoch": finished, "history": self.epoch, "weight": weight, "metrics": values}

    def _check_reports(self, reports: list[dict[str, Any]]) -> None:
        for rank, report in enumerate(reports):
            if "error" in report:
                raise ControllerError(f"rank {rank} called Controller.step with {report['error']}")
        # "history" too: if only some ranks had seen an epoch before, only they would return early.
        for what in ("epoch", "history", "metrics"):
            seen = [sorted(r["metrics"]) if what == "metrics" else r[what] for r in reports]
            for rank, value in enumerate(seen):
                if value != seen[0]:
                    raise LockstepError(f"Controller.step: rank 0 has {what} {seen[0]}, rank {rank} has {what} {value}")
        if not any(report["weight"] for report in reports):
            raise ControllerError("Controller.step: num_samples must be more than 0 on some rank, got 0 on all")

    def _decide(self, epoch: int, metrics: dict[str, float]) -> dict[str, Any]:
        """Rank 0: the new record, or the error, as plain data. Never raises: the other ranks wait for the answer."""
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
        """What comes next, and whether policies are to see this epoch later."""
        bad = _not_finite(metrics)
        if not bad:
            usable = [record for record in self.history if record.usable]
            return _checked("the policy's decision", self.policy.decide([*usable, Record(epoch, metrics)])), True
        in_a_row = 1
        for record in reversed(self.history):
            if not _not_finite(record.metrics):
                break
            in_a_row += 1
        logger.warning("after epoch %d: non-finite metrics %s", epoch, bad)
        if in_a_row >= self.nan_patience:
            return Decision(UNCOMPRESSED, f"released: {', '.join(bad)} not finite for {in_a_row} epochs"), False
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
        checksum = zlib.crc32(history.encode())
        return {"config": json.loads(config), "epoch": self.epoch - 1, "bits": self._bits, "history": checksum}

    def sync(self) -> None:
        """Takes over rank 0's history and level: for workers that join a run (`hvd_dyncomp.elastic`). Collective."""
        self.load_state_dict(gather_json(self.transport, self.state_dict(), "hvd_dyncomp.controller.sync")[0])

    def state_dict(self) -> dict[str, Any]:
        """Plain data: the history and, to compare when it is loaded, the configuration."""
        config = {"on_error": self.on_error, "nan_patience": self.nan_patience, **self.policy.config()}
        return {"bits": self._bits, "history": [asdict(record) for record in self.history], "config": config}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the history and the level. The configuration stays this object's; a difference is warned about.

        Raises:
            ValueError: `state` is not the state of a controller; nothing has changed then.
        """
        try:
            history = list(check_history([Record(**record) for record in state["history"]]))
            bits, config = check_level("bits", state["bits"]), json.loads(json.dumps(state["config"]))
            if not isinstance(config, dict):
                raise TypeError(f"config must be a dict, got {shown(config)}")
            if history and history[-1].bits != bits:
                raise ValueError(f"bits must be the level after the last epoch, {history[-1].bits}, got {bits}")
        except Exception as error:  # a file may contain anything
            cause = f"{type(error).__name__}: {error}"
            raise ValueError(f"state must come from Controller.state_dict(), got {shown(state)}: {cause}") from error
        mine = json.loads(json.dumps(self.state_dict()["config"]))
        for key in sorted({*mine, *config}):
            if mine.get(key) != config.get(key):
                logger.warning(
                    "Controller: the loaded state has %s=%r; this controller keeps %r",
                    key,
                    config.get(key),
                    mine.get(key),
                )
        self.history, self._bits = history, bits


def _first_difference(mine: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The name of what differs between two fingerprints, and both values: of a configuration, the argument's."""
    for key in {**mine, **theirs}:
        one, other = mine.get(key), theirs.get(key)
        if one != other:
            inside = isinstance(one, dict) and isinstance(other, dict) and key == "config"
            return _first_difference(one, other) if inside else (key, one, other)  # type: ignore[arg-type]
    return None


def _not_finite(metrics: Mapping[str, float]) -> list[str]:
    return sorted(key for key, value in metrics.items() if not math.isfinite(value))


def _check_config(policy: Policy) -> None:
    """Ranks and checkpoints compare configurations as JSON; one that cannot be compared is refused at once."""
    config = policy.config()
    try:
        json.dumps(config, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"policy must return plain data from config(), got {shown(config)}: {error}") from error
    if not isinstance(config, dict):
        raise TypeError(f"policy must return a dict from config(), got {shown(config)}")


def _checked(what: str, decision: Any) -> Decision:
    """A policy's decision, which is the user's code's, as plain data."""
    if not isinstance(decision, tuple) or len(decision) != 2:
        raise TypeError(f"{what} must be a Decision(bits, reason), got {shown(decision)}")
    if not isinstance(decision[1], str):
        raise TypeError(f"{what} must have a string as its reason, got {shown(decision[1])}")
    return Decision(check_level(f"bits of {what}", decision[0]), decision[1])


def _weighted_means(reports: list[dict[str, Any]]) -> dict[str, float]:
    """Sample-weighted means over the ranks, names in sorted order; a mean lies between its values."""
    # A rank without samples may have NaN as its metrics; 0 * NaN must not spoil the others'.
    used = [report for report in reports if report["weight"] > 0]
    # Scaled by a power of two, which changes no digit: weights near the largest float would sum to infinity.
    exponent = math.frexp(max(report["weight"] for report in used))[1]
    weights = [math.ldexp(report["weight"], -exponent) for report in used]
    means = {}
    for key in reports[0]["metrics"]:
        values = [report["metrics"][key] for report in used]
        mean = sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
        # If all ranks have 0.7, the mean reaches a threshold of 0.7, whatever was rounded. (A NaN passes both.)
        means[key] = min(max(mean, min(values)), max(values))
    return means


def controller_from(given: Controller | Policy | float | None, transport: Transport | None) -> Controller:
    """The controller that a quantizer is given: one, a policy or level for a new one, or None for the default policy.

    Args:
        transport: of a new one.

    Raises:
        TypeError, ValueError: `given` is something else, or no level.
    """
    if isinstance(given, Controller):
        return given
    if isinstance(given, Real) and not isinstance(given, bool):
        given = check_level("controller", given)
    elif given is not None and not isinstance(given, Policy):
        raise TypeError(f"controller must be a Controller, a Policy or a level, got {shown(given)}")
    return Controller(given, transport=transport)
