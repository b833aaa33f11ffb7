"""``WeightSource``: named tensors kept elsewhere, of which a rank reads only its parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import torch

from echelon.base.errors import CheckpointError
from echelon.distributed.tensor_region import TensorRegion


class WeightSource(Protocol):
    """Weights to start from, such as the files of a pretrained model.

    Names are those of ``model.state_dict()``. A tensor that a model knows under several names is read by the first of
    them that the source has.
    """

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is kept."""

    def read(self, name: str, region: TensorRegion) -> torch.Tensor:
        """Return a region of a tensor on the CPU, contiguous, in the dtype in which it is kept; read nothing else.

        name:   name of the tensor in the source
        region: offsets and sizes within the whole tensor; ``region.name`` and ``region.dtype`` belong to the reader's
                parameter and may differ from the source's
        """


class MappedWeights:
    """A ``WeightSource`` over a mapping of tensors, such as a state dict."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensor(name).dtype

    def read(self, name: str, region: TensorRegion) -> torch.Tensor:
        tensor = self._tensor(name)
        if tuple(tensor.shape) != region.shape:
            raise CheckpointError(
                f"'{name}' is {list(tensor.shape)} in the given weights and {list(region.shape)} in the model; "
                "give the weights of this model"
            )
        return region.view_of(tensor.detach()).cpu().clone(memory_format=torch.contiguous_format)

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise CheckpointError(
                f"the given weights hold no tensor '{name}'; names() lists the {len(self._tensors)} that they hold"
            )
        return self._tensors[name]
