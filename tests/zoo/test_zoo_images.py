"""Image models: published sizes, the outputs of other libraries, a step that learns, and stages that change nothing."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.nn.functional as F
from references.recipe_images import CLASSES, FC_SIZE, fill, summary
from torch import Tensor, nn

import echelon
from echelon.base.errors import UsageError
from echelon.strategy import Strategy
from echelon.zoo import registry
from echelon.zoo.entry import Request

DEPTHS = (18, 34, 50, 101, 152)
NAMES = (
    *("lenet", "cifarnet", "alexnet", "vgg_11", "vgg_16", "vgg_19", "mobilenet_v1", "mobilenet_v2"),
    *(f"resnet_v{version}_{depth}" for version in (1, 2) for depth in DEPTHS),
    *("vit_tiny", "vit_small", "vit_base", "vit_large", "vit"),
)
REFERENCE = json.loads((Path(__file__).parent / "references" / "images.json").read_text())


def built(name: str, **values: Any) -> nn.Module:
    model = registry.model(name)
    defaults = {setting.name: setting.default for setting in model.settings}
    return model.build(Request({**defaults, "num_classes": 1001, **values}, "classify_images"))


def tiny(name: str, **values: Any) -> nn.Module:
    torch.manual_seed(0)
    return built(name, **{**registry.model(name).tiny, **values})


def batch(name: str, count: int = 8) -> tuple[Tensor, Tensor]:
    model = registry.model(name)
    values = {setting.name: setting.default for setting in model.settings} | dict(model.tiny)
    source = torch.Generator().manual_seed(1)
    shape = (count, values["channels"], values["image_size"], values["image_size"])
    return torch.randn(shape, generator=source), torch.arange(count) % 10


# ---- sizes ----


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    model = registry.model(name)
    with torch.device("meta"):
        network = built(name, **model.counted)
    assert sum(parameter.numel() for parameter in network.parameters()) == model.parameters
    assert model.published


def test_small_models_have_the_parameters_of_their_layers() -> None:
    """Weights and biases, layer by layer, as TF-slim's layers are described."""
    lenet = [(1 * 25 + 1) * 32, (32 * 25 + 1) * 64, (7 * 7 * 64 + 1) * 1024, (1024 + 1) * 10]
    cifarnet = [(3 * 25 + 1) * 64, (64 * 25 + 1) * 64, (8 * 8 * 64 + 1) * 384, (384 + 1) * 192, (192 + 1) * 10]
    assert registry.model("lenet").parameters == sum(lenet)
    assert registry.model("cifarnet").parameters == sum(cifarnet)


@pytest.mark.parametrize("depth", DEPTHS)
def test_resnet_v2_has_the_parameters_of_the_paper(depth: int) -> None:
    """Convolutions without biases; a norm has two numbers a channel and comes before each convolution but the first."""
    kernels = (3, 3) if depth < 50 else (1, 3, 1)
    blocks = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}[depth]
    total, inputs = 3 * 64 * 49, 64
    for size, count in enumerate(blocks):
        width = 64 * 2**size
        outputs = width if depth < 50 else 4 * width
        for i in range(count):
            channels = [inputs, *[width] * (len(kernels) - 1), outputs]
            total += sum(channels[j] * channels[j + 1] * kernel**2 for j, kernel in enumerate(kernels))
            total += 2 * sum(channels[:-1])
            if i == 0 and inputs != outputs:
                total += inputs * outputs
            inputs = outputs
    assert registry.model(f"resnet_v2_{depth}").parameters == total + 2 * inputs + (inputs + 1) * 1000


# ---- outputs ----


@pytest.mark.parametrize("case", REFERENCE)
def test_outputs_are_those_of_other_libraries(case: str) -> None:
    """Compare with torchvision and timm (references/make_images.py), in double precision, gradients in training too."""
    name, _, training = case.partition(" in ")
    image_size = 32 if name in {"vgg_11", "vit_tiny"} else 64
    with torch.device("meta"):
        network = built(name, num_classes=CLASSES, image_size=image_size, fc_size=FC_SIZE)
    network = network.double().to_empty(device="cpu")
    fill(network)
    found = summary(network, image_size, bool(training))
    for key, expected in REFERENCE[case].items():
        assert found[key] == pytest.approx(expected, rel=1e-8, abs=1e-10), key


def test_the_response_norm_of_cifarnet_is_that_of_the_paper() -> None:
    """x / (1 + 0.001 / 9 * the sum of squares over 4 channels to each side) ** 0.75."""
    norm = tiny("cifarnet").get_submodule("layers.0.3")
    x = torch.randn(2, 64, 3, 3, dtype=torch.float64) * 10
    sums = torch.stack([x[:, max(0, i - 4) : i + 5].square().sum(1) for i in range(64)], 1)
    torch.testing.assert_close(norm(x), x / (1 + 0.001 / 9 * sums) ** 0.75)


@pytest.mark.parametrize("name", ["lenet", "cifarnet", "alexnet", "vgg_11", "mobilenet_v2", "vit_tiny"])
def test_dropout_is_on_in_training_only(name: str) -> None:
    network, (images, _) = tiny(name, dropout=0.5), batch(name)
    network.requires_grad_(False)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    assert not torch.equal(network(images), network(images))
    network.eval()
    assert torch.equal(network(images), network(images))


# ---- training ----


@pytest.mark.parametrize("name", NAMES)
def test_a_step_lowers_the_loss_and_every_parameter_takes_part(name: str) -> None:
    """Along the gradient g, a small step of rate r lowers the loss by r |g|^2, here to within a tenth."""
    network, (images, labels) = tiny(name, dropout=0.0).double(), batch(name)
    images = images.double()
    before = F.cross_entropy(network(images), labels)
    before.backward()
    gradients = {key: parameter.grad for key, parameter in network.named_parameters()}
    assert all(g is not None and g.isfinite().all() and g.any() for g in gradients.values())
    squared = sum(g.square().sum().item() for g in gradients.values() if g is not None)
    rate = 1e-7 / squared
    torch.optim.SGD(network.parameters(), lr=rate).step()
    with torch.no_grad():
        after = F.cross_entropy(network(images), labels)
    assert (before - after).item() == pytest.approx(1e-7, rel=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_samples_do_not_mix_in_evaluation(name: str) -> None:
    """Also of images that are laid out by channels last."""
    network, (images, _) = tiny(name).double().eval(), batch(name, count=2)
    with torch.no_grad():
        together = network(images.double().to(memory_format=torch.channels_last))
        alone = torch.cat([network(image[None].double()) for image in images])
    torch.testing.assert_close(together, alone)


# ---- what the entries say ----


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_names_what_the_model_has(name: str) -> None:
    model = registry.model(name)
    with torch.device("meta"):
        network = tiny(name)
    modules = [key for key, _ in network.named_modules()]
    places = [modules.index(cut) for cut in model.cuts]
    assert places == sorted(places)
    assert len(places) >= 2
    for pattern in (*model.recompute, *model.split):
        assert any(fnmatchcase(key, pattern) for key in modules), pattern
    assert isinstance(network.get_submodule("head"), nn.Linear)
    assert network.get_submodule("head").out_features == 10
    assert Strategy.from_dict(model.strategy).to_dict().keys() == model.strategy.keys()
    assert model.advice


def test_a_vision_transformer_says_what_sizes_do_not_fit() -> None:
    with pytest.raises(UsageError, match="image_size 30 is not a multiple of patch_size 8"):
        tiny("vit_tiny", image_size=30)
    with pytest.raises(UsageError, match="hidden_size 32 does not divide into 5 heads"):
        tiny("vit_tiny", num_attention_heads=5)


# ---- on several ranks ----


def staged_losses(cut: int) -> list[float]:
    """Return losses of three steps of resnet_v1_18 in two stages, the second of which begins with layers.{cut}."""
    echelon.init(seed=0)
    network = tiny("resnet_v1_18")
    stages = [echelon.stage(0), echelon.stage(1)]
    marks = {"": echelon.pipeline(micro_batches=2), "stem": stages[0], "head": stages[1]}
    marks |= {f"layers.{i}": stages[i >= cut] for i in range(8)}
    return _losses(echelon.annotate(network, marks), "resnet_v1_18")


def split_losses() -> list[float]:
    """Return losses of three steps of a vision transformer, split as its entry says."""
    echelon.init(seed=0)
    network = tiny("vit_tiny", num_hidden_layers=2)
    return _losses(echelon.annotate(network, registry.model("vit_tiny").split), "vit_tiny")


def _losses(network: nn.Module, name: str) -> list[float]:
    engine = echelon.distribute(
        network,
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.02),
        log=echelon.Log(console=False),
    )
    return [float(engine.step(*batch(name))) for _ in range(3)]


def plain_losses(network: nn.Module, name: str, micro_batches: int = 1) -> list[float]:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        pieces = zip(*(part.chunk(micro_batches) for part in batch(name)), strict=True)
        each = [F.cross_entropy(network(images), labels) / micro_batches for images, labels in pieces]
        for loss in each:
            loss.backward()
        optimizer.step()
        losses.append(sum(loss.item() for loss in each))
    return losses


def test_resnet_in_two_stages_has_the_losses_of_one_process() -> None:
    assert "layers.4" in registry.model("resnet_v1_18").cuts
    expected = plain_losses(tiny("resnet_v1_18"), "resnet_v1_18", micro_batches=2)
    for losses in harness.run(staged_losses, 4, ranks=2):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_vit_split_by_heads_has_the_losses_of_one_process() -> None:
    expected = plain_losses(tiny("vit_tiny", num_hidden_layers=2), "vit_tiny")
    for losses in harness.run(split_losses, ranks=2):
        assert losses == pytest.approx(expected, rel=1e-5)
