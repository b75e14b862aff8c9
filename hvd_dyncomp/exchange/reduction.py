"""A section of a bucket, reduced among a group of ranks: what comes out are bytes that everyone decodes to one sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, TypeVar

import torch

from hvd_dyncomp.exchange.coding import Span
from hvd_dyncomp.exchange.group import Group
from hvd_dyncomp.exchange.messages import Messages
from hvd_dyncomp.exchange.topology import Section
from hvd_dyncomp.exchange.wire import HEADER_BYTES, Phase

Result = TypeVar("Result")
# One collective after the other. Yields None where messages are made and may not have been asked for yet, and goes on
# when they may be sent; yields the handle of a collective where it has to wait, and is sent what was received.
Collectives = Generator[Any, Any, Result]
Outgoing = tuple[torch.Tensor, list[int]]  # messages one after the other, and their lengths


class Reduction(ABC):
    """One section in one step.

    Args:
        messages: of the bucket.
        section: which blocks.
        group: who reduces them; None where this rank does not, and only decodes.

    Attributes:
        section: see above.
    """

    def __init__(self, messages: Messages, section: Section, group: Group | None) -> None:
        self._messages, self.section, self._own_group = messages, section, group
        self._bucket = messages.bucket

    @property
    def _group(self) -> Group:
        if self._own_group is None:
            raise RuntimeError("this rank does not take part in reducing this section")
        return self._own_group

    @property
    def result_bytes(self) -> int:
        """Length of what `collectives` returns."""
        _, spans = self._result
        return sum(HEADER_BYTES + self._messages.coding.nbytes(span) for span in spans)

    @abstractmethod
    def collectives(
        self, values: list[torch.Tensor], failure: Exception | None, origin: int = 0
    ) -> Collectives[torch.Tensor]:
        """All collectives; returns the bytes that everyone has then.

        Args:
            values, origin: as `encode` takes them.
            failure: why there are no values. The other ranks are told that there will be no result, as after an error
                here, and it is raised.
        """

    @abstractmethod
    def encode(self, values: list[torch.Tensor], origin: int = 0) -> Outgoing:
        """Quantizes the section, with its residual.

        Args:
            values: contiguous float32 tensors that stand for the bucket's values from the `origin`-th on.
        """

    def _first_messages(
        self, values: list[torch.Tensor], failure: Exception | None, origin: int, count: int
    ) -> tuple[Outgoing, Exception | None]:
        """What `encode` makes, or `count` messages that say that there is nothing, and why."""
        if failure is None:
            try:
                return self.encode(values, origin), None
            except Exception as error:  # noqa: BLE001  # the others wait
                failure = error
        return self._messages.aborts(count), failure

    @property
    @abstractmethod
    def _result(self) -> tuple[Phase, list[Span]]:
        """The phase of the messages in the result, and their blocks, by rank of the section."""

    @abstractmethod
    def decode(
        self, result: torch.Tensor, values: list[torch.Tensor], factor: float, senders: tuple[int, ...]
    ) -> torch.Tensor:
        """Writes the sum, times `factor`, into the bucket's values; returns how many blocks are not finite, an int64.

        Args:
            result: what `collectives` has returned, here or on another rank.
            senders: for error messages, whom each message came from.

        Raises:
            LockstepError: a message is not what it should be.
        """

    def messages_in(self, result: torch.Tensor, senders: tuple[int, ...]) -> list[torch.Tensor]:
        """The payloads in the result, by rank of the section; arguments and errors as those of `decode`."""
        return self._messages.split(result, *self._result, senders)
