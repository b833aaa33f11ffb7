"""Building a model that would not fit as fp32: where it will train, and in bf16 from the first moment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from echelon.distributed import world


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Within it, modules are made on this rank's device, and their weights, drawn as always, in bf16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with world.current().device:
            yield
    finally:
        torch.set_default_dtype(before)
