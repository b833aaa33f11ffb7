"""Outputs of a training step, for ``engine.step(..., outputs=True)``: without history, and whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.base.errors import UsageError
from echelon.parallel.tensor.sharded_activation import whole
from echelon.plan.fake_forward import is_placeholder
from echelon.plan.pytree import replace_tensors, take_apart


class StepOutputs:
    """Gathers what the model returns in one step, by micro-batch."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, int]] = []  # and of how many rows

    def add(self, output: Any, rows: int) -> None:
        """Keep it as it is now, without what backward needs."""
        with torch.no_grad():
            self._kept.append((replace_tensors(whole(output), _detached), rows))

    def latest(self) -> Any:
        """Of a step that runs its batch at once; None where the model did not run to its end here."""
        return self._kept[-1][0] if self._kept else None

    def together(self, rows: int) -> Any:
        """Of micro-batches, whose last ones may be stand-ins: tensors with a row for each sample in one, scalars as
        their mean over ``rows``. What a pipeline has on other stages is None."""
        counts, left = [], rows
        for _, found in self._kept:
            counts.append(min(found, left))
            left -= counts[-1]
        parts = [
            (take_apart(output), of, count) for (output, of), count in zip(self._kept, counts, strict=True) if count
        ]
        if not parts:
            return None
        columns = zip(*(part.leaves for part, _, _ in parts), strict=True)
        sizes = [(of, count) for _, of, count in parts]
        return parts[0][0].together(_joined(column, sizes) for column in columns)


def first_rows(output: Any, rows: int) -> Any:
    """The same of the first samples only."""
    return replace_tensors(output, lambda tensor: tensor[:rows] if tensor.dim() else tensor)


def asked_outputs(outputs: Any) -> StepOutputs:
    """What gathers them. A batch's entry of that name, which would be taken for the question, is refused."""
    if outputs is not True:
        raise UsageError(
            f"outputs={type(outputs).__name__}: step() takes outputs=True or False; give a batch with an entry of that "
            "name as a dict: step({'outputs': ...})"
        )
    return StepOutputs()


def _detached(tensor: Tensor) -> Tensor | None:
    return None if is_placeholder(tensor) else tensor.detach()


def _joined(column: Sequence[Any], sizes: Sequence[tuple[int, int]]) -> Any:
    """One leaf of all micro-batches; each has so many rows, of which so many count."""
    if not all(isinstance(leaf, Tensor) for leaf in column):
        return column[0]
    if all(leaf.dim() and len(leaf) == of for leaf, (of, _) in zip(column, sizes, strict=True)):
        return torch.cat([leaf[:count] for leaf, (_, count) in zip(column, sizes, strict=True)])
    if all(leaf.dim() == 0 and leaf.is_floating_point() for leaf in column):
        total = sum(count for _, count in sizes)
        return torch.stack([leaf * (count / total) for leaf, (_, count) in zip(column, sizes, strict=True)]).sum()
    return column[0]
