"""Norms of timm and of transformers' vision models: two ranks give the numbers of one process, in double precision."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from harness import run
from torch import Tensor, nn
from zoo import QUIET

import echelon

timm = pytest.importorskip("timm")
layers = pytest.importorskip("timm.layers")

CHANNELS, CLASSES = 8, 5
#: Statistics that no call of batch norm computes: each replica has its own, and a line says so.
BY_HAND = ("EvoNorm2dB0", "EvoNorm2dB1", "EvoNorm2dB2")
#: Wants a package of its own; needs a last dimension of channels.
LEFT_OUT = ("InplaceAbn",)


def norm_classes() -> dict[str, Callable[[], nn.Module]]:
    """By name, every norm that timm makes by name, those made by conversion, and those of transformers' models."""
    from timm.layers.create_norm import _NORM_MAP
    from timm.layers.create_norm_act import _NORM_ACT_MAP

    kinds = {*_NORM_MAP.values(), *_NORM_ACT_MAP.values(), layers.FrozenBatchNormAct2d, layers.BatchNormAct2d}
    kinds |= {layers.GroupNormAct, nn.SyncBatchNorm, layers.SyncBatchNormAct, *_of_transformers()}
    named = {kind.__name__: _of(kind) for kind in kinds if kind.__name__ not in (*BY_HAND, *LEFT_OUT)}
    found = dict(sorted(named.items()))  # all ranks go through them in one order
    convolutions = (layers.StdConv2d, layers.StdConv2dSame, layers.ScaledStdConv2d, layers.ScaledStdConv2dSame)
    return found | {kind.__name__: _convolution(kind) for kind in convolutions}


def _of_transformers() -> list[type[nn.Module]]:
    names = {
        "rt_detr": "RTDetrFrozenBatchNorm2d",
        "detr": "DetrFrozenBatchNorm2d",
        "d_fine": "DFineFrozenBatchNorm2d",
        "grounding_dino": "GroundingDinoFrozenBatchNorm2d",
        "table_transformer": "TableTransformerFrozenBatchNorm2d",
        "poolformer": "PoolFormerGroupNorm",
        "convnext": "ConvNextLayerNorm",
    }
    return [
        getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), kind)
        for name, kind in names.items()
    ]


def _of(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    last = ("LayerNorm", "LayerNormFp32", "LayerNormAct", "LayerNormActFp32", "RmsNorm", "RmsNormFp32", "RmsNormAct")
    last += ("RmsNormActFp32", "SimpleNorm", "SimpleNormFp32", "ConvNextLayerNorm")

    def make() -> nn.Module:
        if kind is nn.BatchNorm1d:
            return Moved(kind(CHANNELS), sequence=True)
        if kind.__name__ in ("GroupNorm", "GroupNormAct"):
            return kind(CHANNELS, num_groups=2)
        if kind.__name__.startswith("EvoNorm2dS"):
            return kind(CHANNELS, groups=2)
        return Moved(kind(CHANNELS), sequence=False) if kind.__name__ in last else kind(CHANNELS)

    return make


def _convolution(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: kind(CHANNELS, CHANNELS, 3)


class Moved(nn.Module):
    """A norm over the last dimension, or over (N, C, L)."""

    def __init__(self, norm: nn.Module, sequence: bool) -> None:
        super().__init__()
        self.norm, self.sequence = norm, sequence

    def forward(self, x: Tensor) -> Tensor:
        if self.sequence:
            return self.norm(x.flatten(2)).view_as(x)
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


def network(norm: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    parts = [nn.Conv2d(3, CHANNELS, 3, padding=1), norm(), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), norm()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * CHANNELS, CLASSES)).double()


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(8, 3, size, size, generator=draw, dtype=torch.double)
    return x * 2 + 1, torch.randint(CLASSES, (8,), generator=draw)


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.model(x).logits
        return found


Trained = tuple[list[float], dict[str, Tensor], list[str]]


def train(net: nn.Module, steps: int, size: int = 8, *, plain: bool = False) -> Trained:
    # Small: of statistics over a handful of numbers, as deep layers have them here, training lets any rounding grow.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01 if size == 8 else 1e-4, momentum=0.9)
    losses, lines = [], list[str]()
    net.train()
    if plain:
        for step in range(steps):
            x, y = batch(step, size)
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, {name: value.clone() for name, value in net.state_dict().items()}, []
    engine = echelon.distribute(net, loss=F.cross_entropy, optimizer=optimizer, log=QUIET)
    engine._run.voice.say = lambda text, kind="notice": lines.append(text)  # type: ignore[method-assign]
    for step in range(steps):
        losses.append(float(engine.step(*(part.chunk(2)[echelon.rank()] for part in batch(step, size)))))
    weights = engine.whole_state()
    engine.close()
    return losses, weights, lines


def assert_same(name: str, mine: Trained, expected: Trained) -> None:
    assert mine[0] == pytest.approx(expected[0], rel=1e-5), name
    for key, value in expected[1].items():
        assert torch.allclose(mine[1][key].double(), value.double(), rtol=1e-5, atol=1e-6), f"{name}: {key}"


def train_norms() -> dict[str, Trained]:
    echelon.init()
    return {name: train(network(norm), 4) for name, norm in norm_classes().items()}


def test_every_norm_class_gives_the_numbers_of_one_process() -> None:
    found = run(train_norms)
    for name, norm in norm_classes().items():
        expected = train(network(norm), 4, plain=True)
        for mine in found:
            assert_same(name, mine[name], expected)
            assert mine[name][2] == [], name


def train_by_hand() -> dict[str, Trained]:
    echelon.init()
    return {name: train(network(lambda name=name: getattr(layers, name)(CHANNELS)), 4) for name in BY_HAND}


def test_statistics_by_hand_are_named_and_replicas_stay_alike() -> None:
    first, second = run(train_by_hand)
    for name in BY_HAND:
        assert first[name][2] == [
            f"batch norm: '1' and 1 more ({name}) compute statistics without F.batch_norm; those of a step stay each "
            "replica's own, and running ones become their mean over replicas after every step"
        ]
        assert all(torch.equal(first[name][1][key], second[name][1][key]) for key in first[name][1])


TIMM = (
    *("mobilenetv3_small_050", "mobilenetv2_035", "efficientnet_lite0", "regnetx_002", "regnety_002", "resnetv2_18"),
    *("densenet121", "mnasnet_050", "cspresnet50", "resnet10t", "repvgg_a0", "ghostnet_050", "convit_tiny"),
    *("nf_resnet26", "levit_128s", "mobileone_s0", "edgenext_xx_small", "inception_v3"),
)


def timm_model(name: str) -> nn.Module:
    torch.manual_seed(1)
    sized = {"img_size": 64} if name in ("convit_tiny", "levit_128s") else {}
    return timm.create_model(name, num_classes=CLASSES, drop_rate=0.0, **sized).double()


def size_of(name: str) -> int:
    return {"inception_v3": 96}.get(name, 64 if name in ("convit_tiny", "levit_128s", "edgenext_xx_small") else 32)


def train_timm(names: tuple[str, ...]) -> dict[str, Trained]:
    echelon.init()
    return {name: train(timm_model(name), 3, size_of(name)) for name in names}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))
def test_models_of_timm_give_the_numbers_of_one_process(part: int) -> None:
    names = TIMM[part::4]
    found = run(train_timm, names, timeout=500)
    for name in names:
        expected = train(timm_model(name), 3, size_of(name), plain=True)
        for mine in found:
            assert_same(name, mine[name], expected)
            assert mine[name][2] == [], name


TRANSFORMERS: dict[str, dict[str, Any]] = {
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "RegNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8},
    "MobileNetV1": {"depth_multiplier": 0.25, "image_size": 32},
    "MobileNetV2": {"depth_multiplier": 0.25, "image_size": 32},
    "EfficientNet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320, "dropout_rate": 0.0},
    "Levit": {
        "image_size": 64,
        "hidden_sizes": [16, 32, 32],
        "num_attention_heads": [2, 2, 2],
        "depths": [1, 1, 1],
        "drop_path_rate": 0,
    },
    "MobileViT": {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32], "image_size": 32},
    "SwiftFormer": {"image_size": 64, "depths": [1, 1, 1, 1], "embed_dims": [8, 16, 16, 16]},
    "Bit": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 2},
    "PoolFormer": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
}


def transformers_model(name: str) -> nn.Module:
    torch.manual_seed(1)
    given: dict[str, Any] = {"hidden_dropout_prob": 0.0, "drop_path_rate": 0.0, "classifier_dropout_prob": 0.0}
    config = getattr(transformers, f"{name}Config")(**{**given, **TRANSFORMERS[name], "num_labels": CLASSES})
    return Logits(getattr(transformers, f"{name}ForImageClassification")(config).double())


def train_transformers() -> dict[str, Trained]:
    echelon.init()
    return {name: train(transformers_model(name), 3, 64) for name in TRANSFORMERS}


@pytest.mark.timeout(600)
def test_models_of_transformers_give_the_numbers_of_one_process() -> None:
    found = run(train_transformers, timeout=500)
    for name in TRANSFORMERS:
        expected = train(transformers_model(name), 3, 64, plain=True)
        for mine in found:
            assert_same(name, mine[name], expected)
            assert mine[name][2] == [], name
