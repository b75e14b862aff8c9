"""Residual networks for images of 32x32, 28x28 and 8x8 pixels.

``CifarResNet`` is the family of section 4.2 of He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition"
(CVPR 2016): depth 6n + 2, three stages of 16, 32 and 64 channels. ``resnet18_cifar`` is torchvision's ResNet-18
with a stem that does not throw away three quarters of a small image before the first block.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DEPTHS = (8, 14, 20, 32, 44, 56, 110)
MODELS = tuple(f"resnet{depth}" for depth in DEPTHS) + ("resnet18",)


class ZeroPadShortcut(nn.Module):
    """Option A of the paper: every second pixel, missing channels filled with zeros; no parameters.

    Input (N, C, H, W), output (N, ``channels``, ceil(H / stride), ceil(W / stride)), same dtype.
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        missing = channels - in_channels
        self.before = missing // 2
        self.after = missing - self.before

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut around them, of zeros where channels are missing (the paper's option A).

    Input (N, ``in_channels``, H, W), output (N, ``channels``, H / stride, W / stride).
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        same = stride == 1 and in_channels == channels
        self.shortcut = nn.Identity() if same else ZeroPadShortcut(in_channels, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x), inplace=True)


class CifarResNet(nn.Module):
    """ResNet of depth 6n + 2 for small images.

    Args:
        depth: 8, 14, 20, 32, ... (6n + 2 with n >= 1).
        in_channels: channels of the image.
        num_classes: outputs.

    Input float32 (N, in_channels, H, W) with H, W >= 4; output float32 logits (N, num_classes).

    Raises:
        ValueError: the depth is not of the form 6n + 2.
    """

    def __init__(self, depth: int = 20, in_channels: int = 3, num_classes: int = 10) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth must be 6n + 2 with n >= 1 (8, 14, 20, ...), got {depth}")
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(in_channels, 16, 3, 1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.stage1 = self._stage(16, 16, blocks, 1)
        self.stage2 = self._stage(16, 32, blocks, 2)
        self.stage3 = self._stage(32, 64, blocks, 2)
        self.fc = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _stage(in_channels: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
        first = BasicBlock(in_channels, channels, stride)
        return nn.Sequential(first, *(BasicBlock(channels, channels, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = self.stage3(self.stage2(self.stage1(x)))
        return self.fc(x.mean(dim=(2, 3)))


def resnet18_cifar(in_channels: int = 3, num_classes: int = 10) -> nn.Module:
    """torchvision's ResNet-18, its 7x7 stride-2 convolution and max pooling replaced by one 3x3 convolution.

    Input float32 (N, in_channels, H, W); output float32 logits (N, num_classes).
    """
    import torchvision  # takes a second, and the other models do without

    model = torchvision.models.resnet18(num_classes=num_classes)
    model.conv1 = nn.Conv2d(in_channels, 64, 3, 1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


def build_model(name: str, *, in_channels: int, num_classes: int, seed: int = 0) -> nn.Module:
    """Build the model called ``name`` with weights that depend on ``seed`` alone.

    Args:
        name: "resnet18", or "resnet<depth>" with a depth of 6n + 2.
        in_channels, num_classes: see ``CifarResNet``.
        seed: the global generator is seeded inside a fork, so the caller's random state is left as it was.

    Raises:
        ValueError: unknown name.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "resnet18":
            return resnet18_cifar(in_channels, num_classes)
        depth = name.removeprefix("resnet")
        if not name.startswith("resnet") or not depth.isdigit():
            raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
        return CifarResNet(int(depth), in_channels, num_classes)
