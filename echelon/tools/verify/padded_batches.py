"""Merging of batches that were padded to different lengths, with the padding of a globally collated batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.base.errors import DataError
from echelon.parallel.objective import count_samples
from echelon.tools.verify.batches import describe, rebuild_batch


class _Field(NamedTuple):
    """One tensor of the global batch, and the corresponding tensor of each replica."""

    own: Tensor
    parts: list[Tensor]

    @property
    def has_rows(self) -> bool:
        return bool(self.own.dim()) and all(
            part.dim() == self.own.dim() and part.dtype == self.own.dtype for part in self.parts
        )

    @property
    def is_padded(self) -> bool:
        return any(part.shape[1:] != self.own.shape[1:] for part in self.parts)

    def place(self, at: int, *, end: bool) -> tuple[slice, ...]:
        """Return the slices of replica ``at`` in the global tensor.

        end: True if padding comes first, so that values are aligned at the end
        """
        before = sum(len(part) for part in self.parts[:at])
        sizes = zip(self.own.shape[1:], self.parts[at].shape[1:], strict=True)
        inner = [slice(size - part, size) if end else slice(0, part) for size, part in sizes]
        return slice(before, before + len(self.parts[at])), *inner

    def agrees(self, *, end: bool) -> bool:
        return all(torch.equal(self.own[self.place(at, end=end)], part) for at, part in enumerate(self.parts))

    def pasted(self, *, end: bool) -> Tensor:
        """Return the global tensor with the replicas' values: they may differ if a collate function is random."""
        whole = self.own.clone()
        for at, part in enumerate(self.parts):
            whole[self.place(at, end=end)] = part
        return whole


def padded_together(own: Any, batches: Sequence[Any]) -> Any:
    """Return the rows of all ``batches`` with the padding of ``own``; None if ``own`` does not consist of their rows.

    own: the global batch, as one process collates it
    """
    try:
        structure, leaves = describe(own)
        rows = [count_samples(batch) for batch in batches]
        parts = [describe(batch) for batch in batches]
    except DataError:
        return None
    if any(other != structure for other, _ in parts):
        return None
    fields = [_Field(leaf, [found[at] for _, found in parts]) for at, leaf in enumerate(leaves)]
    whole = [field if _is_by_row(field, rows) else None for field in fields]
    padded = [field for field in whole if field is not None and field.is_padded]
    end = _side(padded)
    if end is None:
        return None
    merged = [_merged(field, by_row, end) for field, by_row in zip(fields, whole, strict=True)]
    known = {at: leaf for at, leaf in enumerate(merged) if leaf is not None}
    return rebuild_batch(structure, known) if len(known) == len(merged) else None


def _is_by_row(field: _Field, rows: Sequence[int]) -> bool:
    if not field.has_rows or [len(part) for part in field.parts] != list(rows) or len(field.own) != sum(rows):
        return False
    return all(
        size >= length for part in field.parts for size, length in zip(field.own.shape[1:], part.shape[1:], strict=True)
    )


def _side(padded: Sequence[_Field]) -> bool | None:
    """Return True if padding comes first, False if it comes last, None if the fields agree on neither side."""
    start, end = ({at for at, field in enumerate(padded) if field.agrees(end=side)} for side in (False, True))
    if not padded or not start | end or (start - end and end - start):
        return None
    return not start or bool(end - start)


def _merged(field: _Field, by_row: _Field | None, end: bool) -> Tensor | None:
    if by_row is not None:
        return by_row.pasted(end=end) if by_row.is_padded else torch.cat(by_row.parts)
    alike = all(part.shape == field.own.shape and torch.equal(part, field.own) for part in field.parts)
    return field.own if alike else None
