"""Vision transformers.

They are those of Dosovitskiy et al. 2020, "An image is worth 16x16 words: transformers for image recognition at scale";
the tiny and small sizes are those of Touvron et al. 2020 (DeiT).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.strategy.annotations.annotate import split
from echelon.zoo import registry
from echelon.zoo.entry import Model, Request, Setting
from echelon.zoo.models.image_entry import block_names, dropout_setting, image_model


@dataclass(frozen=True)
class VitSize:
    width: int
    layers: int
    heads: int
    parameters: int


SIZES = {
    "tiny": VitSize(192, 12, 3, 5_717_416),
    "small": VitSize(384, 12, 6, 22_050_664),
    "base": VitSize(768, 12, 12, 86_567_656),
    "large": VitSize(1024, 24, 16, 304_326_632),
}


class Patches(nn.Module):
    """Maps an image to a sequence: a class token, then one token per patch, with learned positions added."""

    def __init__(self, image_size: int, patch: int, channels: int, width: int, dropout: float) -> None:
        super().__init__()
        if image_size % patch:
            raise UsageError(f"image_size {image_size} is not a multiple of patch_size {patch}; change one of them")
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + (image_size // patch) ** 2, width))
        self.conv = nn.Conv2d(channels, width, patch, stride=patch)
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.conv(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(patches.shape[0], -1, -1), patches], 1)
        out: Tensor = self.dropout(tokens + self.positions)
        return out


class VitAttention(nn.Module):
    """Self-attention; outputs of ``qkv`` are ordered by head, with query, key and value of each.

    So a split by columns cuts between heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class VitLayer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = VitAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        inner = self.dropout(F.gelu(self.up(self.norm2(x))))
        out: Tensor = x + self.dropout(self.down(inner))
        return out


class VisionTransformer(nn.Module):
    """A vision transformer with pre-norm layers; the class is predicted from the first token."""

    def __init__(
        self,
        classes: int,
        *,
        width: int,
        layers: int,
        heads: int,
        inner: int,
        image_size: int = 224,
        patch: int = 16,
        channels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise UsageError(f"hidden_size {width} does not divide into {heads} heads; change one of them")
        self.stem = Patches(image_size, patch, channels, width, dropout)
        self.layers = nn.Sequential(*(VitLayer(width, heads, inner, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        self._draw()

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.layers(self.stem(images))
        logits: Tensor = self.head(self.norm(tokens[:, 0]))
        return logits

    def _draw(self) -> None:
        nn.init.trunc_normal_(self.stem.positions, std=0.02)
        nn.init.normal_(self.stem.class_token, std=1e-6)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)


def _build(request: Request) -> nn.Module:
    return VisionTransformer(
        request["num_classes"],
        width=request["hidden_size"],
        layers=request["num_hidden_layers"],
        heads=request["num_attention_heads"],
        inner=request["intermediate_size"],
        image_size=request["image_size"],
        patch=request["patch_size"],
        channels=request["channels"],
        dropout=request["dropout"],
    )


def _settings(size: VitSize) -> tuple[Setting, ...]:
    return (
        Setting(name="patch_size", default=16, meaning="height and width of a patch"),
        Setting(name="hidden_size", default=size.width, meaning="features of a token"),
        Setting(name="num_hidden_layers", default=size.layers, meaning="transformer layers"),
        Setting(name="num_attention_heads", default=size.heads, meaning="heads of each layer"),
        Setting(
            name="intermediate_size", default=4 * size.width, meaning="inner width of each layer's two linear ones"
        ),
        dropout_setting(0.0, "of tokens, and of what each layer adds"),
    )


def _entry(name: str, size: VitSize) -> Model:
    return image_model(
        f"vit_{name}",
        _build,
        about=f"a vision transformer of {size.layers} layers, patches of 16 x 16 (Dosovitskiy et al. 2020)",
        settings=_settings(size),
        parameters=size.parameters,
        counted={"num_classes": 1000},
        published=f"timm, vit_{name}_patch16_224",
        defaults={
            "batch_size": 128,
            "optimizer": "adamw",
            "learning_rate": 0.0005,
            "end_learning_rate": 0.00001,
            "learning_rate_decay_type": "polynomial",
            "weight_decay": 0.05,
            "num_epochs": 300,
            "warmup_steps": 500,
            "warmup_scheme": "linear",
            "max_gradient_norm": 1.0,
        },
        recompute=("layers.*",),
        cuts=block_names(size.layers),
        split={
            "layers.*.attention.qkv": split("column"),
            "layers.*.attention.out": split("row"),
            "layers.*.up": split("column"),
            "layers.*.down": split("row"),
            "head": split(),
        },
        strategy={"amp": "bf16", "shard": 1} if name != "large" else {"amp": "bf16", "shard": 2, "recompute": True},
        advice="16-bit arithmetic, and Adam's state shared out over the replicas"
        + (", with recompute for large batches" if name == "large" else ""),
        tiny={
            "image_size": 32,
            "patch_size": 8,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 64,
        },
    )


for _name, _size in SIZES.items():
    registry.add(_entry(_name, _size))
registry.add(dataclasses.replace(_entry("base", SIZES["base"]), name="vit", same_as="vit_base"))
