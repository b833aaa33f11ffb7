"""T5 (Raffel et al. 2019): encoder and decoder with relative position biases, optionally with a mixture of experts.

The experts are in every second layer, as in Switch Transformers (Fedus et al. 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.nn import MoE
from echelon.strategy.annotations.marks import Mark, Replicate, Split
from echelon.zoo import registry
from echelon.zoo.entry import Model, Request, Setting
from echelon.zoo.models.attention import LAYER_SPLIT, TRANSFORMER_DEFAULTS

BUCKETS, FAR = 32, 128  #: number of distance buckets; all distances beyond FAR share one
HIDDEN = -1e4  #: value of a masked score: its exponential is 0 in any precision, and fp16 can represent it


@dataclass(frozen=True)
class T5Sizes:
    """The sizes of a T5; ``experts`` is the number of experts in every second layer, or 0."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    width: int
    inner: int
    dropout: float
    experts: int
    top: int
    capacity: float
    masked: bool


class RelativeBias(nn.Module):
    """The bias of attention scores by the distance of key and query, for each head: [1, heads, length, length]."""

    def __init__(self, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.table = nn.Embedding(BUCKETS, heads)

    def forward(self, length: int, device: torch.device) -> Tensor:
        places = torch.arange(length, device=device)
        ahead = places[None, :] - places[:, None]  # position of the key relative to the query
        bias: Tensor = self.table(_bucket(ahead, self.causal)).permute(2, 0, 1)[None]
        return bias.masked_fill(ahead > 0, HIDDEN) if self.causal else bias


def _bucket(ahead: Tensor, causal: bool) -> Tensor:
    """Return the bucket of each distance.

    Half of the buckets have one distance each, the others grow logarithmically. If attention is not causal, each
    direction has half of the buckets.
    """
    count = BUCKETS if causal else BUCKETS // 2
    distance = (-ahead).clamp(min=0) if causal else ahead.abs()
    exact = count // 2
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(FAR / exact)
    far = (exact + (growth * (count - exact)).long()).clamp(max=count - 1)
    result = torch.where(distance < exact, distance, far)
    return result if causal else result + count * (ahead > 0)


class T5SelfAttention(nn.Module):
    """Self-attention without scaling of scores; the initial weights are smaller instead."""

    def __init__(self, sizes: T5Sizes) -> None:
        super().__init__()
        self.heads, self.dropout = sizes.heads, sizes.dropout
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.heads * sizes.width, bias=False)
        self.project = nn.Linear(sizes.heads * sizes.width, sizes.hidden, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        chance = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=chance, scale=1.0)
        out: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return out


class CrossAttention(nn.Module):
    """Attention from the target to the source."""

    def __init__(self, sizes: T5Sizes) -> None:
        super().__init__()
        self.heads, self.dropout = sizes.heads, sizes.dropout
        self.q = nn.Linear(sizes.hidden, sizes.heads * sizes.width, bias=False)
        self.kv = nn.Linear(sizes.hidden, 2 * sizes.heads * sizes.width, bias=False)
        self.project = nn.Linear(sizes.heads * sizes.width, sizes.hidden, bias=False)

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(source).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(2, -1)
        chance = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=chance, scale=1.0)
        out: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """A norm, then an MLP or experts, with a residual connection, which passes on tokens that their expert drops."""

    def __init__(self, sizes: T5Sizes, experts: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.hidden, 1e-6)
        self.drop = nn.Dropout(sizes.dropout)
        if experts:
            self.experts = MoE(sizes.hidden, sizes.experts, sizes.inner, top=sizes.top, capacity=sizes.capacity)
        else:
            self.mlp = nn.Sequential(
                nn.Linear(sizes.hidden, sizes.inner, bias=False),
                nn.ReLU(),
                nn.Dropout(sizes.dropout),
                nn.Linear(sizes.inner, sizes.hidden, bias=False),
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.experts if hasattr(self, "experts") else self.mlp
        out: Tensor = x + self.drop(inner(self.norm(x)))
        return out


class EncoderLayer(nn.Module):
    def __init__(self, sizes: T5Sizes, experts: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.hidden, 1e-6)
        self.attention = T5SelfAttention(sizes)
        self.feed = FeedForward(sizes, experts)
        self.drop = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = self.feed(x + self.drop(self.attention(self.norm(x), bias)))
        return out


class DecoderLayer(nn.Module):
    def __init__(self, sizes: T5Sizes, experts: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.hidden, 1e-6)
        self.attention = T5SelfAttention(sizes)
        self.cross_norm = nn.RMSNorm(sizes.hidden, 1e-6)
        self.cross = CrossAttention(sizes)
        self.feed = FeedForward(sizes, experts)
        self.drop = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, bias: Tensor, source: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.drop(self.attention(self.norm(x), bias))
        x = x + self.drop(self.cross(self.cross_norm(x), source, mask))
        out: Tensor = self.feed(x)
        return out


class T5(nn.Module):
    """T5: source [n, s], its mask [n, s] and the shifted target [n, t] to logits [n, t, vocabulary].

    Both embeddings and the head share one matrix.
    """

    def __init__(self, sizes: T5Sizes) -> None:
        super().__init__()
        self.masked = sizes.masked
        self.words = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.encoder_bias = RelativeBias(sizes.heads, causal=False)
        self.encoder = nn.ModuleList(EncoderLayer(sizes, _has_experts(sizes, i)) for i in range(sizes.layers))
        self.encoder_norm = nn.RMSNorm(sizes.hidden, 1e-6)
        self.decoder_bias = RelativeBias(sizes.heads, causal=True)
        self.decoder = nn.ModuleList(DecoderLayer(sizes, _has_experts(sizes, i)) for i in range(sizes.layers))
        self.decoder_norm = nn.RMSNorm(sizes.hidden, 1e-6)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        self.head.weight = self.words.weight
        self.drop = nn.Dropout(sizes.dropout)
        self.scale = sizes.hidden**-0.5  # scales the features before the head, because the tied matrix has large values
        _draw_weights(self, sizes)

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        seen = mask.bool()[:, None, None, :] if self.masked else None
        encoded = self._encode(source, seen)
        bias = self.decoder_bias(target.shape[1], target.device)
        x = self.drop(self.words(target))
        for layer in self.decoder:
            x = layer(x, bias, encoded, seen)
        out: Tensor = self.head(self.drop(self.decoder_norm(x)) * self.scale)
        return out

    def _encode(self, source: Tensor, seen: Tensor | None) -> Tensor:
        bias = self.encoder_bias(source.shape[1], source.device)
        if seen is not None:
            bias = bias.masked_fill(~seen, HIDDEN)
        x = self.drop(self.words(source))
        for layer in self.encoder:
            x = layer(x, bias)
        out: Tensor = self.drop(self.encoder_norm(x))
        return out


def _has_experts(sizes: T5Sizes, layer: int) -> bool:
    return sizes.experts > 0 and layer % 2 == 1


def _draw_weights(model: T5, sizes: T5Sizes) -> None:
    """Initialize weights by fan-in; those of queries are smaller by the factor that replaces the scaling of scores."""
    nn.init.normal_(model.words.weight)
    for name, module in model.named_modules():
        if isinstance(module, RelativeBias):
            nn.init.normal_(module.table.weight, std=sizes.hidden**-0.5)
        elif isinstance(module, nn.Linear) and name != "head":
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    for module in model.modules():
        if isinstance(module, T5SelfAttention):
            by_head = module.qkv.weight.detach().view(sizes.heads, 3, sizes.width, -1)
            by_head[:, 0].mul_(sizes.width**-0.5)
        if isinstance(module, CrossAttention):
            module.q.weight.detach().mul_(sizes.width**-0.5)


def build(request: Request) -> nn.Module:
    return T5(
        T5Sizes(
            vocabulary=request["vocab_size"],
            hidden=request["hidden_size"],
            layers=request["num_layers"],
            heads=request["num_heads"],
            width=request["head_size"],
            inner=request["intermediate_size"],
            dropout=request["dropout"],
            experts=request["num_experts"],
            top=request["expert_top"],
            capacity=request["expert_capacity"],
            masked=request["attention_mask"],
        )
    )


# ---- entries ----


def _settings(layers: int, hidden: int, heads: int, inner: int, experts: int) -> tuple[Setting, ...]:
    return (
        Setting(
            name="vocab_size", default=32128, meaning="words and parts of words; the data set's, where it has some"
        ),
        Setting(name="max_seq_length", default=128, meaning="tokens of the source"),
        Setting(name="max_target_length", default=128, meaning="tokens of the target"),
        Setting(name="hidden_size", default=hidden, meaning="features of a token"),
        Setting(name="num_layers", default=layers, meaning="layers of the encoder, and of the decoder"),
        Setting(name="num_heads", default=heads, meaning="heads of attention"),
        Setting(name="head_size", default=64, meaning="features of a head"),
        Setting(name="intermediate_size", default=inner, meaning="features inside an MLP, or an expert"),
        Setting(name="num_experts", default=experts, meaning="of every second layer; 0: none"),
        Setting(name="expert_top", default=1, meaning="experts a token uses: 1 or 2"),
        Setting(name="expert_capacity", default=1.25, meaning="an expert takes so many times its even share of tokens"),
        Setting(name="dropout", default=0.1, meaning="of embeddings, attention and MLPs"),
        Setting(name="attention_mask", default=True, meaning="off for sources without padding: somewhat quicker"),
    )


_TINY: dict[str, Any] = {
    "vocab_size": 64,
    "max_seq_length": 12,
    "max_target_length": 8,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "head_size": 8,
    "intermediate_size": 64,
}

_SPLIT: dict[str, Mark | list[Mark]] = {
    "words": Split(),
    "head": Split(),
    **LAYER_SPLIT,
    "*.cross.q": Split(),
    "*.cross.kv": Split(),
}

#: Every device has its own batch; only the experts are distributed over devices.
_EXPERT_SPLIT: dict[str, Mark | list[Mark]] = {"*.attention": Replicate(), "*.experts": Split()}


def _add(name: str, layers: int, hidden: int, heads: int, inner: int, *, experts: int = 0, **more: Any) -> None:
    stacks = [f"{stack}.{i}" for stack in ("encoder", "decoder") for i in range(layers)]
    registry.add(
        Model(
            name=name,
            runner="t5",
            build=build,
            tasks={"pretrain": ("translate",), "finetune": ("translate",)},
            settings=_settings(layers, hidden, heads, inner, experts),
            defaults=TRANSFORMER_DEFAULTS | {"learning_rate": 1e-3},
            recompute=("encoder.*", "decoder.*"),
            cuts=tuple(stacks),
            split=_EXPERT_SPLIT if experts else _SPLIT,
            tiny=_TINY | ({"num_experts": 4} if experts else {}),
            **more,
        )
    )


_PUBLISHED = "transformers, T5ForConditionalGeneration: the tied matrix once"
_REPLICAS = "Fits one device: replicas, which share out the optimizer's state."
_EXPERTS = "Replicas of all but the experts, which are spread over devices: --split model. Tokens travel to theirs."

_add(
    "t5_tiny",
    *(4, 256, 4, 1024),
    parameters=15_570_688,
    published=_PUBLISHED,
    about="T5 of 4 and 4 layers, 256 wide",
    strategy={"amp": "bf16"},
    advice="Small enough for any device: replicas only.",
)
_add(
    "t5_small",
    *(6, 512, 8, 2048),
    parameters=60_506_624,
    published=_PUBLISHED,
    about="T5 of 6 and 6 layers, 512 wide",
    strategy={"amp": "bf16", "shard": 1},
    advice=_REPLICAS,
)
_add(
    "t5_base",
    *(12, 768, 12, 3072),
    parameters=222_903_552,
    published=_PUBLISHED,
    about="T5 of 12 and 12 layers, 768 wide",
    strategy={"amp": "bf16", "shard": 1},
    advice=_REPLICAS,
)
_add(
    "t5_moe_tiny",
    *(4, 256, 4, 1024),
    experts=4,
    about="t5_tiny with 4 experts in every second layer",
    strategy={"amp": "bf16"},
    advice=_EXPERTS,
)
_add(
    "t5_moe",
    *(12, 768, 12, 3072),
    experts=8,
    about="t5_base with 8 experts in every second layer, as in Switch Transformers",
    strategy={"amp": "bf16"},
    advice=_EXPERTS,
)
