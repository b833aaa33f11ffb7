"""Piece: what is to become of one module. Pieces are made first and cut afterwards, so that a refusal leaves the model
as it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from echelon.base.errors import UsageError
from echelon.distributed.tensor_layout import Layout, Range
from echelon.parallel.tensor.split_axis import SplitAxis
from echelon.strategy.annotations.marks import Split


class UnsplittableError(UsageError):
    """Why a module cannot be split; whoever knows its name puts that in front."""


@dataclass(frozen=True)
class SplitSpec:
    """``module`` becomes a ``kind`` with ``facts`` on its class; its parameters are cut.

    ``partial`` names whole parameters whose gradients every rank has a part of.
    """

    module: nn.Module
    kind: type[nn.Module]
    facts: Mapping[str, Any]
    cuts: Mapping[str, Mapping[int, tuple[Range, ...]]] = field(default_factory=dict)
    partial: tuple[str, ...] = ()

    def layouts(self) -> dict[str, Layout]:
        """By the parameter's name inside the module."""
        named = dict(self.module.named_parameters())
        return {
            name: Layout(tuple(named[name].shape), dict(parts)) for name, parts in self.cuts.items() if name in named
        }

    def change_class(self) -> None:
        kind = type(self.module)
        # A class of its own rather than a patched method: names, weights and deep copies stay what they are.
        self.module.__class__ = type(f"Split{kind.__name__}", (self.kind, kind), dict(self.facts))


def ranges_of(total: int, mark: Split, axis: SplitAxis, unit: int = 1) -> list[Range]:
    """Every rank's part of ``total``, in whole ``unit``s."""
    if mark.weights is not None and len(mark.weights) != axis.size:
        raise UnsplittableError(
            f"has split(weights=...) of {len(mark.weights)} numbers, but {axis.size} devices share it"
        )
    return [(begin * unit, end * unit) for begin, end in axis.ranges(total // unit, mark.weights)]


def widths(ranges: list[Range]) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in ranges)


def require_own_forward(module: nn.Module, kind: type[nn.Module]) -> None:
    """What a subclass computes itself, we cannot replace without losing it."""
    if "forward" in module.__dict__ or type(module).forward is not kind.forward:
        raise UnsplittableError(f"has a forward() of its own; only that of torch.nn.{kind.__name__} can be split")
    if "weight" not in module._parameters:
        raise UnsplittableError("has a parametrized weight; remove the parametrization")


def require_gather(mark: Split, what: str) -> None:
    if not mark.gather:
        raise UnsplittableError(f"has split(gather=False), but {what} has no part to hand on; leave gather out")


def refuse_sequence_of_spread(mark: Split, axis: SplitAxis) -> None:
    if axis.spread and (mark.sequence or mark.how == "sequence"):
        raise UnsplittableError(
            "cuts the sequence, but replicate beside split gives each device a batch of its own; drop one of them"
        )
