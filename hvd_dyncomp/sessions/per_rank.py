"""The states of all ranks in one folder of torch.distributed.checkpoint, beside the model and its optimizer."""

from __future__ import annotations

import io
from collections.abc import Mapping

import torch

from hvd_dyncomp.checks import comes_from, integer
from hvd_dyncomp.sessions.agreement import STATES, on_all_ranks
from hvd_dyncomp.sessions.all_ranks import AllRanks, packed
from hvd_dyncomp.sessions.session import Session
from hvd_dyncomp.transport.launched import has_process_group


class PerRank:
    """The states of a quantizer and its controller for `torch.distributed.checkpoint`, with one key per rank.

        dcp.save({"model": model_state, "quantizer": PerRank(quantizer)}, checkpoint_id=folder)

    Each rank has residuals of its own. `dcp` keeps one value per key, and loads values into objects of the same sizes
    that the program already has. So the state of a rank is a single bytes value, and its key has the number of the rank
    in the job, also if the model trains in a process group of some ranks only.

    Args:
        quantizer: a `DynamicQuantizer`, an `Averager`, or what `compress` has returned. If the optimizer has a Horovod
            process set, call `quantizer.attach(optimizer)` before you load a state.
        ranks: number of ranks that saved the state to be loaded, if it differs from the present number.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value.

    Examples:
        >>> from hvd_dyncomp import Averager
        >>> averager = Averager([("weight", torch.zeros(2000))], 4)
        >>> list(PerRank(averager).state_dict())
        ['rank0']
    """

    def __init__(self, quantizer: Session, *, ranks: int | None = None) -> None:
        self._all_ranks, self.quantizer = AllRanks(quantizer), quantizer
        self.ranks = None if ranks is None else integer("ranks", ranks, 1)

    def state_dict(self) -> dict[str, bytes]:
        """Return this rank's state under its key. Collective: every rank calls it, between steps.

        If the object was created with `ranks=`, the result has only the keys that `dcp.load` is to read, with empty
        values. Do not save such a result.

        Raises:
            RuntimeError: gradients are in flight, here or on another rank, or wait to be averaged.
            ValueError: `ranks` was given, and the quantizer does not work among all ranks of the job.
            LockstepError: another rank has another error. On all ranks that have none of their own.
        """
        with on_all_ranks(self.quantizer.everyone, STATES):
            state = self._state()
        return state

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Load this rank's state, and the controller's state. Collective: every rank calls it, between steps.

        With the same number of ranks, on the same hosts, a run then continues bit for bit. With another number, given
        as `ranks`, or if the model is now sharded among another number of ranks, residuals begin at zero, and rank 0
        logs a warning.

        Raises:
            ValueError: `state` does not come from `PerRank.state_dict()`, was saved by another number of ranks, or is
                that of another model; nothing has changed on this rank.
            RuntimeError: gradients are in flight, here or on another rank, or wait to be averaged; or an error has
                ended a step.
            LockstepError: another rank has another error. On all ranks that have none of their own.
        """
        with on_all_ranks(self.quantizer.everyone, STATES):
            self._load(state)

    def _state(self) -> dict[str, bytes]:
        if self.ranks is not None:
            return dict.fromkeys(self._keys(), b"")
        [key] = self._keys()
        own = {
            "ranks": self.quantizer.everyone.size,
            "quantizer": packed(self.quantizer.state_dict()),
            "controller": self.quantizer.controller.state_dict(),
        }
        return {key: packed(own).numpy().tobytes()}

    def _load(self, state: Mapping[str, bytes]) -> None:
        everyone = self.quantizer.everyone
        with comes_from("PerRank.state_dict()", state):
            found = [torch.load(io.BytesIO(state[key]), weights_only=True) for key in self._keys()]
            saved_by, controller = found[0]["ranks"], found[0]["controller"]
            states = [one["quantizer"] for one in found]
        if saved_by != (self.ranks or everyone.size):
            raise ValueError(f"state was saved by {saved_by} ranks; load it with PerRank(quantizer, ranks={saved_by})")
        if self.ranks is None:  # of which AllRanks takes this rank's
            states = states * everyone.size
        self._all_ranks.load_state_dict({"ranks": states, "controller": controller})

    def _keys(self) -> list[str]:
        """Those of the state that is to be saved or loaded."""
        everyone, job = self.quantizer.everyone, torch.distributed if has_process_group() else None
        if self.ranks is None:
            # Not the rank in a group of some ranks: `dcp` keeps one of several values with the same key.
            return [f"rank{job.get_rank() if job else everyone.rank}"]
        if job and everyone.size != job.get_world_size():
            raise ValueError(
                f"ranks must be None for a quantizer that works among {everyone.size} of {job.get_world_size()} ranks, "
                f"got {self.ranks}: load its state with as many ranks as have saved it"
            )
        return [f"rank{rank}" for rank in range(self.ranks)]
