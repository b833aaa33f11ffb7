"""Rules for functions that run on the parts of a ShardedActivation: pointwise, or along other dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from echelon.parallel.tensor.lazy_activation import LazyActivation, Rule
from echelon.parallel.tensor.mappings import scatter_to_split, used_in_parts
from echelon.parallel.tensor.rng import rank_local_rng
from echelon.parallel.tensor.sharded_activation import RULES, ShardedActivation

Function = Callable[..., Any]
Args = tuple[Any, ...]
Named = dict[str, Any]


def named(names: list[str], args: Args, kwargs: Named) -> Named:
    """Return the arguments of a call by name."""
    return dict(zip(names, args, strict=False)) | kwargs


def _words(text: str) -> list[str]:
    return text.split()


POINTWISE = _words("""
relu relu6 leaky_relu elu selu celu gelu silu mish softplus softsign tanh sigmoid hardtanh hardswish hardsigmoid
logsigmoid log_sigmoid tanhshrink softshrink hardshrink exp exp2 expm1 log log2 log1p sqrt rsqrt square abs neg negative
positive sign reciprocal erf erfc sin cos tan atan sinh cosh pow float_power add sub subtract rsub mul multiply div
divide true_divide floor_divide remainder fmod maximum minimum where clamp clip clamp_min clamp_max masked_fill lerp
addcmul addcdiv isnan isfinite isinf nan_to_num eq ne lt le gt ge logical_and logical_or logical_xor logical_not
bitwise_and bitwise_or bitwise_xor bitwise_not round floor ceil trunc clone detach contiguous zeros_like ones_like
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __rfloordiv__ __mod__ __rmod__
__pow__ __rpow__ __and__ __or__ __xor__ __invert__ __neg__ __pos__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
__rdiv__ __div__
""")
RANDOM = ["dropout", "alpha_dropout"]
CASTS = ["float", "half", "bfloat16", "double", "to", "type", "type_as"]
SOFTMAX = ["softmax", "log_softmax", "_softmax"]
NORMS = ["layer_norm", "rms_norm"]
SUMS = ["sum", "mean", "amax", "amin"]
POOLS = ["max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d"]


def rule(names: list[str]) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule for torch functions of these names."""

    def register(made: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, made))
        return made

    return register


@rule([*POINTWISE, *(f"{name}_" for name in POINTWISE if not name.startswith("_"))])
def pointwise(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    leaves, structure = pytree.tree_flatten((args, kwargs), is_leaf=_is_spread)
    lead = _lead(leaves)
    if lead is None or (name.endswith("_") and not name.endswith("__") and args[0] is not lead):
        return NotImplemented
    parts = [_part_for(leaf, lead) for leaf in leaves]
    if any(part is NotImplemented for part in parts):
        return NotImplemented
    local_args, local_kwargs = pytree.tree_unflatten(parts, structure)
    return _on_part(lead, lambda: func(*local_args, **local_kwargs))


def _is_spread(leaf: Any) -> bool:
    return isinstance(leaf, LazyActivation)


def _lead(leaves: list[Any]) -> ShardedActivation | None:
    """Return the ShardedActivation that has the shape of the result; None if all of them are broadcast."""
    spreads = [leaf for leaf in leaves if isinstance(leaf, ShardedActivation)]
    shapes = [leaf.shape for leaf in leaves if isinstance(leaf, LazyActivation | Tensor)]
    try:
        result = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None  # torch raises its own error on the whole tensors
    return next((spread for spread in spreads if spread.shape == result), None)


def _part_for(leaf: Any, lead: ShardedActivation) -> Any:
    """Return the part of ``leaf`` that is combined with this rank's part of ``lead``; NotImplemented if none is."""
    if isinstance(leaf, ShardedActivation):
        if leaf.cut_like(lead):
            return leaf.local
        leaf = leaf.whole()
    elif isinstance(leaf, LazyActivation):
        leaf = leaf.whole()
    if not isinstance(leaf, Tensor):
        return leaf
    at = lead.along - (lead.dim() - leaf.dim())
    stretched = at < 0 or leaf.shape[at] == 1 != lead.shape[lead.along]
    if lead.rows is not None:
        return _parameter_part(leaf, lead, None if stretched else at)
    if stretched:
        return used_in_parts(leaf, lead.axis) if leaf.requires_grad else leaf
    return scatter_to_split(leaf, at, lead.sizes, None, lead.axis)


def _parameter_part(leaf: Tensor, lead: ShardedActivation, at: int | None) -> Any:
    """Return the part of a parameter in spread mode; NotImplemented for other tensors.

    ``lead`` has the rows of all ranks, so it may be combined only with tensors that are equal on all ranks: parameters.
    The gradient on each rank is then a partial one, as for all parameters outside split layers.
    """
    if not isinstance(leaf, nn.Parameter) or (leaf.dim() == lead.dim() and leaf.shape[0] != 1):
        return NotImplemented
    return leaf if at is None else leaf.narrow(at, sum(lead.sizes[: lead.axis.rank]), lead.sizes[lead.axis.rank])


def _on_part(lead: ShardedActivation, compute: Callable[[], Any]) -> Any:
    before = _version(lead.local)
    result = compute()
    if _version(lead.local) != before:
        lead.changed()
    return lead.like(result) if isinstance(result, Tensor) else result


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


@rule(RANDOM)
def random(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    """Apply dropout with a rank's own random numbers, because each rank has a different part of the mask."""
    x, *rest = args
    if not _is_spread(x):
        return NotImplemented
    training = kwargs.get("training", rest[1] if len(rest) > 1 else True)
    with rank_local_rng(x.axis, x.device, wanted=bool(training)):
        return _on_part(x, lambda: func(x.local, *rest, **kwargs))


@rule(CASTS)
def cast(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    x = args[0]
    if not _is_spread(x):
        return NotImplemented
    rest = [leaf.local if _is_spread(leaf) else leaf for leaf in args[1:]]
    return _on_part(x, lambda: func(x.local, *rest, **kwargs))


def _free(x: ShardedActivation, dims: list[int]) -> bool:
    """Return True if each rank has all of ``x`` along ``dims``.

    In spread mode the result is False for dimension 0, because it holds the rows of several batches.
    """
    dims = [dim % x.dim() for dim in dims]
    return x.along not in dims and (x.rows is None or 0 not in dims)


@rule(SOFTMAX)
def softmax(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    x = args[0] if args else kwargs.get("input")
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(x, ShardedActivation) or not args or not isinstance(dim, int) or not _free(x, [dim]):
        return NotImplemented
    return x.like(func(x.local, *args[1:], **kwargs))


@rule(NORMS)
def norm(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    x, shape = args[0], args[1] if len(args) > 1 else kwargs["normalized_shape"]
    if not isinstance(x, ShardedActivation) or not _free(x, list(range(x.dim() - len(shape), x.dim()))):
        return NotImplemented
    # Each rank has a part of the positions, so the gradients of the weights are summed over ranks.
    args, kwargs = pytree.tree_map_only(Tensor, lambda p: p if x.rows else used_in_parts(p, x.axis), (args[1:], kwargs))
    return x.like(func(x.local, *args, **kwargs))


@rule(SUMS)
def reduction(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    x, dims = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(x, ShardedActivation) or not dims or not _free(x, list(dims)):
        return NotImplemented
    result = func(x.local, *args[1:], **kwargs)
    dropped = sum(dim % x.dim() < x.along for dim in dims) if result.dim() < x.dim() else 0
    return x.like(result, x.along - dropped)


@rule(POOLS)
def pool(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    """Pool the channels of this rank."""
    x = args[0]
    if not isinstance(x, ShardedActivation) or x.dim() != 4 or x.along != 1 or kwargs.get("return_indices"):
        return NotImplemented
    return x.like(func(x.local, *args[1:], **kwargs))
