"""Makes sure, once a step, that all ranks do the same thing, before anything is sent that only fits if they do."""

from __future__ import annotations

import torch

from hvd_dyncomp.errors import JOINED, LockstepError
from hvd_dyncomp.exchange.binding import Binding
from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.codec import HEADER_BYTES, WIRE_VERSION, Header, Phase, check_header, checksum, header_tensor
from hvd_dyncomp.meter import allreduce_bytes
from hvd_dyncomp.transport import horovod as comm


class Handshake:
    """16 bytes from every rank to every rank: level, step, a checksum of all buckets, and rank 0's choice of a level.

    It goes out with the first gradient. It is the same collective whatever the ranks disagree about; without it, a rank
    at 4 bits would wait for ever for the scatter of one at 32. And it is an allreduce, a sum to which every rank adds
    zeros for the others: the only collective that Horovod completes when a rank has left by `hvd.join()`, whose own
    place then remains zero.
    """

    def __init__(self, buckets: list[Bucket], *, bits: int, choice: int, step: int, binding: Binding) -> None:
        plan = checksum(" ".join(f"{bucket.plan:08x}" for bucket in buckets))
        blocks = sum(bucket.blocks for bucket in buckets)
        choice = choice if binding.rank == 0 else 0
        self._mine = Header(WIRE_VERSION, Phase.HANDSHAKE, bits, choice, plan, step & 0xFFFFFFFF, blocks & 0xFFFFFFFF)
        # Named like the gradients themselves: the same on all ranks, and no other optimizer's.
        self._world_size, self._name = binding.world_size, f"hvd_dyncomp.{binding.named[0][0]}.handshake"
        self._places = torch.zeros(binding.world_size, HEADER_BYTES, dtype=torch.uint8)
        self._places[binding.rank] = header_tensor(self._mine, torch.device("cpu"))
        self._handle = comm.start_sum(self._places.view(torch.int64), self._name, binding.process_set)
        self._outcome: int | Exception | None = None

    @property
    def sent_bytes(self) -> int:
        """What this rank sends for it."""
        return int(allreduce_bytes(self._places.numel(), self._world_size))

    def agreed(self) -> bool:
        """Whether all ranks are known by now to do the same thing. Neither blocks nor raises."""
        if self._outcome is None and comm.poll(self._handle):
            self._outcome = self._compare()
        return isinstance(self._outcome, int)

    def check(self) -> int:
        """Waits for all ranks' messages and compares them. Returns rank 0's choice.

        Raises:
            LockstepError: a rank differs; the text names the rank and what differs.
        """
        if self._outcome is None:
            self._outcome = self._compare()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def _compare(self) -> int | Exception:
        try:
            comm.wait(self._handle)
            choice = Header.from_bytes(self._places[0].numpy().tobytes()).choice
            for rank, message in enumerate(self._places):
                if not message.any():
                    raise LockstepError(f"{self._name}: rank {rank} takes no part in this step: {JOINED}")
                check_header(message, self._mine._replace(choice=choice if rank == 0 else 0), rank, self._name)
        except Exception as error:  # noqa: BLE001  # raised by check()
            return error
        return choice
