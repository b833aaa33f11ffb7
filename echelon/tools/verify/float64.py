"""Conversion of models and batches to float64: a difference that remains in float64 is not a rounding error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

#: Relative difference up to which two float64 losses count as the same.
TOLERANCE = 1e-9


def widen(model: nn.Module) -> None:
    """Convert the model to float64 in place, and make float64 the default dtype.

    Parameters stay the same objects, so the optimizer's references remain valid. The default dtype also widens tensors
    that a forward creates.
    """
    torch.set_default_dtype(torch.float64)
    model.double()


def to_float64(batch: Any) -> Any:
    """Return the batch with its float32 tensors converted to float64."""

    def wide(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf

    return tree_map(wide, batch)
