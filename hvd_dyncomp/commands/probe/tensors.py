"""Gradients without a network: tensors in the shapes of a known model, which backward hands over one by one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]

_VALUES = 2**20  # of each tensor, where only the number of values is known


class _HandOver(torch.autograd.Function):
    """Backward gives a parameter the gradient that lay ready, and goes on to the parameter before it."""

    @staticmethod
    def forward(ctx: Any, before: Tensor, parameter: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return before.view_as(before)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.seconds:
            time.sleep(ctx.seconds)
        return grads[0], ctx.gradient, None, None


class Tensors(nn.Module):
    """Parameters of given shapes, without a network: backward hands over gradients in reverse order, as layers do.

    Args:
        values: what the parameters hold; the memory is used, not copied.
        gradients: of the same shapes.
        seconds: of a backward pass, in which each tensor waits for its share by the number of its values.
    """

    def __init__(self, values: Sequence[Tensor], gradients: Sequence[Tensor], seconds: float = 0) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([nn.Parameter(value) for value in values])
        self._gradients = gradients
        total = sum(value.numel() for value in values)
        self._seconds = [seconds * value.numel() / total for value in values]

    def forward(self) -> Tensor:
        total = torch.zeros((), requires_grad=True, device=self.tensors[0].device)
        for parameter, gradient, seconds in zip(self.tensors, self._gradients, self._seconds, strict=True):
            total = _HandOver.apply(total, parameter, gradient, seconds)
        return total


def noise(
    shapes: Sequence[Shape], *, seed: int, device: torch.device, seconds: float = 0
) -> Callable[[], tuple[Tensors, Callable[[nn.Module], Tensor]]]:
    """Steps that do nothing but exchange: gradients of Gaussian noise.

    Args:
        shapes: of the tensors.
        seed: of the gradients; another on each rank.
        device: where they lie.
        seconds: as in `Tensors`.

    Returns:
        A function that makes a model and its loss. All of them share memory.
    """
    generator = torch.Generator().manual_seed(seed)
    values = [torch.zeros(shape, device=device) for shape in shapes]
    gradients = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    return lambda: (Tensors(values, gradients, seconds), lambda model: model())


def evenly(values: int) -> list[Shape]:
    """Shapes of so many values, a million each."""
    return [(min(_VALUES, values - first),) for first in range(0, values, _VALUES)]


def _convolution(inputs: int, outputs: int, size: int) -> Iterator[Shape]:
    """A convolution without a bias, and its batch normalization."""
    yield from ((outputs, inputs, size, size), (outputs,), (outputs,))


def _resnet(blocks: Sequence[int], *, bottleneck: bool) -> Iterator[Shape]:
    """Of torchvision's ResNets for 1,000 classes."""
    yield from _convolution(3, 64, 7)
    channels, wider = 64, 4 if bottleneck else 1
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for block in range(count):
            sizes = (1, 3, 1) if bottleneck else (3, 3)
            outputs = (width, width, wider * width) if bottleneck else (width, width)
            before = channels
            for size, after in zip(sizes, outputs, strict=True):
                yield from _convolution(before, after, size)
                before = after
            if block == 0 and channels != wider * width:
                yield from _convolution(channels, wider * width, 1)
            channels = wider * width
    yield from ((1000, channels), (1000,))


def _linear(inputs: int, outputs: int) -> Iterator[Shape]:
    yield from ((outputs, inputs), (outputs,))


def _blocks(count: int, width: int) -> Iterator[Shape]:
    """Of a transformer: attention, a feed-forward network of four times its width, two layer normalizations."""
    for _ in range(count):
        yield from _linear(width, 3 * width)
        yield from _linear(width, width)
        yield from _linear(width, 4 * width)
        yield from _linear(4 * width, width)
        yield from ((width,),) * 4


def _bert(count: int, width: int) -> Iterator[Shape]:
    yield from ((30522, width), (512, width), (2, width), (width,), (width,))
    yield from _blocks(count, width)
    yield from _linear(width, width)


def _gpt2(count: int, width: int) -> Iterator[Shape]:
    yield from ((50257, width), (1024, width))
    yield from _blocks(count, width)
    yield from ((width,), (width,))


def _vit(count: int, width: int) -> Iterator[Shape]:
    """Of patches of 16 x 16, for 1,000 classes."""
    yield from ((1, 1, width), (1, 197, width), (width, 3, 16, 16), (width,))
    yield from _blocks(count, width)
    yield from ((width,), (width,))
    yield from _linear(width, 1000)


# In the order of their layers. The three matrices of an attention count as one tensor.
MODELS: dict[str, Callable[[], Iterator[Shape]]] = {
    "resnet18": lambda: _resnet((2, 2, 2, 2), bottleneck=False),
    "resnet50": lambda: _resnet((3, 4, 6, 3), bottleneck=True),
    "vit-b-16": lambda: _vit(12, 768),
    "bert-base": lambda: _bert(12, 768),
    "bert-large": lambda: _bert(24, 1024),
    "gpt2": lambda: _gpt2(12, 768),
    "gpt2-medium": lambda: _gpt2(24, 1024),
}


def shapes_of(model: str) -> list[Shape]:
    """Shapes of the tensors of one of `MODELS`."""
    return list(MODELS[model]())


def count(shapes: Sequence[Shape]) -> int:
    """How many values tensors have together."""
    return sum(math.prod(shape) for shape in shapes)
