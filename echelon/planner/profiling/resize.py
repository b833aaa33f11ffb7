"""Resizing of a batch: rules that find the dimension of each tensor that counts samples.

By default that is the first dimension, if it is as long as the batch. Tables of offsets have samples in another
dimension, and lists of indices have several entries per sample: the rules for these are used only if the model does not
run with the first rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Takes a tensor and the samples of its batch; returns the dimension that counts samples, and its entries per sample.
Rule = Callable[[Tensor, int], tuple[int, int] | None]


def find_rows(leaf: Tensor, samples: int) -> tuple[int, int] | None:
    """Return the first dimension, if it is as long as the batch."""
    return (0, 1) if leaf.dim() and leaf.shape[0] == samples else None


def find_dimension(leaf: Tensor, samples: int) -> tuple[int, int] | None:
    """Return the first dimension that is as long as the batch."""
    found = [at for at, size in enumerate(leaf.shape) if size == samples and (samples > 1 or at == 0)]
    return (found[0], 1) if found else None


def find_multiple(leaf: Tensor, samples: int) -> tuple[int, int] | None:
    """Return the first dimension that is as long as the batch or, for integer tensors, a multiple of it."""
    found = find_dimension(leaf, samples)
    if found is not None or samples == 1 or leaf.is_floating_point():
        return found
    several = [at for at, size in enumerate(leaf.shape) if size and size % samples == 0]
    return (several[0], leaf.shape[several[0]] // samples) if several else None


RULES: tuple[Rule, ...] = (find_rows, find_multiple, find_dimension)


def resize(leaf: Any, rule: Rule, before: int, samples: int) -> Any:
    """Return a leaf of a batch of ``before`` samples resized to ``samples`` samples, as a meta tensor."""
    place = rule(leaf, before) if isinstance(leaf, Tensor) else None
    if place is None:
        return leaf
    at, each = place
    return torch.empty((*leaf.shape[:at], each * samples, *leaf.shape[at + 1 :]), dtype=leaf.dtype, device="meta")
