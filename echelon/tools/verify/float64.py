"""In 64 bits: what is still apart then is not rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

#: Relative differences of losses that count as the same there.
TOLERANCE = 1e-9


def widen(model: nn.Module) -> None:
    """Parameters stay the objects that the optimizer has; what a forward makes for itself is wide as well."""
    torch.set_default_dtype(torch.float64)
    model.double()


def to_float64(batch: Any) -> Any:
    """The same batch, its 32-bit numbers in 64 bits."""

    def wide(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf

    return tree_map(wide, batch)
