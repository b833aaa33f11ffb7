"""Context for building a model that would not fit in fp32: on the training device and in bf16 from the start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from echelon.distributed import world


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Create modules on this rank's device within the context, with bf16 weights and the usual initialization."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with world.current().device:
            yield
    finally:
        torch.set_default_dtype(before)
