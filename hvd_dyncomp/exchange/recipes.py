"""How a bucket's values become their sum over ranks: each way is a generator that starts one collective after another.

`summed` returns bytes from which `decode` makes the same sum on all ranks. `pair` and `sharded` sum one section of the
bucket, `by_host` sums within hosts before and tells neighbours the result afterwards.

A generator drops what it no longer needs before it waits: a bucket may wait for long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.exchange.coding import Span, Values
from hvd_dyncomp.exchange.messages import Messages
from hvd_dyncomp.exchange.task import Collectives, Gate
from hvd_dyncomp.exchange.topology import Arrangement, Section, dtype_within_host
from hvd_dyncomp.exchange.wire import Phase
from hvd_dyncomp.ranges import marked


def summed(messages: Messages, values: list[torch.Tensor]) -> Collectives[torch.Tensor]:
    """The sum of a bucket over all ranks, as bytes for `decode`.

    Args:
        messages: of the bucket in this step.
        values: contiguous float32 tensors, by slot.
    """
    arrangement = messages.bucket.arrangement
    if arrangement.hierarchical:
        return by_host(messages, arrangement, values)
    [section] = arrangement.sections
    return of_section(messages, section, Values(messages.bucket.starts, values))


def decode(messages: Messages, result: torch.Tensor, values: list[torch.Tensor], factor: float) -> None:
    """Write the sum times `factor` into the values.

    Args:
        messages, values: as in `summed`.
        result: what that has returned.
        factor: multiplies the sum.

    Raises:
        LockstepError: a message is not as expected.
    """
    arrangement, whole = messages.bucket.arrangement, Values(messages.bucket.starts, values)
    if not arrangement.hierarchical:
        [section] = arrangement.sections
        decode_section(messages, section, result, whole, factor, section.ranks)
        return
    start = 0
    for owner, section in zip(arrangement.host_ranks, arrangement.sections, strict=True):
        own = result[start : start + _result_bytes(messages, section)]
        decode_section(messages, section, own, whole, factor, (owner,) * len(section.ranks))
        start += _result_bytes(messages, section)
    if start != result.numel():
        raise LockstepError(f"{messages.where}: {result.numel()} bytes arrived, expected {start}")


def of_section(messages: Messages, section: Section, values: Values) -> Collectives[torch.Tensor]:
    """The sum of a section over its ranks; `values`: those of the section, at least."""
    return (sharded if section.sharded else pair)(messages, section, values)


def pair(messages: Messages, section: Section, values: Values) -> Collectives[torch.Tensor]:
    """Between two ranks: each sends the other its whole section, and both sum.

    With two ranks this costs as many bytes as scatter, reduce and gather, 2(N-1)/N * bits = bits per value, and saves
    one quantization and one collective. With more ranks it would cost (N-1) * bits.

    It is an alltoall, because Horovod fuses allgathers that are ready together, and then nothing could be decoded
    before all had arrived.
    """
    place, group = section.ranks.index(messages.bucket.rank), messages.among(section.ranks)
    both, lengths = encode_whole(messages, section, values, place)
    del values
    yield Gate.SEND
    own, other = both.split(lengths)[:: 1 - 2 * place]
    to_the_other = [0 if rank == messages.bucket.rank else len(own) for rank in section.ranks]
    received = yield group.alltoall(own, to_the_other, to_the_other, messages.name(Phase.PAIR), other)
    if len(received) != len(other):
        return torch.cat([own, received])  # it is no message of this exchange, as `decode` will say
    return both


def sharded(messages: Messages, section: Section, values: Values) -> Collectives[torch.Tensor]:
    """Among more than two ranks: scatter, reduce, gather (docs/math.md, equations 1 to 5).

    1. Every rank quantizes gradient + residual, cuts the blocks into one shard per rank and sends each shard to its
       owner (an alltoall of bytes).
    2. The owner decodes the versions of its shard, sums them, adds the shard's residual and quantizes the sum.
    3. An allgather of bytes returns the sum to all ranks. They all decode the same bytes, and so hold the same bits.

    With any number of ranks N, a value costs a rank 2(N-1)/N * bits on the wire, and is quantized twice.
    """
    place, group = section.ranks.index(messages.bucket.rank), messages.among(section.ranks)
    outgoing, lengths = encode_shards(messages, section, values)
    del values
    yield Gate.SEND
    arriving = [lengths[place]] * len(lengths)
    handle = group.alltoall(outgoing, lengths, arriving, messages.name(Phase.SCATTER))
    del outgoing  # the transport has them
    received = yield handle
    message = reduce_shard(messages, section, section.shards[place], received)
    del received
    handle = group.allgather(message, lengths, messages.name(Phase.GATHER))
    del message
    return (yield handle)


def by_host(messages: Messages, arrangement: Arrangement, values: list[torch.Tensor]) -> Collectives[torch.Tensor]:
    """On hosts of several workers: within hosts, between hosts, within hosts (docs/math.md, equation 6).

    1. Every rank sends each neighbour on its host the values of that neighbour's section; the owner sums them.
    2. The owner reduces its section of the host's sum with the owners of the same section on other hosts, as all ranks
       do in the flat exchange: at the controller's level, with error feedback.
    3. The owner sends the result to its neighbours unchanged, as codes. All ranks decode the same bytes.

    So what leaves a host does not grow with its workers, and a worker quantizes only its section. Within a host, values
    travel as bfloat16 at levels up to 7 bits, where its rounding is small in comparison, and as float32 above;
    docs/dev/decisions.md has the cost of the alternatives.
    """
    own, group = arrangement.sections[arrangement.own], messages.among(arrangement.host_ranks)
    outgoing, lengths = values_for_neighbours(messages, arrangement, values)
    yield Gate.SEND
    to_owner = messages.lengths(_value_sizes(messages, [own]))[0]
    arriving = [0 if rank == messages.bucket.rank else to_owner for rank in group.ranks]
    handle = group.alltoall(outgoing, lengths, arriving, messages.name(Phase.LOCAL_SCATTER))
    del outgoing  # the transport has them
    received = yield handle
    between = of_section(messages, own, sum_of_host(messages, arrangement, values, received))
    del received, values
    result = yield from between
    messages.payloads(result, _result_sizes(messages, own), own.ranks)  # only here it is known who has sent a wrong one
    arriving = [_result_bytes(messages, section) for section in arrangement.sections]
    return (yield group.allgather(result, arriving, messages.name(Phase.LOCAL_GATHER)))


# The steps of recipes, of which each is a range in a profile.


@marked("encode")
def encode_whole(messages: Messages, section: Section, values: Values, place: int) -> tuple[torch.Tensor, list[int]]:
    """Room for a message of each of two ranks, with this rank's own, number `place`, written; and their lengths."""
    both, payloads, lengths = messages.allocate(_result_sizes(messages, section))  # the other's overwrites one
    residuals, dither = messages.bucket.residuals, messages.dither(Phase.PAIR)
    messages.coding.encode(payloads[place], section.span, values, residuals.section(), dither=dither)
    residuals.quantized()
    return both, lengths


@marked("encode")
def encode_shards(messages: Messages, section: Section, values: Values) -> tuple[torch.Tensor, list[int]]:
    """Messages with the shards of all ranks, and their lengths."""
    bucket, coding, sizes = messages.bucket, messages.coding, _result_sizes(messages, section)
    begin, dither = section.first * bucket.block_size, messages.dither(Phase.SCATTER)
    if (
        bucket.streams.late
    ):  # on a GPU a call is a launch, and one per rank would keep the program busy: codes are copied
        codes = torch.empty(sum(sizes), dtype=torch.uint8, device=bucket.device)
        parts = [(section.span, codes)]
    else:
        outgoing, payloads, lengths = messages.allocate(sizes)
        parts = list(zip(section.shards, payloads, strict=True))
    for shard, payload in parts:
        first, size = shard.first * bucket.block_size - begin, shard.blocks * bucket.block_size
        residual = bucket.residuals.section(slice(first, first + size))
        coding.encode(payload, shard, values, residual, dither=dither)
    if bucket.streams.late:
        outgoing, lengths = messages.wrap(codes, sizes)
    bucket.residuals.quantized()
    return outgoing, lengths


@marked("reduce")
def reduce_shard(messages: Messages, section: Section, shard: Span, received: torch.Tensor) -> torch.Tensor:
    """The message with the sum of all ranks' versions of this rank's shard."""
    size, residuals = messages.coding.nbytes(shard), messages.bucket.residuals
    versions = messages.payloads(received, [size] * len(section.ranks), section.ranks)
    message, [payload], _ = messages.allocate([size])
    dither = messages.dither(Phase.GATHER)
    messages.coding.reduce(payload, shard, versions, residuals.of_shard(), dither=dither)
    return message


@marked("decode")
def decode_section(
    messages: Messages, section: Section, result: torch.Tensor, values: Values, factor: float, senders: Sequence[int]
) -> None:
    """Write a section's sum, times `factor`, into the bucket's values; `senders`: who has sent each message of it."""
    payloads, coding = messages.payloads(result, _result_sizes(messages, section), senders), messages.coding
    if not section.sharded:  # in the order of the ranks, so that all replicas hold the same bits
        coding.decode(values, section.span, payloads, factor)
        return
    shards = section.shards
    if messages.bucket.streams.late:
        payloads, shards = [torch.cat(payloads)], [section.span]
    for shard, payload in zip(shards, payloads, strict=True):
        coding.decode(values, shard, [payload], factor)


@marked("scatter_on_host")
def values_for_neighbours(
    messages: Messages, arrangement: Arrangement, values: list[torch.Tensor]
) -> tuple[torch.Tensor, list[int]]:
    """Messages with the neighbours' sections, and their lengths, 0 for this rank."""
    own = arrangement.own
    others = [section for number, section in enumerate(arrangement.sections) if number != own]
    outgoing, payloads, lengths = messages.allocate(_value_sizes(messages, others))
    for section, payload in zip(others, payloads, strict=True):
        message = payload.view(dtype_within_host(messages.bits))
        for _, places, part in _parts(messages, section, values):
            message[places] = part
    return outgoing, [*lengths[:own], 0, *lengths[own:]]


@marked("sum_on_host")
def sum_of_host(
    messages: Messages, arrangement: Arrangement, values: list[torch.Tensor], received: torch.Tensor
) -> Values:
    """This rank's values of its section, plus the neighbours' in the order of their ranks.

    Its own are read only now: while a rank waits for its neighbours, it holds what it sends and no second copy.
    """
    bucket, section = messages.bucket, arrangement.sections[arrangement.own]
    others = [rank for rank in arrangement.host_ranks if rank != bucket.rank]
    payloads = messages.payloads(received, _value_sizes(messages, [section]) * len(others), others)
    first, *more = [payload.view(dtype_within_host(messages.bits)) for payload in payloads]
    total = torch.empty(len(first), dtype=torch.float32, device=bucket.device)
    sums = Values([], [])
    for start, places, part in _parts(messages, section, values):
        sums.starts.append(start)
        sums.tensors.append(torch.add(part, first[places], out=total[places]))
    for version in more:
        total += version
    return sums


def _parts(
    messages: Messages, section: Section, values: list[torch.Tensor]
) -> Iterator[tuple[int, slice, torch.Tensor]]:
    """A section's values, by slot: the first one's place in the bucket, theirs in the section, and the values."""
    place = 0
    for slot, begin, end in messages.bucket.parts(section.span):
        part = values[slot.index].detach().view(-1)[begin - slot.start : end - slot.start]
        yield begin, slice(place, place + len(part)), part
        place += len(part)


def _value_sizes(messages: Messages, sections: Sequence[Section]) -> list[int]:
    """The bytes of sections' values within the host, without headers."""
    itemsize = dtype_within_host(messages.bits).itemsize
    return [
        itemsize * sum(end - begin for _, begin, end in messages.bucket.parts(section.span)) for section in sections
    ]


def _result_sizes(messages: Messages, section: Section) -> list[int]:
    """The bytes of the codes that make up a section's sum, by rank of the section; without headers."""
    spans = section.shards if section.sharded else [section.span] * len(section.ranks)
    return [messages.coding.nbytes(span) for span in spans]


def _result_bytes(messages: Messages, section: Section) -> int:
    return sum(messages.lengths(_result_sizes(messages, section)))
