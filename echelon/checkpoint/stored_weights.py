"""``StoredWeights``: the model's weights in a checkpoint, as a ``WeightSource``."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from echelon.base.errors import CheckpointError
from echelon.checkpoint.reader import Stored
from echelon.checkpoint.weights import weight_names
from echelon.distributed.tensor_layout import Layout
from echelon.distributed.tensor_region import TensorRegion


class StoredWeights:
    """The tensors of a checkpoint whose names begin with ``prefix``, without it.

    prefix: beginning of the names
    ema:    True for the moving average of a tensor where the checkpoint has one
    """

    def __init__(self, stored: Stored, prefix: str = "model.", *, ema: bool = False) -> None:
        self._stored = stored
        self._sources = weight_names(stored, prefix, ema=ema)
        found = stored.facts.get("aliases")
        pairs = found.items() if isinstance(found, dict) else ()
        #: second names of tied weights
        self.aliases = {second: first for second, first in pairs if first in self._sources}

    @property
    def path(self) -> Path:
        return self._stored.path

    def names(self) -> Collection[str]:
        return self._sources.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._stored.shape(self._sources[name]))

    def dtype(self, name: str) -> torch.dtype:
        return self._stored.dtype(self._sources[name])

    def read(self, name: str, region: TensorRegion) -> torch.Tensor:
        if self.shape(name) != region.shape:
            raise CheckpointError(f"'{name}' is {list(self.shape(name))} in {self.path}, not {list(region.shape)}")
        ranges = {dim: ((begin, begin + size),) for dim, (begin, size) in enumerate(zip(*region[3:], strict=True))}
        return self._stored.read_part(self._sources[name], Layout(region.shape, ranges))
