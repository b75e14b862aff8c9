"""What the benchmarks exchange: a model's gradients handed over at once, or those of real training steps.

No data set is needed: images are random, and the language model reads Python's own documentation.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hvd_dyncomp.commands.probe.methods import Loss
from hvd_dyncomp.commands.probe.tensors import noise
from train.models import build_model

# Makes one stepper's model and loss; every call a new model.
Workload = Callable[[], tuple[nn.Module, Loss]]

EXCHANGE_MODELS = ("resnet50", "resnet18", "resnet20", "vgg16", "mlp", "transformer", "small-tensors", "tiny")
# Of "curves": samples per worker and step.
CURVE_MODELS = {"resnet18": 64, "transformer-50m": 16, "resnet8": 16, "transformer": 4, "tiny": 16}
TRAINING_MODELS = ("resnet20", "resnet18", "mlp", "transformer", "transformer-adamw", "transformer-short", "tiny")

_CPU = torch.device("cpu")
_VOCABULARY, _CONTEXT = 256, 128  # bytes
# Images (or texts) per worker and step: steps of well under a second on one core.
_BATCH = {"resnet20": 32, "resnet18": 1, "mlp": 32, "transformer": 1, "transformer-short": 2, "tiny": 4}
_BATCH["transformer-adamw"] = _BATCH["transformer"]
# FSDP2 cannot exchange without computing: a step of few tokens is the next best to see the exchange in.
_LENGTH = {"transformer": _CONTEXT, "transformer-adamw": _CONTEXT, "transformer-short": 16, "transformer-50m": _CONTEXT}
_CLASSES = 10
_COARSE = 4  # pixels a side of a prototype, before it is enlarged
_SIGNAL = 0.5  # of prototypes, where noise has 1


class Mlp(nn.Sequential):
    """Much to exchange for little arithmetic: 22 million parameters, each used once an image.

    Input float32 (N, C, H, W) of 784 values an image, output float32 logits (N, 10).
    """

    def __init__(self) -> None:
        super().__init__(
            *(nn.Flatten(), nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 512)),
            *(nn.ReLU(), nn.Linear(512, 10)),
        )


class LanguageModel(nn.Module):
    """A causal transformer over bytes: 6 layers of width 384, 10.8 million parameters.

    Input int64 (N, T) with T up to 128, output float32 logits (N, T, 256).
    """

    def __init__(self, width: int = 384, layers: int = 6, heads: int = 6) -> None:
        super().__init__()
        self.token = nn.Embedding(_VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(_CONTEXT, width) / math.sqrt(width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        return self.head(self.layers(self.token(tokens) + self.position[:length], mask=mask, is_causal=True))


def build(name: str) -> nn.Module:
    """The network of this name; weights depend on torch's global generator.

    Raises:
        ImportError: torchvision is needed and not there.
    """
    if name in ("resnet50", "vgg16"):
        import torchvision  # takes a second, and the other models do without

        return getattr(torchvision.models, name)(weights=None)
    if name == "tiny":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))
    if name == "small-tensors":  # what each gradient costs, whatever its size
        return nn.ParameterList([torch.zeros(16) for _ in range(10_000)])
    if name == "mlp":
        return Mlp()
    if name == "transformer-50m":
        return LanguageModel(width=768, layers=7, heads=12)
    if name in _LENGTH:
        return LanguageModel()
    return build_model(name, in_channels=3 if name == "resnet18" else 1, num_classes=10)


def size(name: str) -> dict[str, int]:
    """How many values and tensors a network has."""
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in build(name).parameters()]
    return {"values": sum(sizes), "tensors": len(sizes)}


def exchange(name: str, *, seed: int, device: torch.device = _CPU) -> Workload:
    """Steps that do nothing but exchange: gradients of Gaussian noise in the shapes of a model's parameters.

    Args:
        name: one of `EXCHANGE_MODELS`.
        seed: of the gradients; another on each rank.
        device: where they lie.
    """
    with torch.device("meta"):  # shapes only
        shapes = [tuple(parameter.shape) for parameter in build(name).parameters()]
    return noise(shapes, seed=seed, device=device)


def training(name: str, *, seed: int, device: torch.device = _CPU) -> Workload:
    """Real steps: forward, cross entropy, backward, all on the same batch.

    Args:
        name: one of `TRAINING_MODELS`.
        seed: of the batch; another on each rank. Weights are the same on all.
        device: of both.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(name).to(device)
    inputs, targets = (tensor.to(device) for tensor in _batch(name, _BATCH[name], generator))
    return lambda: (copy.deepcopy(model), lambda model: _cross_entropy(model, inputs, targets))


def curve(name: str, batch_size: int, *, seed: int, rank: int, device: torch.device, autocast: bool) -> Workload:
    """Training that gets somewhere: every step has a batch that was not there before.

    Each call gives a model with the same weights, and a loss that goes through the same batches.

    Args:
        name: one of `CURVE_MODELS`.
        batch_size: of each step.
        seed: of weights and batches.
        rank: which has batches of its own.
        device: of both.
        autocast: compute in bfloat16.
    """

    def make() -> tuple[nn.Module, Loss]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build(name).to(device)
            prototypes = torch.randn(_CLASSES, _size(name)[0], _COARSE, _COARSE)
        generator = torch.Generator().manual_seed(1000 * seed + rank + 1)

        def loss(model: nn.Module) -> Tensor:
            inputs, targets = _batch(name, batch_size, generator)
            if name not in _LENGTH:
                inputs += _SIGNAL * F.interpolate(prototypes, _size(name)[1:], mode="bilinear")[targets]
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
                return _cross_entropy(model, inputs.to(device), targets.to(device))

        return model, loss

    return make


def tiny_steps_of(name: str) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer of a model of `TRAINING_MODELS`: its steps change next to nothing, and take what others take."""
    return functools.partial(torch.optim.AdamW if name.endswith("-adamw") else torch.optim.SGD, lr=1e-6)


def optimizer_of(name: str) -> Callable[..., torch.optim.Optimizer]:
    """What trains a model of `CURVE_MODELS`, given its parameters."""
    if name in _LENGTH:
        return functools.partial(torch.optim.AdamW, lr=3e-4)
    return functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def _cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def _size(name: str) -> tuple[int, int, int]:
    """Of an image: channels, height, width."""
    return (3, 32, 32) if name == "resnet18" else (1, 28, 28)


def _batch(name: str, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    if name in _LENGTH:
        text, length = _documentation(), _LENGTH[name]
        starts = torch.randint(len(text) - length, (count,), generator=generator)
        rows = torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:].contiguous()
    images = torch.randn(count, *_size(name), generator=generator)
    return images, torch.randint(_CLASSES, (count,), generator=generator)


@functools.cache
def _documentation() -> Tensor:
    """The text of Python's help(), uint8."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
