"""Makes sure, once a step, that all ranks are doing the same thing."""

from __future__ import annotations

import torch

from hvd_dyncomp import comm
from hvd_dyncomp.binding import Binding
from hvd_dyncomp.buckets import Bucket
from hvd_dyncomp.codec import HEADER_BYTES, WIRE_VERSION, Header, Phase, check_header, checksum, header_tensor


class Handshake:
    """An allgather of 16 bytes: level, step, a checksum of all buckets, and rank 0's choice of the next level.

    It goes out with the first gradient, so that its answer is there long before it is asked for. It is the same
    collective whatever the ranks disagree about; without it, a rank at 4 bits would wait for ever for the scatter of
    one at 32.
    """

    def __init__(self, buckets: list[Bucket], *, bits: int, choice: int, step: int, binding: Binding) -> None:
        plan = checksum(" ".join(f"{bucket.plan:08x}" for bucket in buckets))
        blocks = sum(bucket.blocks for bucket in buckets)
        choice = choice if binding.rank == 0 else 0
        self._mine = Header(WIRE_VERSION, Phase.HANDSHAKE, bits, choice, plan, step & 0xFFFFFFFF, blocks & 0xFFFFFFFF)
        # Named like the gradients themselves: the same on all ranks, and no other optimizer's.
        self._world_size, self._name = binding.world_size, f"hvd_dyncomp.{binding.named[0][0]}.handshake"
        message = header_tensor(self._mine, torch.device("cpu"))
        self._handle = comm.start_allgather(message, self._name, binding.process_set)

    @property
    def sent_bytes(self) -> int:
        """What this rank sends for it."""
        return HEADER_BYTES * (self._world_size - 1)

    def check(self) -> int:
        """Waits for all ranks' messages and compares them. Returns rank 0's choice.

        Raises:
            LockstepError: a rank differs; the text names the rank and what differs.
        """
        received = comm.wait(self._handle)
        choice = 0
        for rank in range(self._world_size):
            message = received[rank * HEADER_BYTES : (rank + 1) * HEADER_BYTES]
            if rank == 0 and message.numel() == HEADER_BYTES:
                choice = Header.from_bytes(message.numpy().tobytes()).choice
            check_header(message, self._mine._replace(choice=choice if rank == 0 else 0), rank, self._name)
        return choice
