"""The states of all ranks as one, for frameworks that keep what rank 0 has."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from hvd_dyncomp.checks import comes_from, shown
from hvd_dyncomp.exchange import residual_state
from hvd_dyncomp.meter import Meter
from hvd_dyncomp.sessions.session import Session
from hvd_dyncomp.transport.base import gather_or_raise


class AllRanks:
    """The states of a quantizer on all ranks and the state of its controller, for checkpoints with a single file.

        accelerator.register_for_checkpointing(AllRanks(quantizer))

    Each rank has residuals of its own, so the state of one rank is not enough to resume.

    A state takes 2 bytes per value and rank, in the file and in the memory of every rank, and up to twice as much
    memory while it is created. For large models on many ranks, save one `quantizer.state_dict()` per rank instead.

    Do not give it to `torch.distributed.checkpoint`, which loads values only into tensors of the same sizes: a new
    quantizer has no residuals yet, so its state has other sizes than the saved one. Use `PerRank` there.

    Args:
        quantizer: a `DynamicQuantizer`, an `Averager`, or what `compress` has returned. If the optimizer has a Horovod
            process set, call `quantizer.attach(optimizer)` before you load a state.

    Raises:
        TypeError: `quantizer` is something else.

    Examples:
        >>> from hvd_dyncomp import Averager
        >>> averager = Averager([("weight", torch.zeros(2000))], 4)
        >>> sorted(AllRanks(averager).state_dict())
        ['controller', 'ranks']
    """

    def __init__(self, quantizer: Session) -> None:
        if not isinstance(quantizer, Session):
            raise TypeError(
                "quantizer must be a DynamicQuantizer, an Averager or what compress has returned, got "
                f"{shown(quantizer)}"
            )
        self.quantizer = quantizer

    def __reduce__(self) -> tuple:
        raise TypeError(
            "AllRanks cannot be copied or pickled, because the states of the other ranks would be lost: save its "
            "state_dict(), which every rank must call"
        )

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks, in rank order. Collective: every rank calls it, between steps; all return the same.

        Returns:
            "ranks": each rank's `quantizer.state_dict()`, as `torch.save` writes it into a uint8 vector; "controller".

        Raises:
            RuntimeError: gradients are in flight, here or on another rank; on every rank.
        """
        transport = self.quantizer.everyone
        wrong: Exception | None = None
        mine = torch.empty(0, dtype=torch.uint8)
        try:
            mine = packed(self.quantizer.state_dict())
        except Exception as error:  # noqa: BLE001  # raised when the other ranks have heard of it
            wrong = error
        lengths = gather_or_raise(transport, mine.numel(), wrong, "hvd_dyncomp.all_ranks", "has no state")
        if transport.size > 1:
            mine = transport.wait(transport.allgather(mine, "hvd_dyncomp.all_ranks.states", lengths))
        return {"ranks": list(mine.split(lengths)), "controller": self.quantizer.controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a state, and the controller's state. Every rank calls it, with the same state.

        With the same number of ranks, on the same hosts, a run then continues bit for bit. With another number, or with
        FSDP if models are now sharded among another number of ranks, residuals begin at zero, and rank 0 logs a
        warning.

        Raises:
            ValueError: `state` does not come from `AllRanks.state_dict()`, or is that of another model; nothing has
                changed.
            RuntimeError: as the quantizer's `load_state_dict`.
        """
        with comes_from("AllRanks.state_dict()", state):
            packed, controller = state["ranks"], state["controller"]
            mine = self._of_this_rank(packed)
        before = self.quantizer.controller.state_dict()
        self.quantizer.controller.load_state_dict(controller)
        try:
            self.quantizer.load_state_dict(mine)
        except BaseException:
            self.quantizer.controller.load_state_dict(before)
            raise

    def _of_this_rank(self, packed: list[torch.Tensor]) -> Mapping[str, Any]:
        everyone, shard = self.quantizer.everyone, self.quantizer.shard
        own = _unpacked(packed[min(everyone.rank, len(packed) - 1)])
        if len(packed) == everyone.size and own.get("shard") == shard:
            return own
        if residual_state.waiting(own):
            residual_state.warn_of_loss(everyone.rank)
        meter = own["meter"] if everyone.rank < len(packed) else Meter().state_dict()
        return {**own, **residual_state.NOTHING, "rank": None, "shard": shard, "meter": meter}


def packed(state: Mapping[str, Any]) -> torch.Tensor:
    """The bytes that `torch.save` writes of a state, as a uint8 vector."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _unpacked(packed: torch.Tensor) -> dict[str, Any]:
    return torch.load(io.BytesIO(packed.cpu().numpy().tobytes()), weights_only=True)
