"""The states of all ranks in one folder of torch.distributed.checkpoint, beside a sharded model and its optimizer."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from hvd_dyncomp.agreement import Call, agree
from hvd_dyncomp.all_ranks import AllRanks
from hvd_dyncomp.checks import comes_from, integer, shown
from hvd_dyncomp.fsdp.quantizer import Quantizer

Result = TypeVar("Result")

_STATES = Call("per_rank", "cannot save or load its state", "", "")  # only errors are compared


class PerRank:
    """The states of a quantizer and its controller for `torch.distributed.checkpoint`, with one key per rank.

        dcp.save({"model": model_state, "quantizer": PerRank(quantizer)}, checkpoint_id=folder)

    Each rank has residuals of its own. `dcp` keeps one value per key, and loads values into objects of the same sizes
    that the program already has. So the state of a rank is a single bytes value, and its key has the rank's number.

    Args:
        quantizer: what `fsdp.compress` has returned.
        ranks: number of ranks that saved the state to be loaded, if it differs from the present number.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value.
    """

    def __init__(self, quantizer: Quantizer, *, ranks: int | None = None) -> None:
        if not isinstance(quantizer, Quantizer):
            raise TypeError(f"quantizer must be what fsdp.compress has returned, got {shown(quantizer)}")
        self.quantizer = quantizer
        self.ranks = None if ranks is None else integer("ranks", ranks, 1)

    def state_dict(self) -> dict[str, bytes]:
        """Return this rank's state under its key. Collective: every rank calls it, between steps.

        If the object was created with `ranks=`, the result has only the keys that `dcp.load` is to read, with empty
        values. Do not save such a result.

        Raises:
            RuntimeError: gradients are in flight, or wait to be averaged.
            LockstepError: another rank has an error. On all ranks that have none of their own.
        """
        if self.ranks is not None:
            return {_key(rank): b"" for rank in range(self.ranks)}
        return {_key(self.quantizer.everyone.rank): self._together(self._packed)}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Load this rank's state, and the controller's state. Collective: every rank calls it, between steps.

        With the same number of ranks, a run then continues bit for bit. With another number, given as `ranks`, each
        rank gets an equal part of the sum of all residuals of its shard, as with `AllRanks`. If the model is now
        sharded among another number of ranks, residuals start at zero, and rank 0 logs a warning.

        Raises:
            ValueError: `state` does not come from `PerRank.state_dict()`, was saved by another number of ranks, or is
                that of another model; nothing has changed on this rank.
            RuntimeError: gradients are in flight, or wait to be averaged, or an error has ended a step.
            LockstepError: another rank has an error. On all ranks that have none of their own.
        """
        self._together(lambda: self._load(state))

    def _packed(self) -> bytes:
        own = {
            "ranks": self.quantizer.everyone.size,
            "quantizer": torch.frombuffer(bytearray(_bytes(self.quantizer.state_dict())), dtype=torch.uint8),
            "controller": self.quantizer.controller.state_dict(),
        }
        return _bytes(own)

    def _load(self, state: Mapping[str, bytes]) -> None:
        everyone = self.quantizer.everyone
        keys = [_key(everyone.rank)] if self.ranks is None else [_key(rank) for rank in range(self.ranks)]
        with comes_from("PerRank.state_dict()", state):
            found = [_unpacked(state[key]) for key in keys]
            saved_by, controller = found[0]["ranks"], found[0]["controller"]
            packed = [one["quantizer"] for one in found]
        if saved_by != (self.ranks or everyone.size):
            raise ValueError(f"state was saved by {saved_by} ranks; load it with PerRank(quantizer, ranks={saved_by})")
        if self.ranks is None:  # of which AllRanks takes this rank's
            packed = packed * everyone.size
        AllRanks(self.quantizer).load_state_dict({"ranks": packed, "controller": controller})

    def _together(self, work: Callable[[], Result]) -> Result:
        """Do something; an error on one rank is one on all of them. Collective."""
        wrong: Exception | None = None
        done: Any = None
        try:
            done = work()
        except Exception as error:  # noqa: BLE001  # raised when the other ranks have heard of it
            wrong = error
        agree(self.quantizer.everyone, [], wrong, _STATES)
        return done


def _key(rank: int) -> str:
    return f"rank{rank}"


def _bytes(state: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()


def _unpacked(state: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(state), weights_only=True)
