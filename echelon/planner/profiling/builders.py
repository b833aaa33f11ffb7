"""Builders of profiles of well-known models, to plan runs without their code. No memory is allocated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn

from echelon.base.dynamo_stub import without_dynamo
from echelon.planner.profiling.profile import Profile, profile
from echelon.planner.profiling.transformers import bert_model, gpt_model, llama_model, token_loss

DeviceKind = Literal["cuda", "cpu"]


def gpt(
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    vocabulary: int = 51200,
    *,
    ffn: int | None = None,
    dropout: float = 0.1,
    fused_attention: bool = True,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    device: DeviceKind = "cuda",
) -> Profile:
    """Profile a decoder like GPT-2 and GPT-3: pre-norm, learned positions, a head tied to the embedding.

    fused_attention: False to save the matrix of attention weights, as before fused kernels; default True
    """
    with _shapes_only(dtype):
        model = gpt_model(layers, hidden, heads, sequence, vocabulary, ffn or 4 * hidden, dropout, fused_attention)
    return _profiled(model, batch, sequence, f"gpt({layers} layers, hidden {hidden})", device)


def bert(
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    vocabulary: int = 30522,
    *,
    ffn: int | None = None,
    dropout: float = 0.1,
    fused_attention: bool = True,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    device: DeviceKind = "cuda",
) -> Profile:
    """Profile an encoder like BERT: post-norm, and a masked-language-model head tied to the embedding."""
    with _shapes_only(dtype):
        model = bert_model(layers, hidden, heads, sequence, vocabulary, ffn or 4 * hidden, dropout, fused_attention)
    return _profiled(model, batch, sequence, f"bert({layers} layers, hidden {hidden})", device)


def llama(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    sequence: int,
    vocabulary: int = 32000,
    *,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    device: DeviceKind = "cuda",
) -> Profile:
    """Profile a decoder like Llama: RMS norm, rotary positions, grouped-query attention, a gated MLP."""
    with _shapes_only(dtype):
        model = llama_model(layers, hidden, heads, kv_heads, ffn, sequence, vocabulary)
    return _profiled(model, batch, sequence, f"llama({layers} layers, hidden {hidden})", device)


def _profiled(model: nn.Module, batch: int, sequence: int, name: str, device: DeviceKind) -> Profile:
    tokens = torch.empty(batch, sequence, dtype=torch.long, device="meta")
    return profile(model, (tokens, tokens), loss=token_loss, name=name, device=device)


@contextlib.contextmanager
def _shapes_only(dtype: torch.dtype) -> Iterator[None]:
    """Create modules with this dtype on the meta device within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), without_dynamo():
            yield
    finally:
        torch.set_default_dtype(before)
