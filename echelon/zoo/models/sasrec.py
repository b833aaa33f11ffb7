"""SASRec (Kang and McAuley 2018) and HSTU (Zhai et al. 2024): the next item of a sequence, by causal attention."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.nn import SparseEmbedding
from echelon.zoo import registry
from echelon.zoo.entry import Model, Request, Setting
from echelon.zoo.models.attention import SelfAttention, head_width
from echelon.zoo.models.click_entry import click_defaults, click_model, table, table_settings


class SASRecBlock(nn.Module):
    """Causal self-attention and a pointwise network, each on normalized input and added to it."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.network_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, heads, dropout)
        self.network = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), seen))
        added: Tensor = x + self.dropout(self.network(self.network_norm(x)))
        return added


class HSTUBlock(nn.Module):
    """HSTU: gated attention whose weights are silu(q k + bias of the distance), divided by the length; no softmax.

    The bias is by position alone, where the paper adds one by time.
    """

    def __init__(self, dim: int, heads: int, dropout: float, length: int) -> None:
        super().__init__()
        self.heads, self.width = heads, head_width(dim, heads)
        self.norm, self.mixed_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.project = nn.Linear(dim, 4 * dim, bias=False)
        self.distance = nn.Parameter(torch.zeros(length))
        self.output = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        length = x.shape[1]
        gate, *parts = F.silu(self.project(self.norm(x))).chunk(4, 2)
        values, queries, keys = (part.view(len(x), length, self.heads, -1).transpose(1, 2) for part in parts)
        places = torch.arange(length, device=x.device)
        bias = self.distance[(places[:, None] - places[None, :]).clamp(min=0)]
        weights = F.silu(queries @ keys.transpose(2, 3) + bias) / length * seen
        mixed = (weights @ values).transpose(1, 2).flatten(2)
        added: Tensor = x + self.dropout(self.output(self.mixed_norm(mixed) * gate))
        return added


class SequenceRecommender(nn.Module):
    """Scores of candidates at every position of a sequence of items, from that position and the ones before it.

    Sequences are padded with id 0 at their beginning. The items of the sequence and the candidates share one table.
    """

    def __init__(self, items: SparseEmbedding, length: int, blocks: nn.ModuleList, dropout: float) -> None:
        super().__init__()
        self.items, self.blocks = items, blocks
        self.positions = nn.Parameter(torch.randn(length, items.dim) * 0.02)
        self.dropout, self.norm = nn.Dropout(dropout), nn.LayerNorm(items.dim)

    def forward(self, history: Tensor, candidates: Tensor) -> Tensor:
        length, room = history.shape[1], len(self.positions)
        if length > room:
            raise UsageError(f"sequences have {length} items, and the model has {room} positions; raise history_length")
        is_there = history != 0
        x = self.items(history) * math.sqrt(self.items.dim) + self.positions[:length]
        x = self.dropout(x) * is_there.unsqueeze(2)
        seen = _seen(is_there)
        for block in self.blocks:
            x = block(x, seen) * is_there.unsqueeze(2)
        scores: Tensor = (self.items(candidates) @ self.norm(x).unsqueeze(3)).squeeze(3)
        return scores


def _seen(is_there: Tensor) -> Tensor:
    """Return which keys each position sees, [n, 1, s, s]: items up to its own, and itself where nothing is."""
    length = is_there.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=is_there.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=is_there.device)
    return ((causal & is_there.unsqueeze(1)) | itself).unsqueeze(1)


def _build_sasrec(request: Request) -> nn.Module:
    dim, heads, dropout = request["embedding_dim"], request["num_heads"], request["dropout"]
    return _built(request, [SASRecBlock(dim, heads, dropout) for _ in range(request["num_layers"])])


def _build_hstu(request: Request) -> nn.Module:
    dim, heads, dropout = request["embedding_dim"], request["num_heads"], request["dropout"]
    length = request["history_length"]
    return _built(request, [HSTUBlock(dim, heads, dropout, length) for _ in range(request["num_layers"])])


def _built(request: Request, blocks: list[nn.Module]) -> nn.Module:
    items = table(request, padding_id=0)
    return SequenceRecommender(items, request["history_length"], nn.ModuleList(blocks), request["dropout"])


def _entry(name: str, build: Callable[[Request], nn.Module], about: str) -> Model:
    return click_model(
        name,
        build,
        task="next_item",
        about=about,
        columns=(Setting(name="history_length", default=20, meaning="items of a sequence; the data set's own number"),),
        settings=(
            *table_settings(dim=48, rate=0.02),
            Setting(name="num_layers", default=2, meaning="blocks of attention"),
            Setting(name="num_heads", default=1, meaning="heads of each"),
            Setting(name="dropout", default=0.2, meaning="of vectors, attention and networks"),
            Setting(name="negatives", default=4, meaning="made-up data: random items beside each next one"),
        ),
        defaults=click_defaults(batch_size=128),
        tiny={"embedding_dim": 8, "num_heads": 2},
    )


registry.add(_entry("sasrec", _build_sasrec, "the next item, by causal self-attention (Kang and McAuley 2018)"))
registry.add(_entry("hstu", _build_hstu, "the next item, by gated attention without softmax (Zhai et al. 2024)"))
