"""Kernels of published systems for a transformer: Megatron-LM for a GPT, torchtitan for a Llama, by closed forms.

Their kernels are not those of a plain PyTorch module: masks, biases and dropout are parts of others, the vocabulary is
cut over the split, and weights are in 16 bits. Everything else (what a kernel or a message takes) is the planner's.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from echelon.planner.model_costs import Kernel, KernelKind, ModelCosts, ModelUnit, SplitCollective, UnitPass


@dataclass(frozen=True)
class Shape:
    """A published model. kv: part of the heads that keys and values have; llama: with layers as Llama's."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int = 51200
    ffn: int = 0
    kv: float = 1.0
    llama: bool = False
    tied: bool = True

    @property
    def parameters(self) -> float:
        ends = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_weights + ends

    @property
    def layer_weights(self) -> float:
        inner = self.ffn or 4 * self.hidden
        return self.hidden * (self.hidden * (2 + 2 * self.kv) + inner * (3 if self.llama else 2))


@dataclass(frozen=True)
class Kernels:
    """Arithmetic of a system. dtype: of products inside layers; whole_head: how much longer the products of a head take
    that is not split; along: what lies between split products is split along the sequence."""

    dtype: str = "float16"
    whole_head: float = 1.0
    along: bool = False


class Published:
    """A published model as a system runs it; an Anatomy."""

    batch = 1
    splits = 1 << 20

    def __init__(self, shape: Shape, kernels: Kernels) -> None:
        self.shape, self.kernels = shape, kernels
        self.name = f"{shape.layers} layers of {shape.hidden}"
        self.names = ("embedding", *(f"layer {number}" for number in range(shape.layers)), "head")
        self.ties = ((0, shape.layers + 1),) if shape.tied else ()

    def sheet(self, samples: int, split: int = 1, amp: str | None = None) -> ModelCosts:
        size = Size(dataclasses.replace(self.shape, layers=0), samples, split)  # depth makes no difference to units
        slower = self.kernels.whole_head if split == 1 else 1.0
        layer = (llama_layer if self.shape.llama else gpt_layer)(size, self.kernels.dtype, self.kernels.along)
        units = (embedding(size), *([layer] * self.shape.layers), head(size, slower))
        tied = (self.shape.vocabulary * self.shape.hidden / split,) if self.shape.tied else ()
        return ModelCosts(units, samples, split, amp, tied=tied)


@dataclass(frozen=True)
class Size:
    """Bytes of what recurs: a hidden state, a matrix of attention weights, logits; all in 16 bits."""

    shape: Shape
    samples: int
    split: int

    @property
    def tokens(self) -> float:
        return self.samples * self.shape.sequence

    @property
    def state(self) -> float:
        return 2.0 * self.tokens * self.shape.hidden

    @property
    def weights(self) -> float:
        return 2.0 * self.samples * self.shape.heads / self.split * self.shape.sequence**2

    @property
    def logits(self) -> float:
        return 2.0 * self.tokens * self.shape.vocabulary / self.split

    def summed(self, times: int = 1) -> tuple[SplitCollective, ...]:
        return (SplitCollective("all_reduce", self.state, times),) if self.split > 1 else ()


def moved(read: float, written: float, kind: KernelKind = "pointwise", count: int = 1) -> Kernel:
    return Kernel(kind, 0.0, read + written, (), "float16", count)


def product(
    batch: float, m: float, n: float, k: float, dtype: str, slower: float = 1.0, for_weights: bool = False
) -> Kernel:
    size = 2.0 * batch * (m * k + k * n + m * n)
    return Kernel("product", 2.0 * batch * m * n * k * slower, size, (batch, m, n, k), dtype, 1, for_weights)


def linear(rows: float, out: float, into: float, dtype: str, slower: float = 1.0) -> tuple[list[Kernel], list[Kernel]]:
    """Forward; backward for what came in, and for the weight."""
    back = [product(1, rows, into, out, dtype, slower), product(1, into, out, rows, dtype, slower, for_weights=True)]
    return [product(1, rows, out, into, dtype, slower)], back


def batched(batch: float, m: float, n: float, k: float, dtype: str) -> tuple[list[Kernel], list[Kernel]]:
    return [product(batch, m, n, k, dtype)], [product(batch, m, k, n, dtype), product(batch, k, n, m, dtype)]


def joined(*parts: tuple[list[Kernel], list[Kernel]]) -> tuple[list[Kernel], list[Kernel]]:
    return [k for forward, _ in parts for k in forward], [k for _, backward in parts for k in backward]


@functools.cache
def gpt_layer(size: Size, dtype: str, along: bool) -> ModelUnit:
    """Fused: scale, mask and softmax; bias, dropout and residual; bias and GELU. Dropout of attention is on its own."""
    shape, x, att, t = size.shape, size.state, size.weights, size.split
    rows, h, s = size.tokens, shape.hidden, shape.sequence
    heads = size.samples * shape.heads / t
    between = x / t if along else x
    forward, backward = joined(
        linear(rows, 3 * h / t, h, dtype),
        batched(heads, s, s, h / shape.heads, "float16"),
        batched(heads, s, h / shape.heads, s, "float16"),
        linear(rows, h, h / t, dtype),
        linear(rows, 4 * h / t, h, dtype),
        linear(rows, h, 4 * h / t, dtype),
    )
    forward += [
        moved(between, between, "normalization", 2),
        moved(att, att, "attention"),
        moved(att, 1.5 * att, "attention"),
    ]
    forward += [moved(x / t, x / t, "copy"), moved(3 * x / t, 3 * x / t, "copy")]
    forward += [moved(2 * between, 1.5 * between, count=2), moved(4 * x / t, 4 * x / t)]
    backward += [
        moved(3 * between, between, "normalization", 2),
        moved(between, 0, "reduction", 4),
        moved(2 * att, att, "attention"),
    ]
    backward += [moved(1.5 * att, att, "attention"), moved(x / t, x / t, "copy"), moved(3 * x / t, 3 * x / t, "copy")]
    backward += [
        moved(1.5 * between, between, count=2),
        moved(8 * x / t, 4 * x / t),
        moved(2 * between, between, count=2),
    ]
    backward += [moved(4 * x / t, 0, "reduction"), moved(3 * x / t, 0, "reduction")]
    held = shape.layer_weights / t + h * (4 + 9 / t)
    messages = size.summed(2)
    saved = 5 * x + 12 * x / t + 2.5 * att
    return ModelUnit(
        *("layer", UnitPass(tuple(forward), messages), UnitPass(tuple(backward), messages)),
        weights=held,
        trained=held,
        weight_bytes=2 * held,
        received=x,
        output=x,
        saved=saved,
    )


@functools.cache
def llama_layer(size: Size, dtype: str, along: bool = True) -> ModelUnit:
    """RMS norms, rotated positions, causal attention in one kernel, a gated MLP. Between products the sequence is cut
    over the split, too."""
    shape, t, rows, h = size.shape, size.split, size.tokens, size.shape.hidden
    x, inner = size.state / t, size.state * shape.ffn / h / t
    wide = h * (1 + 2 * shape.kv) / t
    forward, backward = joined(
        linear(rows, wide, h, dtype),
        linear(rows, h, h / t, dtype),
        linear(rows, 2 * shape.ffn / t, h, dtype),
        linear(rows, h, shape.ffn / t, dtype),
    )
    work = 2.0 * size.samples * shape.sequence**2 * h / t  # 4 s^2 h, of which causal masks leave half
    forward += [Kernel("attention", work, 4 * x), *[moved(3 * x, 3 * x, "normalization", 2)]]
    backward += [Kernel("attention", 2.5 * work, 8 * x), *[moved(5 * x, 4 * x, "normalization", 2)]]
    forward += [moved(4 * x, 4 * x, count=2), moved(2 * x, x, count=2), moved(3 * inner, 2 * inner)]
    backward += [moved(4 * x, 4 * x, count=2), moved(2 * x, x, count=2), moved(5 * inner, 4 * inner)]
    forward = [_in(kernel, "bfloat16") for kernel in forward]
    backward = [_in(kernel, "bfloat16") for kernel in backward]
    held = shape.layer_weights / t + 2 * h
    messages = size.summed(2)
    return ModelUnit(
        *("layer", UnitPass(tuple(forward), messages), UnitPass(tuple(backward), messages)),
        weights=held,
        trained=held,
        weight_bytes=2 * held,
        received=size.state,
        output=size.state,
    )


def _in(kernel: Kernel, dtype: str) -> Kernel:
    return (
        kernel if kernel.kind == "product" else Kernel(kernel.kind, kernel.flops, kernel.bytes, (), dtype, kernel.count)
    )


@functools.cache
def embedding(size: Size) -> ModelUnit:
    x, shape = size.state, size.shape
    held = shape.vocabulary * shape.hidden / size.split + (0 if shape.llama else shape.sequence * shape.hidden)
    table = 2.0 * shape.vocabulary * shape.hidden / size.split
    forward = (moved(x, x, "lookup"), moved(2 * x, 1.5 * x), moved(x, x))
    backward = (moved(x, x), moved(1.5 * x, x), moved(table, table))
    return ModelUnit(
        "embedding", UnitPass(forward, size.summed()), UnitPass(backward), weights=held, trained=held, output=x
    )


@functools.cache
def head(size: Size, slower: float) -> ModelUnit:
    """Logits and their loss, in fp32 as far as exponents are concerned, each rank with its part of the vocabulary."""
    shape, x, wide = size.shape, size.state, 2 * size.logits
    dtype = "bfloat16" if shape.llama else "float16"
    forward, backward = linear(size.tokens, shape.vocabulary / size.split, shape.hidden, dtype, slower)
    forward += [
        moved(x, x, "normalization"),
        moved(wide / 2, wide),
        moved(wide, 0, count=2),
        moved(wide, wide, count=3),
    ]
    backward += [moved(wide, wide), moved(wide, wide / 2), moved(3 * x, x, "normalization")]
    few = (SplitCollective("all_reduce", 4 * size.tokens, 3),) if size.split > 1 else ()
    held = shape.vocabulary * shape.hidden / size.split
    return ModelUnit(
        *("head", UnitPass(tuple(forward), few), UnitPass(tuple(backward), size.summed())),
        weights=held,
        trained=held,
        received=x,
        saved=3 * size.logits,
    )
