"""GPT-2 (Radford et al. 2019): a decoder that predicts the next token; ``gpt_tiny`` is for characters."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from echelon.nn import Bounds, Packed
from echelon.strategy.annotations.marks import Split
from echelon.zoo import registry
from echelon.zoo.entry import Model, Request, Setting
from echelon.zoo.models.attention import (
    LAYER_SPLIT,
    TRANSFORMER_DEFAULTS,
    SelfAttention,
    draw_weights,
    places_of,
    require_room,
)


class GptLayer(nn.Module):
    """A pre-norm layer: attention and an MLP, each with a norm before it and a residual connection."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = SelfAttention(hidden, heads, dropout, causal=True)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(approximate="tanh"), nn.Linear(4 * hidden, hidden)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, bounds: Bounds | None = None) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x), bounds))
        out: Tensor = x + self.drop(self.mlp(self.norm2(x)))
        return out


class GptEmbeddings(nn.Module):
    """Embeddings of words and learned positions."""

    def __init__(self, vocabulary: int, positions: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(positions, hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor | Packed) -> Tensor:
        words = tokens.values if isinstance(tokens, Packed) else tokens
        out: Tensor = self.drop(self.words(words) + self.positions(places_of(tokens)))
        return out


class Gpt(nn.Module):
    """GPT-2: tokens [n, s] to the logits of the next tokens [n, s, vocabulary]; the head is tied to the embedding.

    For packed documents the logits are [t, vocabulary], and attention does not cross documents.
    """

    def __init__(self, vocabulary: int, positions: int, hidden: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embeddings = GptEmbeddings(vocabulary, positions, hidden, dropout)
        self.layers = nn.ModuleList(GptLayer(hidden, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.embeddings.words.weight
        draw_weights(self)
        for name, weight in self.named_parameters():
            if name.endswith(("project.weight", "mlp.2.weight")):  # keeps the scale of the residual stream at any depth
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor | Packed) -> Tensor:
        x = self.embeddings(tokens)
        more = (tokens.bounds,) if isinstance(tokens, Packed) else ()
        for layer in self.layers:
            x = layer(x, *more)
        out: Tensor = self.head(self.norm(x))
        return out


def build(request: Request) -> nn.Module:
    require_room(request["max_seq_length"], request["max_position_embeddings"], "max_position_embeddings")
    return Gpt(
        request["vocab_size"],
        request["max_position_embeddings"],
        request["hidden_size"],
        request["num_layers"],
        request["num_heads"],
        request["dropout"],
    )


# ---- entries ----


def _settings(
    layers: int, hidden: int, heads: int, vocabulary: int, length: int, dropout: float
) -> tuple[Setting, ...]:
    return (
        Setting(name="vocab_size", default=vocabulary, meaning="tokens there are; the data set's, where it has some"),
        Setting(name="max_seq_length", default=length, meaning="tokens of a sequence"),
        Setting(name="max_position_embeddings", default=length, meaning="length of the table of positions"),
        Setting(name="hidden_size", default=hidden, meaning="features of a token"),
        Setting(name="num_layers", default=layers, meaning="layers"),
        Setting(name="num_heads", default=heads, meaning="heads of attention"),
        Setting(name="dropout", default=dropout, meaning="of embeddings, attention and MLPs"),
        Setting(
            name="pack",
            default=False,
            meaning="read documents, parted by blank lines, each for itself, one after another in a row; off: windows",
        ),
    )


_DEFAULTS = TRANSFORMER_DEFAULTS | {"adam_beta2": 0.95, "weight_decay": 0.1}

_TINY: dict[str, Any] = {
    "vocab_size": 64,
    "max_seq_length": 16,
    "max_position_embeddings": 16,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
}


def _add(name: str, layers: int, hidden: int, heads: int, rate: float, **more: Any) -> None:
    sizes = (more.pop("vocabulary", 50257), more.pop("length", 1024), more.pop("dropout", 0.1))
    registry.add(
        Model(
            name=name,
            runner="gpt",
            build=build,
            tasks={"pretrain": ("language_model",), "finetune": ("language_model",)},
            settings=_settings(layers, hidden, heads, *sizes),
            defaults=_DEFAULTS | {"learning_rate": rate} | more.pop("defaults", {}),
            recompute=("layers.*",),
            cuts=tuple(f"layers.{i}" for i in range(layers)),
            split={"embeddings.words": Split(), "head": Split(), **LAYER_SPLIT},
            tiny=_TINY,
            **more,
        )
    )


_PUBLISHED = "transformers, GPT2LMHeadModel: the tied matrix once"

_add(
    "gpt_tiny",
    *(4, 128, 4, 3e-3),
    vocabulary=65,
    length=64,
    dropout=0.0,
    defaults={"warmup_steps": 20},
    about="a GPT of 4 layers, 128 wide, for characters: learns to spell in a minute on a CPU",
    strategy={},
    advice="One process is enough.",
)
_add(
    "gpt",
    *(12, 768, 12, 6e-4),
    parameters=124_439_808,
    published=_PUBLISHED,
    about="GPT-2 small: 12 layers, 768 wide",
    strategy={"amp": "bf16", "shard": 1},
    advice="Fits one device: replicas, which share out the optimizer's state.",
)
_add(
    "gpt_medium",
    *(24, 1024, 16, 3e-4),
    parameters=354_823_168,
    published=_PUBLISHED,
    about="GPT-2 medium: 24 layers, 1024 wide",
    strategy={"amp": "bf16", "shard": 1},
    advice="Fits one device of 32 GB: replicas, which share out the optimizer's state.",
)
_add(
    "gpt_large",
    *(36, 1280, 20, 2.5e-4),
    parameters=774_030_080,
    published=_PUBLISHED,
    about="GPT-2 large: 36 layers, 1280 wide",
    strategy={"amp": "bf16", "shard": 2, "recompute": True},
    advice="Weights, gradients and optimizer state take 12 GB, so replicas share out the latter two; activations of "
    "1,024 tokens are more, so they are computed again.",
)
_add(
    "gpt_xl",
    *(48, 1600, 25, 2e-4),
    parameters=1_557_611_200,
    published=_PUBLISHED,
    about="GPT-2 XL: 48 layers, 1600 wide",
    strategy={"amp": "bf16", "shard": 3, "recompute": True},
    advice="Weights, gradients and optimizer state take 25 GB, so replicas share out all of them; 25 heads divide "
    "among 5 devices only, so stages suit it better than a split.",
)
