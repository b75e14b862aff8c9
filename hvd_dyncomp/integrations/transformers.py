"""A callback for Transformers' Trainer: compresses, moves the level, and keeps all ranks' states in checkpoints."""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Mapping
from numbers import Real
from typing import Any, Unpack

import torch

from hvd_dyncomp import ddp, replicas
from hvd_dyncomp.controller import Controller
from hvd_dyncomp.policies import Policy, Static, StepFunction
from hvd_dyncomp.sessions.all_ranks import AllRanks
from hvd_dyncomp.sessions.options import Options
from hvd_dyncomp.sessions.session import Session
from hvd_dyncomp.transport import processes
from hvd_dyncomp.transport.base import gather_json

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise ImportError("hvd_dyncomp.integrations.transformers needs Transformers: pip install transformers") from error

logger = logging.getLogger(__name__)

FILE = "quantizer.pt"  # in a checkpoint's folder
NOISE = ("_runtime", "_per_second", "_time", "epoch")  # metrics that differ between ranks or say nothing of training
UNWRAPPED = (
    "Trainer has not wrapped the model in DistributedDataParallel, so each rank would train alone: call evaluate() and "
    "predict() after train(), or use eval_on_start=True; on CPUs pass use_cpu=True"
)
NO_ACCURACY = (
    "StepFunction watches an accuracy, but the Trainer has no compute_metrics, so the first evaluation may raise an "
    "error: pass compute_metrics to the Trainer, or use a level such as 4, or Plateau(monitor='eval_loss')"
)
NO_EVALUATION = "the level never moves: Trainer's eval_strategy is 'no'; pass eval_strategy='epoch', or a level"


class CompressionCallback(TrainerCallback):
    """Compresses the gradients of a `Trainer` that trains with DistributedDataParallel.

        trainer = Trainer(model, args, train_dataset=..., eval_dataset=..., compute_metrics=...)
        trainer.add_callback(CompressionCallback(trainer, StepFunction()))

    - When training begins, it calls `hvd_dyncomp.ddp.compress` for the model as Trainer has wrapped it.
    - After each evaluation it steps the controller, with the metrics and `train_loss`, the latest that was logged.
      An evaluation within `train` counts if the model has trained since the one before.
    - Each checkpoint gets a file `quantizer.pt` with the state of all ranks (see `AllRanks` for its size). If training
      is resumed without this file, a warning is logged, and the residuals and the controller start empty.
    - With one process, nothing is compressed, and a warning says so.
    - A second `train()` continues with the same quantizer, or creates another one if `model_init` has made another
      model. For cross-validation, create one `Trainer` and one callback per fold.

    Args:
        trainer: the `Trainer` that gets the callback. Do not call its `evaluate` or `predict` before `train`.
        controller: a level, a policy or a `Controller`; default: constantly 4 bits. For a policy, Trainer must
            evaluate: `eval_strategy="epoch"`, and `logging_strategy="epoch"` for the training loss. `StepFunction()`
            needs an accuracy among the metrics (`compute_metrics`).
        options: see `hvd_dyncomp.sessions.options.Options`.

    Attributes:
        quantizer: what `compress` has returned; None before training.

    Raises:
        TypeError: `trainer` is no `Trainer`; from `train()`, the model is not compressed, and the message says why.

    Examples:
        >>> CompressionCallback(None, 4)
        Traceback (most recent call last):
        TypeError: trainer must be a transformers.Trainer, got NoneType
    """

    def __init__(
        self, trainer: Trainer, controller: Controller | Policy | float | None = None, **options: Unpack[Options]
    ) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(f"trainer must be a transformers.Trainer, got {type(trainer).__name__}")
        self.trainer, self._controller, self._options = trainer, controller, options
        self.quantizer: Session | None = None
        self._model: torch.nn.Module | None = None  # that is compressed
        self._trains = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compress the model, and load the checkpoint's file. Model and optimizer are loaded already."""
        model = self.trainer.model_wrapped
        if self.quantizer is None or model is not self._model:
            if processes() > 1 and model is self.trainer.model and not self.trainer.is_fsdp_enabled:
                raise TypeError(UNWRAPPED)
            self.quantizer = ddp.compress(model, self._controller, **self._options)
            self._model = model
            if self.quantizer.everyone.rank == 0:
                self._warn(args, self.quantizer.controller.policy)
        self._seen = state.global_step  # the latest step at which an evaluation does not count
        self._trains = True
        if state.global_step > 0:
            self._load(args, state, self.quantizer)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What is evaluated from now on, such as test data, is nothing for the controller."""
        self._trains = False

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **_: Any) -> None:
        """Step the controller. Before `on_save` of the same step."""
        if self.quantizer is None or not self._trains or state.global_step == self._seen:
            return
        self._seen = state.global_step
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
        seen = {name: value for name, value in numbers.items() if not name.endswith(NOISE)}
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        self.quantizer.controller.step({**seen, "train_loss": losses[-1]} if losses else seen)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the file into the checkpoint that Trainer has just written."""
        if self.quantizer is None or args.save_only_model:
            return
        everything = AllRanks(self.quantizer).state_dict()  # on every rank
        if args.should_save:
            everything["parameters"] = self._digest()
            path = os.path.join(self._own_folder(state), FILE)
            torch.save(everything, f"{path}.new")
            os.replace(f"{path}.new", path)

    def _warn(self, args: Any, policy: Policy) -> None:
        if isinstance(policy, StepFunction) and self.trainer.compute_metrics is None:
            logger.warning(NO_ACCURACY)
        if args.eval_strategy == "no" and not isinstance(policy, Static):
            logger.warning(NO_EVALUATION)

    def _digest(self) -> int:
        """Of what is trained: whether a file is of the same checkpoint as the model."""
        named = [(name, one) for name, one in self.trainer.model.named_parameters() if one.requires_grad]
        return zlib.crc32(json.dumps(replicas.numbers(named)).encode())

    def _load(self, args: Any, state: Any, quantizer: Session) -> None:
        given = args.resume_from_checkpoint  # Trainer tells nobody what train(resume_from_checkpoint=...) got
        folder = given if given and os.path.isdir(given) else self._own_folder(state)
        path, missing, saved = os.path.join(folder, FILE), "", {}
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if saved.pop("parameters", None) != self._digest():
                raise ValueError("it belongs to other parameters than the model has now")
        except Exception as error:  # noqa: BLE001  # a file may contain anything
            missing = f"{type(error).__name__}: {error}"
        reports = gather_json(quantizer.everyone, missing, "hvd_dyncomp.integrations.transformers")
        if not any(reports):
            AllRanks(quantizer).load_state_dict(saved)
        elif quantizer.everyone.rank == 0:
            logger.warning(
                "%s cannot be used on all ranks (%s), so the residuals and the controller start empty. A checkpoint "
                "saved with save_only_model=True does not contain this file; if the checkpoint is in another folder, "
                "pass that folder to TrainingArguments(resume_from_checkpoint=...), too",
                path,
                next(filter(None, reports)),
            )

    def _own_folder(self, state: Any) -> str:
        """Where Trainer keeps the checkpoint of this step; a trial of a search has a folder of its own."""
        folder = self.trainer._get_output_dir(getattr(self.trainer, "_trial", None))
        return os.path.join(folder, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
