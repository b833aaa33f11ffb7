"""Finds what a loss averages over, from its autograd graph.

Replicas, merged passes and micro-batches each compute the mean over their own samples. The mean over all of them
equals that of one process only if each is weighted by its count: rows, targets that are not ignored, class weights, the
sum of a mask. The last operations of the loss save that number for their own backward, so reading it takes about a
microsecond and needs no option from the user.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["mean", "sum", "weights", "unknown"]
Count = Tensor | float

#: ``reduction`` of torch's loss functions, as their backward nodes save it.
_MEAN, _SUM = 1, 2
#: Operations that change neither the kind of a reduction nor the number of its entries.
_TRANSPARENT = {
    *("ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0", "SqueezeBackward0", "SqueezeBackward1"),
    *("UnsqueezeBackward0", "ToCopyBackward0", "CloneBackward0", "AliasBackward0", "NegBackward0", "MulBackward1"),
    *("ExpandBackward0", "RsubBackward1"),
}
_PRODUCTS = {"MulBackward0", "MulBackward1"}
_QUOTIENTS = {"DivBackward0", "DivBackward1"}
_ADDITIONS = {"AddBackward0", "AddBackward1", "SubBackward0", "SubBackward1"}
_NLL = {"NllLossBackward0", "NllLoss2DBackward0"}
_MEANS = {"MeanBackward0", "MeanBackward1"}
_SUMS = {"SumBackward0", "SumBackward1"}
_STACKS = {"StackBackward0", "CatBackward0"}
_LEAF = "torch::autograd::AccumulateGrad"
#: Operations that may occur between weights and a penalty on them.
_OF_WEIGHTS = {
    *("PowBackward0", "AbsBackward0", "SqrtBackward0", "NormBackward0", "LinalgVectorNormBackward0", "TBackward0"),
    *("ExpBackward0", "LogBackward0", "SelectBackward0", "SoftplusBackward0", "SigmoidBackward0"),
    *(*_TRANSPARENT, *_ADDITIONS, *_PRODUCTS, *_QUOTIENTS, *_SUMS, *_MEANS, *_STACKS),
}
_DEEPEST = 64  #: nodes visited before a loss counts as unknown


@dataclass(frozen=True)
class LossTerm:
    """One of the scalars that add up to a loss.

    count: number of entries that a mean averages over; default 1
    route: input indices on the way from the loss's own node to the reducing node
    total: number of entries including ignored ones; None if unknown
    size:  number of all entries of a mean over rows, including padding; None if unknown
    """

    kind: Kind
    node: str
    count: Count = 1.0
    route: tuple[int, ...] = ()
    total: float | None = None
    size: float | None = None


def find_terms(loss: Tensor, rows: float | None) -> list[LossTerm]:
    """Return the terms of a loss.

    rows: samples in the batch; None if unknown
    """
    if loss.grad_fn is None:
        return []
    return list(_walk(loss.grad_fn, rows, (), _DEEPEST))


def depends_on_shape(term: LossTerm) -> bool:
    """Return True if a mean goes over all entries of a tensor, so that its count depends on the shape only."""
    return term.node not in _NLL and term.node not in _QUOTIENTS


def read_count(loss: Tensor, term: LossTerm, rows: float | None) -> Count | None:
    """Return the count of the same term of a later loss; None if the graph of that loss is different."""
    node: Any = loss.grad_fn
    try:
        for at in term.route:
            node = node.next_functions[at][0]
        name = node.name()
    except (AttributeError, IndexError):
        return None
    if name != term.node:
        return None
    if name in _NLL:
        return number_of(node._saved_total_weight)
    if name in _QUOTIENTS:
        return number_of(node._saved_other)
    if name in _PRODUCTS:
        return _divisor_of_product(node, name)
    return _entries(node._saved_self_sym_sizes if name in _MEANS else node._saved_self.shape, rows)


def _walk(node: Any, rows: float | None, route: tuple[int, ...], deepest: int) -> Iterator[LossTerm]:
    name = node.name()
    if name in _NLL:
        yield _of_nll(node, name, route)
    elif name in _MEANS or name in _SUMS:
        yield from _of_reduction(node, name, rows, route, deepest)
    elif name in _QUOTIENTS or _divisor_of_product(node, name) is not None:
        yield from _of_quotient(node, name, rows, route, deepest)
    elif hasattr(node, "_saved_reduction") and hasattr(node, "_saved_self"):
        yield _of_loss_function(node, name, rows, route)
    elif name in _ADDITIONS or name in _TRANSPARENT or (name in _PRODUCTS and _scales(node)):
        inputs = [(at, child) for at, (child, _) in enumerate(node.next_functions) if child is not None]
        if name in _PRODUCTS and len(inputs) > 1:
            inputs = [(at, child) for at, child in inputs if not _is_penalty(child)]
        for at, child in inputs:
            if deepest <= 0:
                yield LossTerm("unknown", name, route=route)
                return
            yield from _walk(child, rows, (*route, at), deepest - len(inputs))
    else:
        yield LossTerm("weights" if _is_penalty(node) else "unknown", name, route=route)


def _of_nll(node: Any, name: str, route: tuple[int, ...]) -> LossTerm:
    kind: Kind = {_MEAN: "mean", _SUM: "sum"}.get(node._saved_reduction, "unknown")  # type: ignore[assignment]
    total = float(node._saved_target.numel())
    return LossTerm(kind, name, number_of(node._saved_total_weight) if kind == "mean" else 1.0, route, total)


def _of_loss_function(node: Any, name: str, rows: float | None, route: tuple[int, ...]) -> LossTerm:
    shape = node._saved_self.shape
    if node._saved_reduction == _SUM:
        return LossTerm("sum" if _has_rows(shape, rows) else "unknown", name, 1.0, route)
    kind: Kind = "mean" if node._saved_reduction == _MEAN else "unknown"
    return LossTerm(kind, name, _entries(shape, rows), route, size=float(math.prod(shape)))


def _of_reduction(node: Any, name: str, rows: float | None, route: tuple[int, ...], deepest: int) -> Iterator[LossTerm]:
    shape = tuple(node._saved_self_sym_sizes)
    child = node.next_functions[0][0]
    if child is not None and child.name() in _STACKS and shape == (len(child.next_functions),) and shape[0] != rows:
        for at, (part, _) in enumerate(child.next_functions):  # a stack of scalars
            if part is not None and deepest > 0:
                yield from _walk(part, rows, (*route, 0, at), deepest - shape[0])
    elif name in _MEANS:
        kind: Kind = "weights" if _is_penalty(node) else "mean"
        yield LossTerm(kind, name, _entries(shape, rows), route, size=float(math.prod(shape)))
    elif _is_penalty(node):
        yield LossTerm("weights", name, route=route)
    else:
        yield LossTerm("sum" if _has_rows(shape, rows) else "unknown", name, 1.0, route)


def _of_quotient(node: Any, name: str, rows: float | None, route: tuple[int, ...], deepest: int) -> Iterator[LossTerm]:
    """Yield the terms of a division: a sum divided by a count is a mean, any other division only scales."""
    divisor = node._saved_other if name in _QUOTIENTS else _divisor_of_product(node, name)
    child, others = node.next_functions[0][0], node.next_functions[1:]
    if child is None or any(each for each, _ in others) or deepest <= 0 or _is_vector(divisor):
        yield LossTerm("unknown", name, route=route)
        return
    inner = list(_walk(child, rows, (*route, 0), deepest - 1))
    ends = [_follow(child, term.route[len(route) + 1 :]) for term in inner]
    if inner and all(_divides_sum(divisor, end, rows, name in _QUOTIENTS) for end in ends):
        yield LossTerm("mean", name, number_of(divisor), route)
    elif len(inner) == rows and divisor == rows and all(term.kind == "mean" for term in inner):
        yield LossTerm("mean", name, float(rows), route)  # the terms are one mean per row
    else:
        yield from inner


def _divisor_of_product(node: Any, name: str) -> float | None:
    """Return n for a product with the plain number 1/n, if n is an integer."""
    factor = getattr(node, "_saved_other", None) if name in _PRODUCTS else None
    if factor is None or not _is_plain_number(factor):
        return None
    value = float(factor)
    near = round(1 / value) if 0 < value < 1 else 0
    return float(near) if near > 1 and abs(near * value - 1) < 1e-9 else None


def _follow(node: Any, route: tuple[int, ...]) -> Any:
    for at in route:
        node = node.next_functions[at][0]
    return node


def _is_vector(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() != 1


def _divides_sum(divisor: Any, node: Any, rows: float | None, may_be_part: bool) -> bool:
    """Return True if ``node`` is a sum over entries and the divisor is the number of entries that count.

    may_be_part: True if a plain number may be the count of some entries; else it must be the count of all
    """
    name = node.name()
    if name in _NLL and node._saved_reduction == _SUM:
        return float(divisor) == float(node._saved_total_weight)  # any other number is a global count or a constant
    if name in _SUMS:
        return _is_count(divisor, tuple(node._saved_self_sym_sizes), rows, may_be_part)
    is_sum = getattr(node, "_saved_reduction", None) == _SUM
    return is_sum and _is_count(divisor, tuple(node._saved_self.shape), rows, may_be_part)


def _is_count(divisor: Any, shape: Sequence[int], rows: float | None, may_be_part: bool) -> bool:
    """Return True if ``divisor`` of a sum over entries of this shape is the number of entries that count.

    A tensor is taken for a count. A plain number is taken for a count only if it can be one: with a constant divisor,
    which is the same for half a batch, one process computes the sum of the two halves.
    """
    if not _is_plain_number(divisor):
        return True
    value, entries = float(divisor), math.prod(shape)
    if value in (rows, entries) or any(value == math.prod(shape[:k]) for k in range(1, len(shape))):
        return True
    of_one_row = any(value == math.prod(shape[k:]) for k in range(1, len(shape)))
    return may_be_part and value.is_integer() and 1 < value < entries and not of_one_row


def _is_plain_number(value: Any) -> bool:
    """Return True for a Python number, which torch wraps as a tensor that does not take part in type promotion."""
    if not isinstance(value, Tensor):
        return True
    narrow = {torch.int64: torch.int32, torch.float64: torch.float32}.get(value.dtype)
    if narrow is None or value.dim() or value.device.type != "cpu":
        return False
    return torch.result_type(value, torch.zeros((), dtype=narrow)) == narrow


def _entries(shape: Sequence[int], rows: float | None) -> float:
    if shape and (rows is None or shape[0] == rows):
        return float(shape[0])
    return float(math.prod(shape))


def _has_rows(shape: Sequence[int], rows: float | None) -> bool:
    return bool(shape) and (rows is None or (rows > 0 and (shape[0] == rows or math.prod(shape) % rows == 0)))


def _scales(node: Any) -> bool:
    """Return True if a product is one term times a plain number, or times a scalar computed from weights only."""
    inputs = [child for child, _ in node.next_functions if child is not None]
    if len(inputs) == 1:
        other = getattr(node, "_saved_other", None)
        other = getattr(node, "_saved_self", None) if other is None else other
        return not isinstance(other, Tensor) or other.numel() == 1
    return sum(not _is_penalty(child) for child in inputs) == 1


def _is_penalty(node: Any) -> bool:
    """Return True if a term is computed from weights only, so that its value is the same on every rank."""
    left, seen = [node], 0
    while left:
        each, seen = left.pop(), seen + 1
        if each.name() == _LEAF:
            continue
        if seen > 16 * _DEEPEST or each.name() not in _OF_WEIGHTS or _takes_data(each):
            return False
        left += [child for child, _ in each.next_functions if child is not None]
    return True


def _takes_data(node: Any) -> bool:
    """Return True if an operand is a tensor without a gradient, most likely from the batch."""
    if node.name() not in _PRODUCTS:
        return False
    operands = (getattr(node, "_saved_other", None), getattr(node, "_saved_self", None))
    has_one_input = sum(child is not None for child, _ in node.next_functions) == 1
    return has_one_input and any(isinstance(each, Tensor) and each.dim() > 0 for each in operands)


def times_count(loss: Tensor, count: Count) -> Tensor:
    """Return the detached loss times its count; zero if the count is zero, where the mean is NaN."""
    loss = loss.detach()
    if isinstance(count, Tensor):
        return torch.where(count > 0, loss * count, 0.0)
    return loss * count if count else torch.zeros_like(loss)


def number_of(value: Any) -> Count:
    """Return a count as a number if it is on the CPU, else as a tensor on its device, which is not waited for."""
    if not isinstance(value, Tensor):
        return float(value)
    value = value.detach()
    return float(value.item()) if value.device.type == "cpu" else value.reshape(())
