"""Builders of profiles of well-known models, to plan runs without their code. No memory is allocated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

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

    layers:          number of blocks
    hidden:          width of the residual stream
    heads:           number of attention heads
    sequence:        tokens per sample
    vocabulary:      number of token ids, default 51200
    ffn:             hidden width of a feed-forward layer, default 4 * hidden
    dropout:         dropout probability, default 0.1
    fused_attention: False to save the matrix of attention weights, as before fused kernels; default True
    dtype:           dtype of the parameters, default float32
    batch:           samples that are profiled, default 1
    device:          kind of device whose kernels are counted, default "cuda"

    >>> profile = echelon.planner.gpt(layers=2, hidden=64, heads=4, sequence=32)
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
    """Profile an encoder like BERT: post-norm, and a masked-language-model head tied to the embedding.

    layers, hidden, heads, sequence, ffn, dropout, fused_attention, dtype, batch, device: as in ``gpt``
    vocabulary: number of token ids, default 30522

    >>> profile = echelon.planner.bert(layers=2, hidden=64, heads=4, sequence=32)
    """
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
    """Profile a decoder like Llama: RMS norm, rotary positions, grouped-query attention, a gated MLP.

    layers, hidden, heads, sequence, dtype, batch, device: as in ``gpt``
    kv_heads:   number of heads of keys and values
    ffn:        hidden width of a gated MLP
    vocabulary: number of token ids, default 32000

    >>> profile = echelon.planner.llama(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, sequence=32)
    """
    with _shapes_only(dtype):
        model = llama_model(layers, hidden, heads, kv_heads, ffn, sequence, vocabulary)
    return _profiled(model, batch, sequence, f"llama({layers} layers, hidden {hidden})", device)


def _profiled(model: nn.Module, batch: int, sequence: int, name: str, device: DeviceKind) -> Profile:
    tokens = torch.empty(batch, sequence, dtype=torch.long, device="meta")
    return profile(model, (tokens, tokens), loss=token_loss, name=name, device=device)


@contextlib.contextmanager
def _shapes_only(dtype: torch.dtype) -> Iterator[None]:
    """Create modules with this dtype on the meta device within the context, without initial values."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), without_dynamo(), _WithoutInit():
            yield
    finally:
        torch.set_default_dtype(before)


class _WithoutInit(TorchFunctionMode):
    """A mode in which ``torch.nn.init`` does nothing: on the meta device, its decompositions would be imported."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else given["tensor"]
        return func(*args, **given)
