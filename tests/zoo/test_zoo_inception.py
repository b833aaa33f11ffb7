"""Inceptions: published sizes, the outputs of other libraries, and a second classifier that takes part in training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references.make_inception import CLASSES, SIZES, fill, images, maps
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.zoo import registry, tasks
from echelon.zoo.entry import Request
from echelon.zoo.models.inception_blocks import AuxiliaryClassifier, Inception

NAMES = ("inception_v1", "inception_v2", "inception_v3", "inception_v4", "inception_resnet_v2")
WITH_AUXILIARY = NAMES[2:]
REFERENCE = json.loads((Path(__file__).parent / "references" / "inception.json").read_text())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Hundreds of small convolutions: on a busy machine threads wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def built(name: str, **values: Any) -> Inception:
    model = registry.model(name)
    defaults = {setting.name: setting.default for setting in model.settings}
    network = model.build(Request({**defaults, "num_classes": 1001, **values}, "classify_images"))
    assert isinstance(network, Inception)
    return network


def tiny(name: str, **values: Any) -> Inception:
    torch.manual_seed(0)
    return built(name, **{**registry.model(name).tiny, **values})


def pixels(name: str, count: int = 4) -> Tensor:
    size = registry.model(name).tiny["image_size"]
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def trained(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_parameters_as_published(name: str) -> None:
    model = registry.model(name)
    with torch.device("meta"):
        network = built(name, **model.counted)
    assert trained(network) == model.parameters


# Counts of slim's own tests before the classifier: weights, and of each batch norm shift, mean and variance.
@pytest.mark.parametrize(("name", "slim"), [("inception_v1", 5607184), ("inception_v2", 10173112)])
def test_slim_counts_the_same_layers(name: str, slim: int) -> None:
    with torch.device("meta"):
        network = built(name)
    channels = sum(module.num_features for module in network.modules() if isinstance(module, nn.BatchNorm2d))
    assert trained(network) - trained(network.head) + channels == slim


@pytest.mark.parametrize("name", WITH_AUXILIARY)
def test_the_auxiliary_classifier_has_128_then_768_channels(name: str) -> None:
    with torch.device("meta"):
        network = built(name, num_classes=1000)
        without = built(name, num_classes=1000, auxiliary=False)
    seen = {"inception_v3": 768, "inception_v4": 1024, "inception_resnet_v2": 1088}[name]
    expected = seen * 128 + 2 * 128 + 128 * 25 * 768 + 2 * 768 + 768 * 1000 + 1000
    assert trained(network) - trained(without) == expected


@pytest.mark.parametrize("name", SIZES)
def test_outputs_are_those_of_the_reference(name: str) -> None:
    """torchvision's for v1 and v3, timm's for the others."""
    auxiliary = {} if name == "inception_v1" else {"auxiliary": name == "inception_v3"}
    with torch.device("meta"):
        network = built(name, num_classes=CLASSES, **auxiliary)
    network = network.double().to_empty(device="cpu").eval()
    with torch.no_grad():
        fill(network.state_dict().items())
        close(network(images(SIZES[name])), REFERENCE[name])
        if name == "inception_v3":
            close(network.auxiliary(maps(768)), REFERENCE["inception_v3 auxiliary"])


def close(ours: Tensor, theirs: list[list[float]]) -> None:
    torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_the_loss_of_a_batch(name: str) -> None:
    network, x, labels = tiny(name, dropout=0.0), pixels(name), torch.tensor([3, 1, 4, 1])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = tasks.classification(network(x), labels)
        loss.backward()
        losses.append(loss.item())
        gradients = [parameter.grad for parameter in network.parameters()]
        assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_each_sample_is_judged_alone(name: str) -> None:
    network, x = tiny(name).double().eval(), pixels(name).double()
    with torch.no_grad():
        torch.testing.assert_close(network(x), torch.cat([network(x[:1]), network(x[1:])]))


@pytest.mark.parametrize("name", WITH_AUXILIARY)
def test_the_auxiliary_classifier_takes_part_in_training_only(name: str) -> None:
    network, x, labels = tiny(name, dropout=0.0), pixels(name), torch.tensor([3, 1, 4, 1])
    logits, second = network(x)
    loss = tasks.classification((logits, second), labels)
    expected = F.cross_entropy(logits, labels) + 0.4 * F.cross_entropy(second, labels)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert not torch.equal(logits, second)

    alone = tiny(name, dropout=0.0, auxiliary=False)
    alone.load_state_dict({k: v for k, v in network.state_dict().items() if not k.startswith("auxiliary.")})
    torch.testing.assert_close(alone(x), logits)
    assert isinstance(network.eval()(x), Tensor)


def test_the_auxiliary_classifier_takes_maps_of_any_size() -> None:
    """Below 17 x 17 the maps are averaged to the 5 x 5 that its weights are for; constant maps stay what they are."""
    torch.manual_seed(0)
    classifier = AuxiliaryClassifier(32, 5, width=0.125).double().eval()
    flat = torch.rand(2, 32, 1, 1, dtype=torch.float64)
    large = classifier(flat.expand(-1, -1, 17, 17))
    for size in (1, 3, 16):
        torch.testing.assert_close(classifier(flat.expand(-1, -1, size, size)), large)


@pytest.mark.parametrize("name", NAMES)
def test_cuts_and_segments_are_whole_blocks(name: str) -> None:
    model = registry.model(name)
    with torch.device("meta"):
        network = built(name)
    modules = dict(network.named_modules())
    assert [modules[cut] for cut in model.cuts] == list(network.blocks)
    assert all(any(fnmatchcase(module, pattern) for module in modules) for pattern in model.recompute)
    assert isinstance(modules["head"], nn.Linear)
    assert set(model.split) <= set(modules)


def test_depth_multiplier_scales_channels_but_never_below_16() -> None:
    with torch.device("meta"):
        whole, half, least = (built("inception_v2", depth_multiplier=by) for by in (1.0, 0.5, 0.01))
    assert half.head.in_features * 2 == whole.head.in_features == 1024
    narrowest = [m.num_features for m in least.modules() if isinstance(m, nn.BatchNorm2d)]
    assert set(narrowest) == {16}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image_size": 32}, "--image_size 32: .* take 75 or more"),
        ({"depth_multiplier": 0.0}, "--depth_multiplier 0.0: .* above 0"),
    ],
)
def test_sizes_that_leave_nothing_are_refused_in_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        built("inception_v3", **values)
    assert "\n" not in str(refused.value)
