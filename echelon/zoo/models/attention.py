"""Self-attention of the text models.

Heads are the first thing that a projection's features are divided into, with query, key and value inside each, so that
a split gives every device whole heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.nn import Bounds, Packed, packed_attention
from echelon.strategy.annotations.marks import Mark, Split
from echelon.zoo.entry import Setting

#: Of a layer with ``attention`` and ``mlp``: heads, then the two linear layers as a pair.
LAYER_SPLIT: dict[str, Mark | list[Mark]] = {
    "*.qkv": Split(),
    "*.project": Split(how="row"),
    "*.mlp": Split(),
}


PACK = Setting(
    name="pack",
    default=None,
    meaning="lay sequences one after another without padding; by default on a GPU where it saves something",
    kind=bool | None,
)


class SelfAttention(nn.Module):
    """[n, s, hidden] to [n, s, hidden]. ``seen`` [n, 1, 1, s] is False where nobody may look; one for all heads and
    queries, so that no kernel has to read a matrix of it. Sequences in one row, [t, hidden], come with their bounds."""

    def __init__(self, hidden: int, heads: int, dropout: float, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.width = heads, head_width(hidden, heads)
        self.dropout, self.causal = dropout, causal
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.project = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, seen: Tensor | Bounds | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (self.heads, 3 * self.width))
        chance = self.dropout if self.training else 0.0
        if isinstance(seen, Bounds):
            q, k, v = qkv.chunk(3, -1)
            mixed = packed_attention(q, k, v, seen, causal=self.causal, dropout=chance).flatten(1)
        else:
            q, k, v = qkv.transpose(1, 2).chunk(3, -1)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=chance, is_causal=self.causal)
            mixed = mixed.transpose(1, 2).flatten(2)
        out: Tensor = self.project(mixed)
        return out


def head_width(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise UsageError(f"hidden_size {hidden} does not divide into num_heads {heads}; choose a multiple of it")
    return hidden // heads


def places_of(tokens: Tensor | Packed) -> Tensor:
    """Positions of tokens in their sequences: [s], or of packed ones [t]."""
    return tokens.places() if isinstance(tokens, Packed) else torch.arange(tokens.shape[1], device=tokens.device)


def require_room(length: int, table: int, name: str) -> None:
    """``name``: of the parameter that says how long the table of positions is."""
    if length > table:
        raise UsageError(f"max_seq_length {length} is more than the {table} positions there are; raise {name}")


def draw_weights(model: nn.Module, std: float = 0.02) -> None:
    """As BERT and GPT-2 begin: normal weights, no biases."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
