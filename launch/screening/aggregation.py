"""The mean of several workers' gradients, as compression leaves it: uncompressed, and quantized with error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from screening import codec
from screening.allocation import allocate
from screening.contenders import Contender
from screening.feedback import Sender, Way

SMALL = 1024  # tensors of fewer values travel uncompressed, as the library's min_numel has it

MOMENTUM = 0.9  # of SGD
MEMORY = 0.99  # of the mean squares: about a hundred steps
REFRESH, FIRST_REFRESHES = 200, (0, 5, 20, 60)  # steps in which workers tell each other

Gradients = Sequence[Sequence[Tensor]]  # per worker, of each tensor, flat


@dataclass
class Traffic:
    """What one worker sends, as docs/math.md counts it for two workers: each value once. (More send 2 (N-1)/N.)"""

    values: int = 0
    bytes: float = 0.0

    @property
    def bits(self) -> float:
        """Bits a value."""
        return 8 * self.bytes / self.values if self.values else 0.0


@dataclass
class Aggregator:
    """Averages gradients, uncompressed; what compresses has a mean of its own.

    Args:
        sizes: values of each large tensor.
        shapes: their shapes.
        workers: how many there are.
        seed: of whatever is random.
    """

    contender: Contender
    shapes: Sequence[torch.Size]
    workers: int
    seed: int = 0
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self.sizes = [shape.numel() for shape in self.shapes]
        self.values = sum(self.sizes)
        self.step = 0
        empty = [torch.zeros(size) for size in self.sizes] if self.contender.momentum is not None else []
        self.velocities = [[value.clone() for value in empty] for _ in range(self.workers)]
        self.before = empty  # what arrived in the step before
        self.begin()

    def begin(self) -> None:
        """What a method keeps from step to step."""

    def new_epoch(self, level: float | None = None) -> None:
        """Called before each epoch.

        Args:
            level: that a policy has chosen for it; None for what the contender's schedule says.
        """

    def new_step(self, progress: float, ratio: float) -> None:
        """Called before each step.

        Args:
            progress: what part of the training is over.
            ratio: the learning rate of the step before over that of this one.
        """

    def mean(self, gradients: Gradients) -> list[Tensor]:
        """The mean of each tensor, flat, as every worker gets it."""
        sends_momentum = self.contender.momentum is not None
        if sends_momentum:
            for own, new in zip(self.velocities, gradients, strict=True):
                for i, (velocity, gradient) in enumerate(zip(own, new, strict=True)):
                    kept = self.kept(i)
                    velocity.mul_(kept).add_(gradient, alpha=(1 - kept) / (1 - MOMENTUM))
            gradients = self.velocities
        means, sent = self.exchange(gradients)
        self.step += 1
        self.traffic.values += self.values
        self.traffic.bytes += sent
        if not sends_momentum:
            return means
        # The optimizer adds MOMENTUM times the step before to what it is given, and so steps by what has arrived.
        given = [mean - MOMENTUM * before for mean, before in zip(means, self.before, strict=True)]
        self.before = means
        return given

    def kept(self, tensor: int) -> float:
        """Of the momentum that workers send, in every step."""
        return self.contender.momentum or 0.0

    def exchange(self, gradients: Gradients) -> tuple[list[Tensor], float]:
        """Means, and the bytes that a worker sends."""
        return [torch.stack(list(own)).mean(0) for own in zip(*gradients, strict=True)], 4 * self.values

    def notes(self) -> dict:
        """What is worth writing down after an epoch."""
        return {}


class Quantized(Aggregator):
    """The library's exchange: one quantization of each worker's gradients, and, of more than two, one of the sum."""

    def begin(self) -> None:
        self.senders = [Sender(self.sizes) for _ in range(self.workers)]
        self.owner = Sender(self.sizes) if self.workers > 2 else None
        self.energies = [1.0] * len(self.sizes)  # mean squares of a worker's gradients, of the last epoch
        self.gathered, self.steps = torch.zeros(len(self.sizes)), 0
        self.groups: dict[Way, list[int]] = {}
        self.budget = 0.0
        self.chosen: float | None = None  # by a policy
        self.below: set[int] = set()  # tensors that have at most `Contender.up_to` bits
        self.squares = [torch.zeros(size) for size in self.sizes]  # means of all workers' gradients, the latest more
        self.scales: list[Tensor] | None = None

    def new_epoch(self, level: float | None = None) -> None:
        self.chosen = level
        self.budget = 0  # not what any step has, so that the next one allocates
        if self.steps:
            self.energies = (self.gathered / self.steps / torch.tensor(self.sizes)).tolist()
            self.gathered.zero_()
            self.steps = 0

    def new_step(self, progress: float, ratio: float) -> None:
        budget = self.contender.bits_at(progress) if self.chosen is None else self.chosen
        if budget != self.budget:
            self.budget, self.groups = budget, {}
            for tensor, bits in enumerate(self.levels(budget)):
                self.groups.setdefault(self.way(bits), []).append(tensor)
            few = self.contender.up_to
            self.below = {i for way, members in self.groups.items() if way.mean_bits <= few for i in members}
        factor = self.contender.decay * (ratio if self.contender.follow_rate else 1)
        if factor != 1:
            for sender in self.senders:
                for residual in sender.residuals:
                    residual *= factor

    def levels(self, budget: float) -> list[float]:
        """Of each tensor."""
        contender = self.contender
        if contender.objective and len(set(self.energies)) > 1:
            small = [size < self.values / 20 for size in self.sizes]
            floors = [max(contender.floor, contender.small_floor if is_small else 0) for is_small in small]
            levels = allocate(self.sizes, self.energies, budget, objective=contender.objective, floors=floors)
        else:
            levels = [budget] * len(self.sizes)
        if contender.ends:
            levels[0] = levels[-1] = max(contender.ends, levels[0])
        return levels

    def way(self, bits: float) -> Way:
        contender = self.contender
        bound = contender.bound / min(1, bits)
        if bits < 1 and contender.turns:
            return Way(contender.turns, round(contender.turns / bits), bound)
        return Way(bits, bound=bound, track=contender.track)

    def exchange(self, gradients: Gradients) -> tuple[list[Tensor], float]:
        self.gathered += torch.stack([g.square().sum() for g in gradients[0]])
        self.steps += 1
        sent = codec.HEADER_BYTES * len(self.groups)
        if self.contender.whiten:
            sent += self.watch(gradients)
        arrived = []
        for sender, own in zip(self.senders, gradients, strict=True):
            got, payload = self.send(sender, own)
            arrived.append(got)
        sent += payload
        if self.contender.mask:
            self.mask(arrived)
        sums = [torch.stack(versions).sum(0) for versions in zip(*arrived, strict=True)]
        if self.owner:
            sums, _ = self.send(self.owner, sums)
        return [total / self.workers for total in sums], sent

    def kept(self, tensor: int) -> float:
        return self.contender.momentum or 0.0 if tensor in self.below else MOMENTUM

    def mask(self, arrived: list[list[Tensor]]) -> None:
        """At few bits, momentum starts from zero where something has been sent."""
        for own, got in zip(self.velocities, arrived, strict=True):
            for i in self.below:
                own[i][got[i] != 0] = 0

    def watch(self, gradients: Gradients) -> int:
        """Notes how large each value usually is. Now and then the workers tell each other, in a byte a value."""
        for squares, *own in zip(self.squares, *gradients, strict=True):
            squares.lerp_(torch.stack(own).square().mean(0), 1 - MEMORY)
        if self.step % REFRESH and self.step not in FIRST_REFRESHES:
            return 0
        scales = [(squares + 0.001 * squares.mean()).sqrt() for squares in self.squares]
        self.scales = [torch.where(scale > 0, scale, 1.0) for scale in scales]
        return self.values

    def send(self, sender: Sender, own: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        """As `Sender.send`; what is to be whitened is divided by the scales on its way."""
        scales = self.scales
        if scales is None:
            return sender.send(own, self.groups, self.step)
        sender.residuals = [owed / scale for owed, scale in zip(sender.residuals, scales, strict=True)]
        whitened = [gradient / scale for gradient, scale in zip(own, scales, strict=True)]
        got, payload = sender.send(whitened, self.groups, self.step)
        sender.residuals = [owed * scale for owed, scale in zip(sender.residuals, scales, strict=True)]
        return [part * scale for part, scale in zip(got, scales, strict=True)], payload

    def notes(self) -> dict:
        """Levels, energies, and how many steps' worth of gradients the first worker owes of each tensor (norms)."""
        levels = {tensor: way.mean_bits for way, members in self.groups.items() for tensor in members}
        latest = (self.gathered / max(1, self.steps)).sqrt()
        owed = torch.stack([residual.norm() for residual in self.senders[0].residuals]) / latest
        return {
            "levels": [levels[tensor] for tensor in sorted(levels)],
            "energies": [f"{energy:.2e}" for energy in self.energies],
            "owed": [round(x, 2) for x in owed.tolist()],
        }
