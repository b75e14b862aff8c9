"""The exchange for Lightning's Trainer; docs/frameworks.md has a whole program."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from hvd_dyncomp import ddp
from hvd_dyncomp.checks import shown
from hvd_dyncomp.controller import Controller
from hvd_dyncomp.errors import InFlight
from hvd_dyncomp.policies import Policy
from hvd_dyncomp.sessions.all_ranks import AllRanks
from hvd_dyncomp.sessions.options import Options
from hvd_dyncomp.sessions.session import Session
from hvd_dyncomp.transport.base import gather_json

logger = logging.getLogger(__name__)

# Lightning is there under two names, often at once. Each takes only callbacks that derive from its own class.
_bases, _missing = [], None
for _package in ("lightning.pytorch", "pytorch_lightning"):
    try:
        _bases.append(importlib.import_module(_package).Callback)
    except ModuleNotFoundError as _error:
        _missing = _error
if not _bases:
    raise ImportError("hvd_dyncomp.integrations.lightning needs Lightning: run 'pip install lightning'") from _missing


class CompressionCallback(*_bases):  # type: ignore[misc]  # mypy wants bases that are known before the program runs
    """Compress the gradients of a Trainer with DDP, and move the level after each validation.

        callback = CompressionCallback(StepFunction())
        trainer = L.Trainer(strategy="ddp", callbacks=[callback])

    It calls `hvd_dyncomp.ddp.compress` when `fit` begins, and `controller.step` when a validation within `fit` ends
    (not after the sanity check). Each validation is an "epoch" of the controller. Lightning's checkpoints get the state
    of all ranks and of the controller, as `AllRanks` makes it, and a run that `fit(ckpt_path=...)` resumes continues
    with it. If the checkpoint has no such state, for example because it was saved after an exception, residuals start
    at zero. A second `fit` of the same module keeps the residuals and the controller. With one process, nothing is
    compressed.

    Args:
        controller: a `Controller`, a policy or a level, as for `ddp.compress`.
        metrics: names of the metrics in `trainer.callback_metrics` that are passed to the controller, the same on every
            rank; default: the metrics that the validation has logged. A metric that training logs once per epoch is set
            only after validation, so the controller gets its value of the previous epoch, from the second epoch on.
        options: see `hvd_dyncomp.sessions.options.Options`.

    Attributes:
        quantizer: what `ddp.compress` has returned, with `controller` and `meter`; None before `fit`.

    Raises:
        TypeError: `metrics` is no sequence of names. `fit` raises what `ddp.compress` raises.

    Examples:
        >>> callback = CompressionCallback(4, metrics=["val_loss"], min_numel=4096)
        >>> callback.quantizer is None, callback.state_dict()
        (True, {})
    """

    def __init__(
        self,
        controller: Controller | Policy | float | None = None,
        *,
        metrics: Iterable[str] | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__()
        if isinstance(metrics, (list, tuple)) and all(isinstance(name, str) for name in metrics):
            metrics = tuple(metrics)
        elif metrics is not None:
            raise TypeError(f"metrics must be a list or tuple of names, got {shown(metrics)}")
        self.quantizer: Session | None = None
        self._controller, self._metrics, self._options = controller, metrics, options
        self._module: Any = None  # whose gradients the quantizer compresses
        self._loaded: Mapping[str, Any] | None = None  # a checkpoint's state, until there is a quantizer
        self._fitting = False  # with the quantizer
        self._alone = False  # since an exception: the other ranks may be elsewhere
        self._before: dict[str, Any] = {}  # the metrics when validation began

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Lightning calls it when fit, validate, test or predict begins, before a checkpoint is loaded."""
        self._loaded, self._fitting, self._alone = None, False, False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Compress the model, which DDP has wrapped by now, anew in every fit."""
        controller, state, again = self._controller, None, self.quantizer is not None and self._module is pl_module
        if self.quantizer is not None and again:
            controller = self.quantizer.controller
            with contextlib.suppress(InFlight):  # after an error in backward
                state = None if self._loaded else self.quantizer.state_dict()
        self.quantizer, self._module = None, pl_module  # the old one goes, with its connections, before there is a new
        self.quantizer = ddp.compress(trainer.strategy.model, controller, **self._options)
        if self._loaded:
            AllRanks(self.quantizer).load_state_dict(self._loaded)
        elif again:
            everyone = gather_json(self.quantizer.everyone, state is not None, "hvd_dyncomp.lightning.states")
            if state is not None and all(everyone):
                self.quantizer.load_state_dict(state)
            else:
                logger.warning("an error interrupted a step of the previous fit: this fit starts with zero residuals")
        self._loaded, self._fitting = None, True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Remember which metrics are old."""
        self._before = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Move the level; before Lightning saves a checkpoint."""
        if self._fitting and self.quantizer is not None and not trainer.sanity_checking:
            found = trainer.callback_metrics
            names = [name for name in found if found[name] is not self._before.get(name)]
            names = names if self._metrics is None else [name for name in self._metrics if name in found]
            self.quantizer.controller.step({name: found[name] for name in names})

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lightning calls it before a callback that saves a checkpoint then."""
        self._alone = True

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks. Collective: Lightning calls it on every rank, and keeps what rank 0 gets.

        The state is empty after an exception, and within a step, when a signal from the cluster causes the checkpoint.
        """
        if self.quantizer is None:
            return {}
        if self._alone:
            logger.warning(
                "this checkpoint, saved after an exception, does not contain the state of the quantizer and the "
                "controller; to resume with that state, use an earlier checkpoint"
            )
            return {}
        try:
            return AllRanks(self.quantizer).state_dict()
        except InFlight as error:  # on all ranks
            logger.warning("this checkpoint does not contain the state of the quantizer and the controller: %s", error)
            return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a checkpoint, which Lightning loads before `on_fit_start`, or a tuner within fit."""
        if self._fitting and self.quantizer is not None:
            AllRanks(self.quantizer).load_state_dict(state_dict)
        else:
            self._loaded = state_dict
