"""Possible denominators of a mean loss, counted in a batch: labels, mask positions, tokens, rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

#: The default ``ignore_index`` of PyTorch losses.
IGNORED = -100
LABELS = f"labels that are not {IGNORED}"
SHIFTED = "[:, 1:]"


def denominators(batch: Any) -> dict[str, float]:
    """Return the possible denominators of the batch's loss by description, the most likely first."""
    leaves = [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(batch)[0] if isinstance(leaf, Tensor)]
    result = [each for name, leaf in leaves for each in _counts(name, leaf.detach())]
    return {words: count for _, words, count in sorted(result, key=lambda each: each[0])}


def _counts(name: str, leaf: Tensor) -> Iterator[tuple[int, str, float]]:
    if not leaf.dim() or not leaf.numel():
        return
    if leaf.dtype in (torch.int32, torch.int64):
        counted = leaf != IGNORED
        rank = 4 if bool(counted.all()) else 0  # another replica may have ignored labels: keep the entry, but last
        yield rank, f"{LABELS} (batch{name})", _total(counted)
        if leaf.dim() > 1:
            yield rank, f"{LABELS} (batch{name}{SHIFTED})", _total(counted[:, 1:])
    if leaf.dim() > 1 and _is_mask(leaf):
        yield 1, f"places that the mask shows (batch{name})", _total(leaf != 0)
        yield 1, f"places that the mask shows (batch{name}[:, 1:])", _total(leaf[:, 1:] != 0)
    if leaf.dim() > 1:
        yield 2, f"places (batch{name}.shape[:2])", float(leaf.shape[0] * leaf.shape[1])
        yield 2, f"places (batch{name}[:, 1:].shape[:2])", float(leaf.shape[0] * (leaf.shape[1] - 1))
    yield 3, f"rows (batch{name}.shape[0])", float(leaf.shape[0])


def _is_mask(leaf: Tensor) -> bool:
    return leaf.dtype == torch.bool or bool(((leaf == 0) | (leaf == 1)).all())


def _total(where: Tensor) -> float:
    return float(where.sum())
