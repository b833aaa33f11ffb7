"""Recipes of parameters on ``meta``: how a rank makes its part of their first value."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from echelon.checkpoint.region_tensor import RegionTensor, RegionWeights
from echelon.checkpoint.weight_source import WeightSource
from echelon.construction.piecewise_values import piecewise_values
from echelon.construction.source_reading import read_part
from echelon.construction.tape import Tape, TensorRef
from echelon.distributed.tensor_layout import Layout
from echelon.distributed.tensor_region import narrow

#: Attribute of a parameter that holds its recipe.
RECIPE = "_echelon_recipe"


@dataclass(frozen=True)
class WeightRecipe:
    """The origin of a parameter's first value in a construction.

    tape:    operations of the construction
    ref:     place of the parameter on it
    version: number of changes of the parameter until the construction ended
    source:  weights that are read instead; None for those of the construction
    """

    tape: Tape
    ref: TensorRef
    version: int
    source: WeightSource | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ref.shape

    def empty_part(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a part, in the memory format of the value."""
        whole = torch.empty_strided(self.ref.shape, self.ref.stride, dtype=dtype, device="meta")
        return torch.empty_like(layout.take(whole), device=device)

    def write(self, names: Collection[str], layout: Layout, into: Tensor) -> None:
        """Write the part of the value that a layout describes; ``names``: those of the parameter."""
        if self.source is not None and (stored := set(names) & set(self.source.names())):
            read_part(self.source, min(stored), layout, into)
        elif (values := piecewise_values(self.tape, self.ref)) is not None:
            values.write(layout, into)
        else:
            value = self.tape.values([self.ref])[0]
            for offsets, sizes, starts in layout.boxes():
                narrow(into, starts, sizes).copy_(narrow(value, offsets, sizes))


@dataclass(frozen=True)
class StoredRecipe:
    """The origin of a parameter whose value lies in files, whatever names it gets.

    value:   the value, unread
    version: number of changes of the parameter when it was made
    """

    value: RegionTensor
    version: int = 0
    tape: None = None
    source: None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    def empty_part(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a part."""
        return torch.empty(layout.local_shape, dtype=dtype, device=device)

    def write(self, names: Collection[str], layout: Layout, into: Tensor) -> None:
        """Read the part of the value that a layout describes."""
        name = min(names)
        read_part(RegionWeights({name: self.value}), name, layout, into)


def stored_parameter(value: RegionTensor, requires_grad: bool) -> nn.Parameter:
    """Return a parameter on ``meta`` of which ``distribute()`` reads each rank's part."""
    parameter = nn.Parameter(torch.empty(value.shape, dtype=value.dtype, device="meta"), requires_grad)
    setattr(parameter, RECIPE, StoredRecipe(value, parameter._version))
    return parameter
