"""Rules for changes of shape after which a ShardedActivation is still split along one dimension."""

from __future__ import annotations

import math
from typing import Any

from echelon.base.errors import UsageError
from echelon.parallel.tensor.pointwise_rules import Args, Function, Named, named, rule
from echelon.parallel.tensor.sharded_activation import ShardedActivation
from echelon.parallel.tensor.split_axis import Sizes


@rule(["view", "reshape"])
def reshape(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    x, *wanted = args
    wanted = wanted or [kwargs.get("shape", kwargs.get("size"))]
    if len(wanted) == 1 and isinstance(wanted[0], tuple | list):
        wanted = list(wanted[0])
    if not isinstance(x, ShardedActivation) or not wanted or not all(isinstance(size, int) for size in wanted):
        return NotImplemented  # view(dtype)
    return _reshaped(x, wanted)


@rule(["flatten"])
def flatten(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    x = args[0]
    given = named(["start_dim", "end_dim"], args[1:], kwargs)
    first, last = given.get("start_dim", 0), given.get("end_dim", -1)
    if not isinstance(x, ShardedActivation) or not isinstance(first, int) or not isinstance(last, int):
        return NotImplemented
    first, end = first % x.dim(), last % x.dim() + 1
    return _reshaped(x, [*x.shape[:first], math.prod(x.shape[first:end]), *x.shape[end:]])


@rule(["unflatten"])
def unflatten(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    given = named(["dim", "sizes"], args[1:], kwargs)
    x, dim, sizes = args[0], given.get("dim"), given.get("sizes")
    if not isinstance(x, ShardedActivation) or not isinstance(dim, int) or sizes is None:
        return NotImplemented
    dim, sizes = dim % x.dim(), list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.shape[dim] // -math.prod(sizes)
    return _reshaped(x, [*x.shape[:dim], *sizes, *x.shape[dim + 1 :]])


def _reshaped(x: ShardedActivation, wanted: list[int]) -> Any:
    """Return the reshaped ShardedActivation, or NotImplemented if no new dimension can be split in the same way."""
    if -1 in wanted:
        rest = -math.prod(wanted)
        wanted = [(x.numel() // rest if rest else 0) if size == -1 else size for size in wanted]
    if math.prod(wanted) != x.numel():
        return NotImplemented  # torch raises its own error on the whole tensor
    found = _new_cut(x, wanted)
    if found is None:
        return NotImplemented
    along, sizes = found
    rows, shape = x.rows, list(wanted)
    shape[along] = sizes[x.axis.rank]
    if rows is not None:
        local = rows[x.axis.rank]
        if local == 0:
            raise UsageError("split beside replicate: a device without rows cannot change the shape of its activations")
        if wanted[0] % local:
            return NotImplemented
        rows = tuple(size * wanted[0] // local for size in rows)
        shape[0] = sum(rows)
    return ShardedActivation(x.local.reshape(shape), along, sizes, x.axis, rows)


def _new_cut(x: ShardedActivation, wanted: list[int]) -> tuple[int, Sizes] | None:
    """Return the split dimension of the new shape and every rank's size along it; None if there is none.

    The split dimension may be kept, merged with the dimensions after it, or divided. If it is divided, the first of the
    new dimensions is split, and every rank's part must be a whole number of its entries (such as heads).
    """
    width, before = x.shape[x.along], math.prod(x.shape[: x.along])
    least = 0 if x.rows is None else 1
    fitting = [dim for dim in range(least, len(wanted)) if math.prod(wanted[:dim]) == before]
    fitting.sort(key=lambda dim: (wanted[dim] != width, wanted[dim] == 1))
    for dim in fitting:
        if width and all(size * wanted[dim] % width == 0 for size in x.sizes):
            return dim, tuple(size * wanted[dim] // width for size in x.sizes)
    return None


@rule(["transpose", "swapaxes", "swapdims"])
def transpose(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    given = named(["dim0", "dim1"], args[1:], kwargs)
    x, a, b = args[0], given.get("dim0"), given.get("dim1")
    if not isinstance(x, ShardedActivation) or not isinstance(a, int) or not isinstance(b, int):
        return NotImplemented
    order = list(range(x.dim()))
    order[a], order[b] = order[b], order[a]
    return _permuted(x, order)


@rule(["permute"])
def permute(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    x, *order = args
    order = order or [kwargs.get("dims")]
    if len(order) == 1 and isinstance(order[0], tuple | list):
        order = list(order[0])
    if not isinstance(x, ShardedActivation) or len(order) != x.dim() or not all(isinstance(dim, int) for dim in order):
        return NotImplemented
    return _permuted(x, [dim % x.dim() for dim in order])


def _permuted(x: ShardedActivation, order: list[int]) -> Any:
    if x.rows is not None and order[0] != 0:
        return NotImplemented
    return x.like(x.local.permute(order), order.index(x.along))


@rule(["unsqueeze"])
def unsqueeze(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    x, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(x, ShardedActivation) or not isinstance(dim, int):
        return NotImplemented
    dim %= x.dim() + 1
    if x.rows is not None and dim == 0:
        return NotImplemented
    return x.like(x.local.unsqueeze(dim), x.along + (dim <= x.along))


@rule(["__getitem__"])
def index(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    """Index dimensions other than the split one with ints and slices, and insert dimensions with None."""
    x, key = args
    keys = list(key) if isinstance(key, tuple) else [key]
    if not isinstance(x, ShardedActivation) or not all(
        each is Ellipsis or each is None or isinstance(each, slice | int) for each in keys
    ):
        return NotImplemented
    if any(isinstance(each, bool) for each in keys) or keys.count(Ellipsis) > 1:
        return NotImplemented
    at = keys.index(Ellipsis) if Ellipsis in keys else len(keys)
    missing = x.dim() - (len(keys) - keys.count(Ellipsis) - keys.count(None))
    if missing < 0:
        return NotImplemented
    keys[at : at + 1] = [slice(None)] * missing
    places = [place for place, each in enumerate(keys) if each is not None]  # of the dimensions of x
    held = [x.along] if x.rows is None else [x.along, 0]
    if any(keys[places[dim]] != slice(None) for dim in held) or (x.rows is not None and keys[0] is None):
        return NotImplemented
    before = keys[: places[x.along]]
    return x.like(x.local[tuple(keys)], sum(not isinstance(each, int) for each in before))


@rule(["expand", "broadcast_to"])
def expand(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    """Repeat dimensions of size 1, such as the key heads that several query heads share, without a copy."""
    x, *wanted = args
    wanted = wanted or [kwargs.get("size")]
    if len(wanted) == 1 and isinstance(wanted[0], tuple | list):
        wanted = list(wanted[0])
    if not isinstance(x, ShardedActivation) or not all(isinstance(size, int) for size in wanted) or kwargs.get("out"):
        return NotImplemented
    along = x.along + len(wanted) - x.dim()
    if along < x.along or wanted[along] not in (-1, x.shape[x.along]) or (x.rows is not None and along != x.along):
        return NotImplemented
    if x.rows is not None and wanted[0] not in (-1, x.shape[0]):
        return NotImplemented
    local = [-1 if dim == along or (dim == 0 and x.rows is not None) else size for dim, size in enumerate(wanted)]
    return x.like(x.local.expand(local), along)


@rule(["repeat_interleave"])
def repeat_interleave(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    given = named(["repeats", "dim"], args[1:], kwargs)
    x, repeats, dim = args[0], given.get("repeats"), given.get("dim")
    if not isinstance(x, ShardedActivation) or not isinstance(repeats, int) or not isinstance(dim, int):
        return NotImplemented
    dim %= x.dim()
    if x.rows is not None and dim == 0:
        return NotImplemented
    sizes = tuple(size * repeats for size in x.sizes) if dim == x.along else x.sizes
    return ShardedActivation(x.local.repeat_interleave(repeats, dim), x.along, sizes, x.axis, x.rows)


@rule(["chunk", "split", "unbind"])
def parts_along(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    """Divide along a dimension other than the split one: for example into query, key and value of each head."""
    given = named(["dim"] if name == "unbind" else ["pieces", "dim"], args[1:], kwargs)
    x, dim = args[0], given.get("dim", 0)
    if not isinstance(x, ShardedActivation) or not isinstance(dim, int):
        return NotImplemented
    dim %= x.dim()
    if dim == x.along or (x.rows is not None and dim == 0):
        return NotImplemented
    dropped = name == "unbind" and dim < x.along
    return tuple(x.like(part, x.along - dropped) for part in func(x.local, *args[1:], **kwargs))
