"""Softmax cross-entropy over classes that are split over ranks, without gathering the logits.

A row's loss is ``a * log(sum(exp(z))) - b . z``, where a and b come from target, class weights and smoothing. Each rank
contributes its largest logit, the sum of exponentials relative to it, and its part of ``b . z``: one all-gather of
three numbers per row and rank, which every rank combines in the same way. Backward needs no communication, because
``a * softmax(z) - b`` is local; in spread mode the gradients of all rows are gathered first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from echelon.base.errors import DataError, UsageError
from echelon.distributed.collectives import all_gather
from echelon.parallel.tensor.mappings import own_rows
from echelon.parallel.tensor.pointwise_rules import Args, Named, named, rule
from echelon.parallel.tensor.pointwise_rules import Function as TorchFunction
from echelon.parallel.tensor.sharded_activation import ShardedActivation
from echelon.parallel.tensor.split_axis import SplitAxis
from echelon.parallel.tensor.split_collectives import gather, own

_NAMES = ["input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"]


@rule(["cross_entropy"])
def cross_entropy(name: str, func: TorchFunction, args: Args, kwargs: Named) -> Any:
    """Compute ``torch.nn.functional.cross_entropy`` of logits split over classes.

    The result is NotImplemented in cases that need the whole logits.
    """
    given = named(_NAMES, args, kwargs)
    logits, target = given["input"], given["target"]
    unusual = given.get("size_average") is not None or given.get("reduce") is not None
    if not isinstance(logits, ShardedActivation) or not isinstance(target, Tensor) or unusual:
        return NotImplemented
    classes = 0 if logits.dim() == 1 else 1
    shape = tuple(size for dim, size in enumerate(logits.shape) if dim != classes)
    if logits.along != classes or target.is_floating_point() or tuple(target.shape) != shape:
        return NotImplemented
    options = _Options(
        given.get("weight"),
        given.get("ignore_index", -100),
        given.get("reduction", "mean"),
        given.get("label_smoothing", 0.0),
    )
    return _loss(logits, target, options)


class _Options(NamedTuple):
    weight: Tensor | None
    ignore_index: int
    reduction: str
    smoothing: float


def _loss(logits: ShardedActivation, target: Tensor, options: _Options) -> Tensor:
    axis, classes = logits.axis, logits.shape[logits.along]
    _check(target, classes, options.ignore_index)
    everyones = target if logits.rows is None else gather(target, 0, logits.rows, axis)
    rows = logits.local.movedim(logits.along, -1).flatten(0, -2) if logits.dim() > 1 else logits.local[None]
    counted = everyones.flatten() != options.ignore_index
    values: Tensor = _RowLosses.apply(rows, everyones.flatten().where(counted, 0), counted, options, logits)  # type: ignore[no-untyped-call]
    values = values.view(everyones.shape)
    if logits.rows is not None:
        values = own_rows(values, logits.rows, axis)
    if not torch.is_autocast_enabled(logits.device.type):
        values = values.to(logits.dtype)
    return _reduced(values, target, options)


def _reduced(values: Tensor, target: Tensor, options: _Options) -> Tensor:
    if options.reduction == "none":
        return values
    if options.reduction == "sum":
        return values.sum()
    if options.reduction != "mean":
        raise UsageError(f"cross_entropy(reduction={options.reduction!r}): expected 'mean', 'sum' or 'none'")
    counted = target != options.ignore_index
    if options.weight is None:
        return values.sum() / counted.sum()
    return values.sum() / (options.weight[target.where(counted, 0)] * counted).sum()


def _check(target: Tensor, classes: int, ignore_index: int) -> None:
    """Raise DataError if a target is not a valid class: no rank would hold it, and the loss would be silently wrong."""
    bad = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if target.is_cuda:
        torch._assert_async(~bad.any())  # does not wait for the device, like torch's own check
    elif bad.any():
        raise DataError(f"cross_entropy: target {int(target[bad][0])} is not one of the {classes} classes")


class _RowLosses(Function):
    """The loss of each row, from this rank's columns ``z`` and the sums of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, target: Tensor, counted: Tensor, options: _Options, logits: ShardedActivation
    ) -> Tensor:
        axis, begin = logits.axis, sum(logits.sizes[: logits.axis.rank])
        exact = z.to(torch.promote_types(z.dtype, torch.float32))
        here = (target >= begin) & (target < begin + z.shape[1])
        column = (target - begin).where(here, 0)
        a, picked, spread_out = _coefficients(target, counted, options, logits, exact.dtype)
        b_z = exact.new_zeros(len(target))
        if z.shape[1]:
            b_z = torch.where(here, picked * exact.gather(1, column[:, None])[:, 0], 0.0)
        if spread_out is not None:
            b_z = b_z + counted * (exact @ spread_out)
        log_sum, b_z = _everyones(exact, b_z, axis)
        ctx.save_for_backward(z, log_sum, a, picked * here, column, counted)
        ctx.spread_out = spread_out
        return torch.where(counted, a * log_sum - b_z, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, log_sum, a, picked, column, counted = ctx.saved_tensors
        grad = torch.where(counted, grad, 0.0)  # an ignored row has no gradient, even if its logits are not finite
        dz = torch.exp(z.to(log_sum.dtype) - log_sum[:, None]).mul_((grad * a)[:, None])
        if z.shape[1]:
            dz.scatter_add_(1, column[:, None], -(grad * picked)[:, None])
        if ctx.spread_out is not None:
            dz.addr_(grad, ctx.spread_out, alpha=-1)
        return dz.to(z.dtype), None, None, None, None


def _coefficients(
    target: Tensor, counted: Tensor, options: _Options, logits: ShardedActivation, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ``a``, and ``b`` as two parts: of the target's class, and of every class on this rank (or None).

    The second part of ``b`` exists only with label smoothing.
    """
    classes, smoothing = logits.shape[logits.along], options.smoothing
    weight = target.new_ones(classes, dtype=dtype) if options.weight is None else options.weight.detach().to(dtype)
    picked = (1 - smoothing) * weight[target] * counted
    if smoothing == 0:
        return picked, picked, None
    a = picked + counted * (smoothing / classes * weight.sum())
    return a, picked, smoothing / classes * own(weight, 0, logits.sizes, logits.axis)


def _everyones(z: Tensor, b_z: Tensor, axis: SplitAxis) -> tuple[Tensor, Tensor]:
    """Return log(sum(exp(z))) over all ranks' columns, and the sum of ``b_z``, with one collective."""
    low = torch.finfo(z.dtype).min  # not -inf, because -inf minus -inf is NaN
    top = z.amax(1).clamp_min(low) if z.shape[1] else b_z.new_full(b_z.shape, low)
    exponentials = torch.exp(z - top[:, None]).sum(1)
    if axis.group is None:
        return top + torch.log(exponentials), b_z
    tops, sums, parts = all_gather(torch.stack([top, exponentials, b_z]), axis.group).unbind(1)
    highest = tops.amax(0)
    return highest + torch.log((sums * torch.exp(tops - highest)).sum(0)), parts.sum(0)
