"""Minimal published transformers, for profiles of models whose code is not available.

A projection's features are divided into heads first, so that the runtime can split the heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ReferenceAttention(nn.Module):
    """Self-attention.

    fused: False to save the full matrix of attention weights, as before fused kernels; scaling and masking are then
           considered part of the softmax
    """

    def __init__(self, hidden: int, heads: int, dropout: float, causal: bool, fused: bool) -> None:
        super().__init__()
        self.heads = heads
        self.width = hidden // heads
        self.dropout = dropout
        self.causal = causal
        self.fused = fused
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.project = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, 3 * self.width)).transpose(1, 2).chunk(3, -1)
        chance = self.dropout if self.training else 0.0
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=chance, is_causal=self.causal)
        else:
            weights = F.softmax(torch.matmul(q, k.transpose(-2, -1)), -1)
            mixed = torch.matmul(F.dropout(weights, chance, self.training), v)
        out: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return out


class ReferenceLayer(nn.Module):
    """A transformer layer: attention and an MLP with residual connections, pre-norm (GPT) or post-norm (BERT)."""

    def __init__(
        self, hidden: int, heads: int, ffn: int, dropout: float, *, causal: bool, fused: bool, norm_first: bool
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention = ReferenceAttention(hidden, heads, dropout, causal, fused)
        self.mlp = nn.Sequential(nn.Linear(hidden, ffn), nn.GELU(), nn.Linear(ffn, hidden))
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor
        if self.norm_first:
            x = x + self.drop(self.attention(self.norm1(x)))
            out = x + self.drop(self.mlp(self.norm2(x)))
        else:
            x = self.norm1(x + self.drop(self.attention(x)))
            out = self.norm2(x + self.drop(self.mlp(x)))
        return out


class TokenEmbedding(nn.Module):
    """An embedding of tokens and learned positions."""

    def __init__(self, vocabulary: int, sequence: int, hidden: int, dropout: float, norm: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(sequence, hidden)
        self.norm = nn.LayerNorm(hidden) if norm else None
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        if self.norm is not None:
            x = self.norm(x)
        out: Tensor = self.drop(x)
        return out


class VocabularyHead(nn.Module):
    """A head that projects to the vocabulary; ``transform``: True to add BERT's layer before the projection."""

    def __init__(self, hidden: int, vocabulary: int, transform: bool) -> None:
        super().__init__()
        self.transform = nn.Linear(hidden, hidden) if transform else None
        self.norm = nn.LayerNorm(hidden)
        self.words = nn.Linear(hidden, vocabulary, bias=transform)

    def forward(self, x: Tensor) -> Tensor:
        if self.transform is not None:
            x = F.gelu(self.transform(x))
        out: Tensor = self.words(self.norm(x))
        return out


def gpt_model(
    layers: int, hidden: int, heads: int, sequence: int, vocabulary: int, ffn: int, dropout: float, fused: bool
) -> nn.Sequential:
    return _model((layers, hidden, heads, ffn), sequence, vocabulary, dropout, fused, is_decoder=True)


def bert_model(
    layers: int, hidden: int, heads: int, sequence: int, vocabulary: int, ffn: int, dropout: float, fused: bool
) -> nn.Sequential:
    return _model((layers, hidden, heads, ffn), sequence, vocabulary, dropout, fused, is_decoder=False)


def _model(
    sizes: tuple[int, int, int, int], sequence: int, vocabulary: int, dropout: float, fused: bool, is_decoder: bool
) -> nn.Sequential:
    """Return a pre-norm decoder, or a post-norm encoder with a transform before its head."""
    layers, hidden, heads, ffn = sizes
    entrance = TokenEmbedding(vocabulary, sequence, hidden, dropout, norm=not is_decoder)
    head = VocabularyHead(hidden, vocabulary, not is_decoder)
    head.words.weight = entrance.tokens.weight
    middle = [
        ReferenceLayer(hidden, heads, ffn, dropout, causal=is_decoder, fused=fused, norm_first=is_decoder)
        for _ in range(layers)
    ]
    return nn.Sequential(entrance, *middle, head)


# ---- Llama ----


class GroupedAttention(nn.Module):
    """Grouped-query attention with rotary position embeddings."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, sequence: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, width = heads, kv_heads, hidden // heads
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, kv_heads * width, bias=False)
        self.v = nn.Linear(hidden, kv_heads * width, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.register_buffer("turns", torch.empty(2, sequence, width), persistent=False)
        self.turns: Tensor

    def forward(self, x: Tensor) -> Tensor:
        q = self._turned(self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2))
        k = self._turned(self.k(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2))
        v = self.v(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out

    def _turned(self, x: Tensor) -> Tensor:
        """Return a tensor at the cost of a fused rotary embedding; its values are not those of a rotation."""
        cosine, sine = self.turns[:, : x.shape[2]].to(x.dtype)
        return torch.addcmul(x * cosine, x, sine)


class LlamaLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int, sequence: int) -> None:
        super().__init__()
        self.attention = GroupedAttention(hidden, heads, kv_heads, sequence)
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class LlamaHead(nn.Module):
    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.words = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.words(self.norm(x))
        return out


def llama_model(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, sequence: int, vocabulary: int
) -> nn.Sequential:
    middle = [LlamaLayer(hidden, heads, kv_heads, ffn, sequence) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(vocabulary, hidden), *middle, LlamaHead(hidden, vocabulary))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
