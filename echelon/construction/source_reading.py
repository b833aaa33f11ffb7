"""Reads a model's tensors from a ``WeightSource``: the parts of parameters, and all other tensors whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from echelon.base.errors import CheckpointError
from echelon.checkpoint.weight_source import WeightSource
from echelon.distributed.tensor_layout import Layout, Part

_NAMED = 3  # number of names in a line


@torch.no_grad()
def read_part(source: WeightSource, name: str, layout: Layout, into: Tensor) -> None:
    """Read the part of a tensor that a layout describes into ``into``, in its dtype."""
    if tuple(source.shape(name)) != layout.shape:
        raise CheckpointError(
            f"'{name}' is {list(source.shape(name))} in the given weights and {list(layout.shape)} in the model; "
            "give the weights of this model"
        )
    for region, view in Part(into, layout).regions(name):
        view.copy_(source.read(name, region))


@torch.no_grad()
def read_other_tensors(model: nn.Module, source: WeightSource) -> Iterator[str]:
    """Read buffers and parameters that have memory already; yield lines on names that only one of both has."""
    stored, known = set(source.names()), set[str]()
    lacking = []
    for names, value in _named_tensors(model):
        known.update(names)
        found = min(stored.intersection(names), default=None)
        if found is None:
            lacking += [names[0]] if isinstance(value, nn.Parameter) else []
        elif not value.is_meta:
            read_part(source, found, Layout(tuple(value.shape)), value)
    if lacking:
        yield f"weights: {_some(lacking)} of the model are not among the given weights and begin as they were made"
    if unknown := sorted(stored - known):
        yield f"weights: {_some(unknown)} among the given weights are not in the model and are left out"


def _named_tensors(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Return the tensors of the model's state, each with all of its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            found.setdefault(id(value), ([], value))[0].append(name)
    return list(found.values())


def _some(names: Collection[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in list(names)[:_NAMED])
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{len(names)} tensors ({shown}{more})"
