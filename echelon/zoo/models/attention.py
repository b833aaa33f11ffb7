"""Self-attention of the text models.

The outputs of the projection are ordered by head, with query, key and value inside each head, so that a split gives
every device whole heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.nn import Bounds, Packed, packed_attention
from echelon.strategy.annotations.marks import Mark, Split
from echelon.zoo.entry import Setting

#: Marks for a layer with ``attention`` and ``mlp``: split by heads, and the two linear layers of the MLP as a pair.
LAYER_SPLIT: dict[str, Mark | list[Mark]] = {
    "*.qkv": Split(),
    "*.project": Split(how="row"),
    "*.mlp": Split(),
}


#: Defaults of common parameters that the text models share.
TRANSFORMER_DEFAULTS: dict[str, Any] = {
    "optimizer": "adamw",
    "end_learning_rate": 0.0,
    "decay_scheme": "luong5",
    "warmup_steps": 100,
    "weight_decay": 0.01,
    "max_gradient_norm": 1.0,
}

PACK = Setting(
    name="pack",
    default=None,
    meaning="lay sequences one after another without padding; by default on a GPU where it saves something",
    kind=bool | None,
)


class SelfAttention(nn.Module):
    """Self-attention from [n, s, hidden] to [n, s, hidden].

    ``seen`` [n, 1, 1, s] is False for masked keys; it is the same for all heads and queries, so that no kernel has to
    read a full mask matrix. Packed sequences [t, hidden] have their bounds in place of ``seen``.
    """

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
    """Return the positions of tokens in their sequences: [s], or [t] for packed ones."""
    return tokens.places() if isinstance(tokens, Packed) else torch.arange(tokens.shape[1], device=tokens.device)


def require_room(length: int, table: int, name: str) -> None:
    """Raise UsageError if ``length`` exceeds the table of positions; ``name`` is the parameter of the table's size."""
    if length > table:
        raise UsageError(f"max_seq_length {length} is more than the {table} positions there are; raise {name}")


def draw_weights(model: nn.Module) -> None:
    """Initialize weights as BERT and GPT-2 do: normal weights, zero biases."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
