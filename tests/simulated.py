"""Horovod's optimizer on a `World` of ranks in this process: as much of it as decides who waits for what, and when."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import horovod.torch as hvd
import pytest
import torch

from hvd_dyncomp import Controller, DynamicQuantizer, Policy
from hvd_dyncomp.simulate import InProcessTransport, World

# Where ranks are, by host; () for each on its own. Hosts of equally many workers exchange hierarchically: in pairs of
# hosts, or among three with shards; in blocks or dealt out. The last are uneven, and so all at once.
PLACES = {
    "2": (2, ()),
    "3": (3, ()),
    "2x2": (4, (0, 0, 1, 1)),
    "3x2": (6, (0, 0, 1, 1, 2, 2)),
    "2x2 dealt": (4, (0, 1, 0, 1)),
    "2x3 dealt": (6, (0, 1, 0, 1, 0, 1)),
    "2+1": (3, (0, 0, 1)),
}


_SELDOM = {"3x2", "2x3 dealt", "2+1"}  # where they are not the only place


def places(*names: str) -> pytest.MarkDecorator:
    """Runs a test with these values of its arguments `ranks` and `hosts`."""
    values = [
        pytest.param(*PLACES[name], id=name, marks=[pytest.mark.thorough] if name in _SELDOM - {names[0]} else [])
        for name in names
    ]
    return pytest.mark.parametrize(("ranks", "hosts"), values)


WORLDS = places("2", "3", "2x2", "3x2", "2x3 dealt", "2+1")
BY_HOST = places("2x2", "3x2")


def by_host(hosts: Sequence[int]) -> bool:
    """Whether ranks in these places exchange hierarchically."""
    return len(set(map(list(hosts).count, hosts))) == 1 < list(hosts).count(0)


def phases(ranks: int, hosts: Sequence[int]) -> list[str]:
    """The collectives of an exchange, one after the other."""
    groups = len(set(hosts)) if by_host(hosts) else ranks
    inner = ["pair"] if groups == 2 else ["scatter", "gather"]
    return ["local_scatter", *inner, "local_gather"] if by_host(hosts) else inner


class SimulatedOptimizer(torch.optim.SGD):
    """Submits a gradient when backward makes it, the others in `synchronize`, which waits for one after the other."""

    def __init__(self, named: dict[str, torch.nn.Parameter], compression, transport: InProcessTransport) -> None:
        super().__init__(named.values(), lr=1.0)
        self._compression, self._transport = compression, transport
        self._parameter_names = {parameter: name for name, parameter in named.items()}
        self._requires_update = set(named.values())
        self.backward_passes_per_step = 1
        self._allreduce_delay = dict.fromkeys(named.values(), 1)
        self._handles: dict[torch.Tensor, tuple] = {}
        self._means: dict[torch.Tensor, torch.Tensor] = {}
        self._synchronized = False
        self.op, self.process_set, self.sparse_as_dense = hvd.Average, None, False

    def backward(self, p: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """What a hook does: `gradient` has come for `p`."""
        gradient = gradient.to(p.device)
        self.hand_over(p, gradient.clone() if p.grad is None else p.grad.add_(gradient))

    def hand_over(self, p: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """As `backward`, but `p.grad` is this very tensor, as autograd does where it can."""
        p.grad = gradient
        self._allreduce_delay[p] -= 1
        self._handles[p] = self._allreduce_grad_async(p)

    def _allreduce_grad_async(self, p: torch.nn.Parameter) -> tuple:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        wire, context = self._compression.compress(p.grad)
        return self._transport.sum(wire, f"allreduce.{self._parameter_names[p]}"), context

    def synchronize(self) -> None:
        # A set, in no order that ranks would share; here in one that they do not.
        given = {p for p, (handle, _) in self._handles.items() if handle is not None}
        missing = sorted(self._requires_update - given, key=lambda p: self._parameter_names[p])
        for p in missing[:: -1 if self._transport.rank % 2 else 1]:
            self._handles[p] = self._allreduce_grad_async(p)
        for p, (handle, context) in self._handles.items():
            if callable(handle):
                self._means[p] = handle()
            elif p not in self._means:  # when it was interrupted, it begins anew; Horovod cannot
                self._means[p] = self._transport.wait(handle) / self._transport.size
            self._allreduce_delay[p] = 1
            p.grad.set_(self._compression.decompress(self._means[p], context))
        self._handles.clear()
        self._means.clear()
        self._synchronized = True

    def give_up(self) -> None:
        """As `forget`, on every rank alike, which have handed in the same gradients."""
        for handle, _ in self._handles.values():
            if not callable(handle):
                self._transport.wait(handle)
        self.forget()

    def forget(self) -> None:
        """As `load_state_dict` between backward and step: every gradient may be handed in anew."""
        self._handles = {}
        self._allreduce_delay = dict.fromkeys(self._allreduce_delay, 1)

    def step(self, closure=None) -> None:
        if not self._synchronized or self._handles:
            self.synchronize()
        self._synchronized = False
        super().step()


def parameters(sizes: dict[str, int], device: str = "cpu") -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.zeros(size, device=device)) for name, size in sizes.items()}


def noise(name: str, size: int, rank: int, step: int) -> torch.Tensor:
    """A gradient, another one for every rank and step."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{rank}/{step}".encode()))
    return torch.randn(size, generator=generator)


def mean_of(name: str, size: int, step: int, users: Sequence[int], ranks: int) -> torch.Tensor:
    """What stock Horovod makes of it, where `users` are the ranks on which it was used."""
    return sum((noise(name, size, rank, step) for rank in users), torch.zeros(size)) / ranks


class Sent(NamedTuple):
    """What a rank has handed to the network: a copy, and the address it came from."""

    rank: int
    kind: str
    name: str
    tensor: torch.Tensor
    address: int


class RecordingWorld(World):
    """A `World` that writes down what is sent, in the order of sending."""

    def __init__(self, size: int, choices: Sequence[int] = (), hosts: Sequence[int] = ()) -> None:
        super().__init__(size, choices, hosts)
        self.sent: list[Sent] = []
        self.waits: list[tuple[int, str, int]] = []  # who had to wait, for what; what had been sent

    def start(self, rank, kind, tensor, splits, name, arriving):
        self.sent.append(Sent(rank, kind, name, tensor.clone(), tensor.data_ptr()))
        return super().start(rank, kind, tensor, splits, name, arriving)

    def block(self, rank, collective):
        if not collective.over:
            self.waits.append((rank, collective.name, len(self.sent)))
        super().block(rank, collective)

    def messages(self, ending: str, rank: int | None = None) -> list[torch.Tensor]:
        """What was sent under names that end so, of one rank or of all."""
        return [s.tensor for s in self.sent if s.name.endswith(ending) and rank in (None, s.rank)]


class Worker:
    """One rank that trains one model, at a constant level or as a policy says.

    Args:
        attach: whether the quantizer is bound to the optimizer before the first gradient.
    """

    def __init__(
        self,
        transport: InProcessTransport,
        sizes: dict[str, int],
        bits: Policy | float,
        *,
        op=hvd.Average,
        attach: bool = True,
        **arguments,
    ) -> None:
        self.transport, self.parameters = transport, parameters(sizes, arguments.pop("device", "cpu"))
        self.controller = Controller(bits, transport=transport)
        self.quantizer = DynamicQuantizer(
            self.controller, transport=transport, **{"block_size": 64, "min_numel": 10, **arguments}
        )
        self.optimizer = SimulatedOptimizer(self.parameters, self.quantizer, transport)
        self.optimizer.op = op
        if attach:
            self.quantizer.attach(self.optimizer)

    def backward(self, gradients: dict[str, torch.Tensor]) -> None:
        self.optimizer.zero_grad()
        for name, gradient in gradients.items():
            self.optimizer.backward(self.parameters[name], gradient)

    def step(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A whole step; returns the reduced gradients."""
        self.backward(gradients)
        self.optimizer.step()
        return {name: p.grad.clone() for name, p in self.parameters.items()}

    def noise(self, step: int) -> dict[str, torch.Tensor]:
        return {name: noise(name, p.numel(), self.transport.rank, step) for name, p in self.parameters.items()}

    def set_level(self, bits: float) -> None:
        """Ends an epoch of a constant level; the next has another, the same on all ranks. Collective."""
        self.controller.policy.bits = bits
        assert self.controller.step({}) == bits

    def barrier(self, name: str) -> None:
        self.transport.wait(self.transport.sum(torch.ones(1), f"barrier.{name}"))


def on_ranks(
    size: int,
    program: Callable[[Worker], object],
    sizes: dict[str, int],
    bits: Policy | float,
    *,
    choices: Sequence[int] = (),
    hosts: Sequence[int] = (),
    **arguments,
) -> tuple[list, RecordingWorld]:
    """Runs `program(worker)` on every rank; returns what the ranks returned, and the world."""
    world = RecordingWorld(size, choices, hosts)
    return world.run(lambda transport: program(Worker(transport, sizes, bits, **arguments))), world
