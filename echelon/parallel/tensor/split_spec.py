"""SplitSpec: the planned split of one module.

All specs of a model are made before the first one is applied, so that an error leaves the model unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from echelon.base.errors import UsageError
from echelon.distributed.tensor_layout import Layout, Range
from echelon.parallel.lora.layer import forward_beneath
from echelon.parallel.tensor.split_axis import SplitAxis
from echelon.strategy.annotations.marks import Split


class UnsplittableError(UsageError):
    """Raised if a module cannot be split; the message is a reason, and the caller puts the module's name before it."""


@dataclass(frozen=True)
class SplitSpec:
    """The planned split of one module.

    module:   the module, whose class is replaced
    kind:     class that is mixed into the module's class
    facts:    class attributes of the new class
    cuts:     this rank's ranges of each split parameter, by name and dimension
    partial:  names of whole parameters whose gradients are partial sums over the ranks
    """

    module: nn.Module
    kind: type[nn.Module]
    facts: Mapping[str, Any]
    cuts: Mapping[str, Mapping[int, tuple[Range, ...]]] = field(default_factory=dict)
    partial: tuple[str, ...] = ()

    def layouts(self) -> dict[str, Layout]:
        """Return the layouts of the split parameters, by name inside the module."""
        named = dict(self.module.named_parameters())
        return {
            name: Layout(tuple(named[name].shape), dict(parts)) for name, parts in self.cuts.items() if name in named
        }

    def change_class(self) -> None:
        kind = type(self.module)
        # A new class instead of a patched method: names, weights and deep copies keep working.
        self.module.__class__ = type(f"Split{kind.__name__}", (self.kind, kind), dict(self.facts))


def ranges_of(total: int, mark: Split, axis: SplitAxis, unit: int = 1) -> list[Range]:
    """Return every rank's range of ``total``, in multiples of ``unit``."""
    if mark.weights is not None and len(mark.weights) != axis.size:
        raise UnsplittableError(
            f"has split(weights=...) of {len(mark.weights)} numbers, but {axis.size} devices share it"
        )
    return [(begin * unit, end * unit) for begin, end in axis.ranges(total // unit, mark.weights)]


def part_widths(total: int, mark: Split) -> tuple[int, ...]:
    """Return the widths of the parts that a fused layer with ``total`` outputs computes; one without ``parts``."""
    if mark.parts is None:
        return (total,)
    if isinstance(mark.parts, int):
        if total % mark.parts:
            raise UnsplittableError(f"has {total} outputs, which are not {mark.parts} equal parts; list their sizes")
        return (total // mark.parts,) * mark.parts
    if sum(mark.parts) != total:
        raise UnsplittableError(f"has {total} outputs, but split(parts=...) lists {sum(mark.parts)}; list them all")
    return mark.parts


def widths(ranges: list[Range]) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in ranges)


def require_own_forward(module: nn.Module, kind: type[nn.Module]) -> None:
    """Raise UnsplittableError if the module overrides forward, because the split would replace its computation.

    A parametrized weight is rejected too.
    """
    if "forward" in module.__dict__ or forward_beneath(module) is not kind.forward:
        raise UnsplittableError(f"has a forward() of its own; only that of torch.nn.{kind.__name__} can be split")
    if "weight" not in module._parameters:
        raise UnsplittableError("has a parametrized weight; remove the parametrization")


def require_gather(mark: Split, what: str) -> None:
    if not mark.gather:
        raise UnsplittableError(f"has split(gather=False), but {what} has no part to hand on; leave gather out")


def refuse_sequence_of_spread(mark: Split, axis: SplitAxis) -> None:
    if axis.batch_per_rank and (mark.sequence or mark.how == "sequence"):
        raise UnsplittableError(
            "cuts the sequence, but replicate beside split gives each device a batch of its own; drop one of them"
        )
