"""Published models as profiles of the product: a plain GPT or Llama in 16 bits, traced as any model is.

Layers that are alike have the same costs, so that one profile of a few layers serves every depth.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.planner.model_costs import ModelCosts
from echelon.planner.profiling.profile import Profile, profile
from echelon.planner.profiling.transformers import gpt_model, llama_model, token_loss

TRACED = 3  # layers of the profile that stands for all depths


@dataclass(frozen=True)
class Shape:
    """A published model.

    kv:    fraction of the heads that keys and values have
    llama: True for layers as Llama's, False for those of GPT
    flash: True if attention is one fused kernel, which keeps no matrix of weights
    unpadded: size of the vocabulary where it is not split, if it is padded for splits only; 0: the same
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int = 51200
    ffn: int = 0
    kv: float = 1.0
    llama: bool = False
    tied: bool = True
    flash: bool = False
    unpadded: int = 0

    @property
    def inner(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def parameters(self) -> float:
        ends = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_weights + ends

    @property
    def layer_weights(self) -> float:
        return self.hidden * (self.hidden * (2 + 2 * self.kv) + self.inner * (3 if self.llama else 2))


class PublishedModel:
    """The profile of a published model, with its number of layers. Implements ``ProfileLike``."""

    batch = 1

    def __init__(self, shape: Shape) -> None:
        self.name = f"{shape.layers} layers of {shape.hidden}"
        self.names = ("embedding", *(f"layer {number}" for number in range(shape.layers)), "head")
        self.ties = ((0, shape.layers + 1),) if shape.tied else ()
        self._layers, self._shape = shape.layers, replace(shape, layers=TRACED)
        self.splits = traced(self._shape).splits

    def sheet(self, samples: int, split: int = 1, amp: str | None = None) -> ModelCosts:
        shape = self._shape
        if split == 1 and shape.unpadded:
            shape = replace(shape, vocabulary=shape.unpadded)
        found = traced(shape).sheet(samples, split, amp)
        first, layer, *_, last = found.units
        return replace(found, units=(first, *([layer] * self._layers), last))


@functools.cache
def traced(shape: Shape) -> Profile:
    """Return the product's profile of a model whose weights are in 16 bits."""
    with _built_in(torch.bfloat16 if shape.llama else torch.float16):
        tokens = torch.empty(1, shape.sequence, dtype=torch.long)
        if shape.llama:
            heads = max(1, round(shape.kv * shape.heads))
            sizes = (shape.layers, shape.hidden, shape.heads, heads, shape.inner, shape.sequence, shape.vocabulary)
            model = llama_model(*sizes)
        else:
            sizes = (shape.layers, shape.hidden, shape.heads, shape.sequence, shape.vocabulary, shape.inner)
            model = gpt_model(*sizes, dropout=0.1, fused=shape.flash)
    return profile(
        model,
        (tokens, tokens),
        loss=loss_in_fp32 if shape.llama or shape.flash else token_loss,
        name=f"hidden {shape.hidden}",
        device="cuda",
    )


def loss_in_fp32(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@contextlib.contextmanager
def _built_in(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)
