"""Costs of one torch operation: the kind of its kernels, their FLOPs, and the bytes that they read and write."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon.planner.model_costs import FUSABLE, KernelKind

aten = torch.ops.aten


@dataclass(slots=True)
class KernelLaunch:
    """One traced kernel launch. ``made`` and ``read`` are the numbers of the storages that it made and read."""

    kind: KernelKind
    flops: float
    bytes: float
    shape: tuple[float, ...]
    dtype: str
    made: tuple[int, ...] = ()
    read: tuple[int, ...] = ()
    for_weights: bool = False
    is_sum: bool = False  # an addition of two tensors
    over_rows: bool = False  # a reduction over other dimensions than the last one
    is_fusable: bool = False  # torch.compile can run it in one kernel with its neighbors


@dataclass(frozen=True, slots=True)
class TracedOperation:
    """An operation that has run. ``operands``: the tensors in its arguments; ``results``: the tensors it returned."""

    func: Any
    args: Sequence[Any]
    operands: list[Tensor]
    results: list[Tensor]


#: Indices of the results that a launch makes, and the launch.
Made = tuple[Sequence[int], KernelLaunch]


def launches_of(operation: TracedOperation) -> list[Made]:
    """Return the kernel launches of an operation that is not a view."""
    packet = operation.func.overloadpacket
    if packet in _CONVOLUTIONS_BACK:
        return _convolution_back(operation)
    if packet in _RECURRENT:
        return _recurrent(operation, back=packet is aten.mkldnn_rnn_layer_backward)
    kind = kind_of(operation.func)
    if kind == "copy" and _rearranges(operation):
        kind = "layout"
    flops, shape = _arithmetic(kind, packet, operation)
    launch = KernelLaunch(kind, flops, _traffic(kind, operation), shape, _dtype(operation))
    launch.is_sum = operation.func is aten.add.Tensor
    launch.is_fusable = kind in FUSABLE or (kind == "lookup" and not _scatters(operation.func))
    launch.over_rows = kind == "reduction" and _reduces_rows(operation)
    return [(range(len(operation.results)), launch)]


# ---- kinds ----

_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addbmm, aten.mv, aten.addmv, aten.dot, aten.vdot}
_CONVOLUTIONS = {aten.convolution, aten._convolution, aten.cudnn_convolution, aten.mkldnn_convolution}
_CONVOLUTIONS_BACK = {aten.convolution_backward}
_RECURRENT = {aten.mkldnn_rnn_layer, aten.mkldnn_rnn_layer_backward}
_NORMS = ("norm",)
_COPIES = (
    *("clone", "copy_", "_to_copy", "cat", "stack", "repeat", "constant_pad_nd", "slice_backward", "select_backward"),
    *("zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "new_zeros", "zero_", "fill_", "fill", "roll"),
    *("new_full", "new_ones", "arange", "scalar_tensor", "flip", "tril", "triu", "copy", "_reshape_copy"),
)
_LOOKUPS = ("embedding", "index", "gather", "scatter", "take", "nll_loss", "one_hot", "bucketize")
_REDUCTIONS = ("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "prod", "any", "all")


@functools.cache
def kind_of(func: Any) -> KernelKind:
    packet, name = func.overloadpacket, func._schema.name.removeprefix("aten::")
    if packet in _PRODUCTS:
        return "product"
    if packet in _CONVOLUTIONS or "convolution" in name:
        return "convolution"
    if "attention" in name:
        return "attention"
    if "batch_norm" in name:
        return "batch_norm"
    if any(word in name for word in _NORMS):
        return "normalization"
    if name in _COPIES:
        return "copy"
    if name.startswith(_LOOKUPS):
        return "lookup"
    reduces = name.split("_")[0] in _REDUCTIONS or any(word in name for word in ("pool", "softmax", "logsumexp"))
    return "reduction" if reduces else "pointwise"


@functools.cache
def _scatters(func: Any) -> bool:
    name = func._schema.name
    return any(word in name for word in ("scatter", "index_put", "index_add", "dense_backward"))


def _reduces_rows(operation: TracedOperation) -> bool:
    """Return True if a reduction does not keep the rows of its operand apart, so that nothing after it can be fused."""
    given, made = max(operation.operands, key=Tensor.numel, default=None), next(iter(operation.results), None)
    if given is None or made is None or given.numel() == made.numel() or given.dim() < 2:
        return False
    return made.numel() != given.numel() // given.shape[-1]


#: Elementwise functions that are compute-bound on a CPU. Pooling is too.
_FUNCTIONS = ("gelu", "tanh", "sigmoid", "silu", "mish", "softplus", "erf", "exp", "log", "sin", "cos", "pow", "atan")


@functools.cache
def _times_longer(func: Any) -> float:
    """Return the compute time per entry, as a multiple of that of a function such as gelu; 0: memory-bound.

    Pooling visits its windows entry by entry: 3.3 ns each, where gelu takes 0.6 ns.
    """
    name = func._schema.name.removeprefix("aten::")
    if kind_of(func) not in ("pointwise", "reduction"):
        return 0.0
    return 5.0 if "pool" in name and "backward" not in name else float(name.startswith(_FUNCTIONS))


def _rearranges(operation: TracedOperation) -> bool:
    """Return True if a copy changes the memory layout, so that either its reads or its writes are not contiguous."""
    made = operation.results[0] if operation.results else None
    return made is not None and any(
        not given.is_contiguous()
        and given.numel() > 1
        and (given.shape != made.shape or given.stride() != made.stride())
        for given in operation.operands[-1 if operation.func._schema.name == "aten::copy_" else 0 :]
        if given.is_floating_point()
    )


# ---- arithmetic ----


def _arithmetic(kind: KernelKind, packet: Any, operation: TracedOperation) -> tuple[float, tuple[float, ...]]:
    if kind == "product":
        shape = _product_shape(packet, operation.args)
        return 2.0 * math.prod(shape), shape
    if kind == "attention":
        return _attention(operation)
    if kind == "convolution":
        x, weight = operation.args[:2]
        transposed = len(operation.args) > 6 and bool(operation.args[6])
        return _convolution(x, weight, operation.results[0], transposed)
    if kind in ("copy", "layout", "lookup"):
        return 0.0, ()
    if kind == "batch_norm":
        return _batch_norm(operation)
    entries = float(max((t.numel() for t in (*operation.results, *operation.operands)), default=0))
    times = _times_longer(operation.func)
    return entries, (entries * times,) if times else ()


def _product_shape(packet: Any, args: Sequence[Any]) -> tuple[float, ...]:
    """Return (batch, m, n, k) of a matrix product."""
    first = 1 if packet in (aten.addmm, aten.baddbmm, aten.addbmm, aten.addmv) else 0
    a, b = args[first], args[first + 1]
    n = b.shape[-1] if b.dim() > 1 else 1
    m = a.shape[-2] if a.dim() > 1 else 1
    return (a.shape[0] if a.dim() == 3 else 1, m, n, a.shape[-1])


def _attention(operation: TracedOperation) -> tuple[float, tuple[float, ...]]:
    """Return FLOPs and shape of fused attention: two products per query-key pair in forward, five in backward.

    The first product of backward repeats one of forward.
    """
    backward = "backward" in operation.func._schema.name
    query, key, value = operation.args[1:4] if backward else operation.args[:3]
    rows = query.shape[:-2].numel()
    causal = operation.args[7] if backward else operation.args[4] if len(operation.args) > 4 else False
    shape = (rows, query.shape[-2], key.shape[-2], query.shape[-1], float(causal is True))
    pairs = float(rows * query.shape[-2] * key.shape[-2])
    inner, outer = query.shape[-1], value.shape[-1]
    return pairs * (6 * inner + 4 * outer if backward else 2 * inner + 2 * outer), shape


def _convolution(x: Tensor, weight: Tensor, out: Tensor, transposed: bool) -> tuple[float, tuple[float, ...]]:
    """Return FLOPs and shape of a convolution as a matrix product.

    The shape is (groups, positions, output channels per group, kernel entries, input channels per group). Weights have
    the shape (out, in / groups, *kernel).
    """
    places = (x if transposed else out).shape
    positions = places[0] * places[2:].numel()
    groups = max(1, (out.shape[1] // weight.shape[1]) and x.shape[1] // weight.shape[1]) if not transposed else 1
    entries = weight.shape[1:].numel()
    return 2.0 * positions * weight.shape[0] * entries, (
        groups,
        positions,
        weight.shape[0] / groups,
        entries,
        weight.shape[1],
    )


def _batch_norm(operation: TracedOperation) -> tuple[float, tuple[float, ...]]:
    x = max(operation.operands, key=Tensor.numel)
    return float(x.numel()), (x.shape[0], x.shape[1] if x.dim() > 1 else 1)


def _convolution_back(operation: TracedOperation) -> list[Made]:
    """Return the two convolutions of backward: for the input's gradient, and for the weight's (and the bias's)."""
    gradient, x, weight = operation.args[:3]
    transposed, mask = bool(operation.args[7]), operation.args[10]
    flops, shape = _convolution(x, weight, gradient, transposed)
    found: list[Made] = []
    at = 0
    to_input = [0] if mask[0] else []
    at += len(to_input)
    to_weights = list(range(at, len(operation.results)))
    dtype = _dtype(operation)
    if to_input:
        found.append((to_input, KernelLaunch("convolution", flops, _bytes([gradient, weight, x]), shape, dtype)))
    if to_weights:
        found.append((to_weights, KernelLaunch("convolution", flops, _bytes([gradient, x, weight]), shape, dtype)))
    return found


def _recurrent(operation: TracedOperation, back: bool) -> list[Made]:
    """Return the kernels of one LSTM layer: products of the whole sequence, and small ones from step to step."""
    x, _, from_state = operation.args[:3]
    steps, samples, inner = x.shape
    gates, state = from_state.shape
    dtype, each = _dtype_name(from_state.dtype), from_state.element_size()

    def product(m: int, n: int, k: int) -> KernelLaunch:
        return KernelLaunch("product", 2.0 * m * n * k, float(each * (m * k + k * n + m * n)), (1, m, n, k), dtype)

    moved = float(each * samples * (2 * gates + 3 * state))
    stepping = [
        launch
        for _ in range(steps)
        for launch in (
            product(samples, state, gates) if back else product(samples, gates, state),
            KernelLaunch("pointwise", moved / each, moved, (), dtype),
        )
    ]
    rows = steps * samples
    whole = [product(rows, inner, gates), product(gates, inner, rows), product(gates, state, rows)]
    first, *others = whole if back else [product(rows, gates, inner)]
    return [(range(len(operation.results)), first), *(((), launch) for launch in (*others, *stepping))]


# ---- bytes ----


def _traffic(kind: KernelKind, operation: TracedOperation) -> float:
    if kind == "lookup" and operation.func.overloadpacket is aten.embedding:  # only the looked-up rows are read
        return _bytes([*operation.operands[1:], *operation.results, *operation.results])
    if operation.func._schema.name == "aten::copy_":
        return _bytes(operation.operands[:2])
    return _bytes([*operation.operands, *operation.results])


def _bytes(tensors: Sequence[Tensor]) -> float:
    return float(sum(tensor_bytes(tensor) for tensor in tensors))


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's entries; an expanded tensor has no more than its storage."""
    size = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else size


def _dtype(operation: TracedOperation) -> str:
    for tensor in (*operation.results, *operation.operands):
        if tensor.is_floating_point():
            return _dtype_name(tensor.dtype)
    return _dtype_name(operation.results[0].dtype) if operation.results else "float32"


_dtype_name: Callable[[torch.dtype], str] = functools.cache(lambda dtype: str(dtype).removeprefix("torch."))
