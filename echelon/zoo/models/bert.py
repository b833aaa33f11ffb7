"""BERT (Devlin et al. 2018), and the smaller models of Turc et al. 2019.

Pretraining predicts masked words and whether the second sentence follows the first; finetuning classifies texts, or
finds the answer to a question in a text. Masked positions are gathered first, so only these are multiplied by the
vocabulary matrix, and all shapes are fixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.nn import Bounds, Packed
from echelon.strategy.annotations.marks import Split
from echelon.zoo import registry
from echelon.zoo.entry import Model, Request, Setting
from echelon.zoo.models.attention import (
    LAYER_SPLIT,
    PACK,
    TRANSFORMER_DEFAULTS,
    SelfAttention,
    draw_weights,
    places_of,
    require_room,
)


@dataclass(frozen=True)
class BertSizes:
    vocabulary: int
    positions: int
    segments: int
    hidden: int
    layers: int
    heads: int
    inner: int
    dropout: float
    attention_dropout: float
    norm_eps: float
    masked: bool


class BertEmbeddings(nn.Module):
    """Embeddings of words, segments and learned positions."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = nn.Embedding(sizes.positions, sizes.hidden)
        self.segments = nn.Embedding(sizes.segments, sizes.hidden)
        self.norm = nn.LayerNorm(sizes.hidden, sizes.norm_eps)
        self.drop = nn.Dropout(sizes.dropout)

    def forward(self, tokens: Tensor | Packed, segments: Tensor) -> Tensor:
        words = tokens.values if isinstance(tokens, Packed) else tokens
        places = self.positions(places_of(tokens))
        out: Tensor = self.drop(self.norm(self.words(words) + self.segments(segments) + places))
        return out


class BertLayer(nn.Module):
    """A post-norm layer: attention and an MLP, each with a residual connection and a norm after it."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.attention = SelfAttention(sizes.hidden, sizes.heads, sizes.attention_dropout)
        self.norm1 = nn.LayerNorm(sizes.hidden, sizes.norm_eps)
        self.mlp = nn.Sequential(nn.Linear(sizes.hidden, sizes.inner), nn.GELU(), nn.Linear(sizes.inner, sizes.hidden))
        self.norm2 = nn.LayerNorm(sizes.hidden, sizes.norm_eps)
        self.drop = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, seen: Tensor | Bounds | None) -> Tensor:
        x = self.norm1(x + self.drop(self.attention(x, seen)))
        out: Tensor = self.norm2(x + self.drop(self.mlp(x)))
        return out


class Encoder(nn.Module):
    """The encoder of all BERT tasks: tokens, segments and mask [n, s] to [n, s, hidden].

    Packed tokens with segments [t] need no mask; the result is [t, hidden].
    """

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.masked = sizes.masked
        self.embeddings = BertEmbeddings(sizes)
        self.layers = nn.ModuleList(BertLayer(sizes) for _ in range(sizes.layers))

    def encode(self, tokens: Tensor | Packed, segments: Tensor, mask: Tensor | None) -> Tensor:
        x: Tensor = self.embeddings(tokens, segments)
        seen = tokens.bounds if isinstance(tokens, Packed) else self._seen(mask)
        for layer in self.layers:
            x = layer(x, seen)
        return x

    def _seen(self, mask: Tensor | None) -> Tensor | None:
        return mask.bool()[:, None, None, :] if self.masked and mask is not None else None


class WordGuess(nn.Module):
    """The head that maps features to the vocabulary; its last matrix is tied to the embedding."""

    def __init__(self, sizes: BertSizes, words: nn.Embedding) -> None:
        super().__init__()
        self.transform = nn.Linear(sizes.hidden, sizes.hidden)
        self.norm = nn.LayerNorm(sizes.hidden, sizes.norm_eps)
        self.words = nn.Linear(sizes.hidden, sizes.vocabulary)
        self.words.weight = words.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.words(self.norm(F.gelu(self.transform(x))))
        return out


class BertPretraining(Encoder):
    """BERT for pretraining: logits of words at ``positions`` [n, p, vocabulary] and of the next sentence [n, 2].

    For packed tokens, ``positions`` [p] are indices into the row, and the logits of words are [p, vocabulary].
    """

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__(sizes)
        self.pooler = nn.Linear(sizes.hidden, sizes.hidden)
        self.guess = WordGuess(sizes, self.embeddings.words)
        self.next_sentence = nn.Linear(sizes.hidden, 2)
        draw_weights(self)

    def forward(
        self, tokens: Tensor | Packed, segments: Tensor, mask: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = self.encode(tokens, segments, mask)
        if isinstance(tokens, Packed):
            requested = x.index_select(0, positions)
        else:
            requested = x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))
        follows: Tensor = self.next_sentence(torch.tanh(self.pooler(first_tokens(x, tokens))))
        return self.guess(requested), follows


class BertClassifier(Encoder):
    """BERT for classification: logits of the class of a text, from its first token."""

    def __init__(self, sizes: BertSizes, classes: int) -> None:
        super().__init__(sizes)
        self.pooler = nn.Linear(sizes.hidden, sizes.hidden)
        self.drop = nn.Dropout(sizes.dropout)
        self.head = nn.Linear(sizes.hidden, classes)
        draw_weights(self)

    def forward(self, tokens: Tensor | Packed, segments: Tensor, mask: Tensor | None) -> Tensor:
        x = self.encode(tokens, segments, mask)
        out: Tensor = self.head(self.drop(torch.tanh(self.pooler(first_tokens(x, tokens)))))
        return out


class BertSpan(Encoder):
    """BERT for question answering: logits of each token to be the first and the last of the answer, [n, s, 2].

    The softmax over tokens includes padding, so these rows are not packed.
    """

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__(sizes)
        self.head = nn.Linear(sizes.hidden, 2)
        draw_weights(self)

    def forward(self, tokens: Tensor, segments: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.head(self.encode(tokens, segments, mask))
        return out


def first_tokens(x: Tensor, tokens: Tensor | Packed) -> Tensor:
    """Return the features of the first token of each sample, [n, hidden]."""
    return x.index_select(0, tokens.begins) if isinstance(tokens, Packed) else x[:, 0]


def build(request: Request) -> nn.Module:
    require_room(request["max_seq_length"], request["max_position_embeddings"], "max_position_embeddings")
    sizes = BertSizes(
        vocabulary=request["vocab_size"],
        positions=request["max_position_embeddings"],
        segments=request["type_vocab_size"],
        hidden=request["hidden_size"],
        layers=request["num_layers"],
        heads=request["num_heads"],
        inner=request["intermediate_size"],
        dropout=request["dropout"],
        attention_dropout=request["attention_dropout"],
        norm_eps=request["layer_norm_eps"],
        masked=request["attention_mask"],
    )
    if request.task == "answer_span":
        return BertSpan(sizes)
    if request.task == "classify_text":
        return BertClassifier(sizes, request["num_classes"])
    return BertPretraining(sizes)


# ---- entries ----


def _settings(layers: int, hidden: int, heads: int) -> tuple[Setting, ...]:
    return (
        Setting(
            name="vocab_size", default=30522, meaning="words and parts of words; the data set's, where it has some"
        ),
        Setting(name="max_seq_length", default=128, meaning="tokens of a sequence"),
        Setting(name="max_predictions_per_seq", default=20, meaning="masked words of a sequence, at most"),
        Setting(name="hidden_size", default=hidden, meaning="features of a token"),
        Setting(name="num_layers", default=layers, meaning="layers"),
        Setting(name="num_heads", default=heads, meaning="heads of attention"),
        Setting(name="intermediate_size", default=4 * hidden, meaning="features inside an MLP"),
        Setting(name="max_position_embeddings", default=512, meaning="length of the table of positions"),
        Setting(name="type_vocab_size", default=2, meaning="kinds of segments"),
        Setting(name="dropout", default=0.1, meaning="of embeddings, attention's output and MLPs"),
        Setting(name="attention_dropout", default=0.1, meaning="of the weights of attention"),
        Setting(name="layer_norm_eps", default=1e-12, meaning="what a norm adds to the variance"),
        Setting(name="attention_mask", default=True, meaning="off for data without padding: somewhat quicker"),
        PACK,
    )


_DEFAULTS = TRANSFORMER_DEFAULTS | {"opt_epsilon": 1e-6, "learning_rate": 1e-4}

_TINY: dict[str, Any] = {
    "vocab_size": 128,
    "max_seq_length": 16,
    "max_predictions_per_seq": 3,
    "max_position_embeddings": 16,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 64,
}


def _add(
    name: str, layers: int, hidden: int, heads: int, parameters: int, rate: float, *, strategy: Any, advice: str
) -> None:
    registry.add(
        Model(
            name=name,
            runner="bert",
            build=build,
            tasks={"pretrain": ("masked_lm",), "finetune": ("classify_text", "answer_span")},
            about=f"BERT of {layers} layers, {hidden} wide",
            parameters=parameters,
            published="transformers, BertForPreTraining: the heads of both tasks included, the tied matrix once",
            settings=_settings(layers, hidden, heads),
            defaults=_DEFAULTS | {"learning_rate": rate},
            recompute=("layers.*",),
            cuts=tuple(f"layers.{i}" for i in range(layers)),
            split={"*.words": Split(), **LAYER_SPLIT},
            strategy=strategy,
            advice=advice,
            tiny=_TINY,
        )
    )


_SMALL: dict[str, Any] = {
    "strategy": {"amp": "bf16"},
    "advice": "Small enough for any device: replicas only.",
}
_BASE: dict[str, Any] = {
    "strategy": {"amp": "bf16", "shard": 1},
    "advice": "Fits one device: replicas, which share out the optimizer's state. 'attention_mask' off where no "
    "sequence is padded.",
}
_LARGE: dict[str, Any] = {
    "strategy": {"amp": "bf16", "shard": 1},
    "advice": "Fits one device of 32 GB: replicas, which share out the optimizer's state. For large batches lamb; on "
    "slow links stages, of whole layers; on smaller devices recompute.",
}

_add("bert_tiny", 2, 128, 2, 4_433_468, 1e-3, **_SMALL)
_add("bert_mini", 4, 256, 4, 11_267_900, 5e-4, **_SMALL)
_add("bert_small", 4, 512, 8, 29_058_876, 5e-4, **_SMALL)
_add("bert_medium", 8, 512, 8, 41_668_412, 3e-4, **_SMALL)
_add("bert_base", 12, 768, 12, 110_106_428, 1e-4, **_BASE)
_add("bert_large", 24, 1024, 16, 336_226_108, 1e-4, **_LARGE)
