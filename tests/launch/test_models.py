"""Shapes, sizes and reproducibility of the networks."""

import pytest
import torch

from train.models import CifarResNet, build_model


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("size", "channels"), [(32, 3), (28, 1), (8, 1)])
def test_any_small_image_gives_logits(size: int, channels: int) -> None:
    model = CifarResNet(8, in_channels=channels, num_classes=7)
    logits = model(torch.randn(2, channels, size, size))
    assert logits.shape == (2, 7)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (32, 0.46), (56, 0.85), (110, 1.7)])
def test_sizes_are_those_of_the_resnet_paper(depth: int, millions: float) -> None:
    # Table 6 of He et al.; its numbers have two digits.
    assert parameters(CifarResNet(depth)) / 1e6 == pytest.approx(millions, rel=0.03)


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_model("resnet8", in_channels=1, num_classes=10, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = build_model("resnet8", in_channels=1, num_classes=10, seed=3)
    other = build_model("resnet8", in_channels=1, num_classes=10, seed=4)
    assert torch.equal(first.fc.weight, again.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)


def test_resnet18_keeps_small_images_large() -> None:
    model = build_model("resnet18", in_channels=1, num_classes=10)
    seen = []
    model.layer1.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert seen == [(2, 64, 28, 28)]
    # torchvision's 11.69 million for 1000 classes, less the classes, less a 7x7 stem's weights.
    assert parameters(model) == 11_689_512 - 513 * 1000 + 513 * 10 - 64 * 3 * 49 + 64 * 9
