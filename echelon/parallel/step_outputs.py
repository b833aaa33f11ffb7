"""Outputs of a training step for ``engine.step(..., outputs=True)``: detached, and whole if split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.base.errors import UsageError
from echelon.parallel.tensor.lazy_activation import whole
from echelon.plan.fake_forward import is_placeholder
from echelon.plan.pytree import replace_tensors, take_apart


class StepOutputs:
    """Collects the model's outputs in one step, by micro-batch."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, int]] = []  # outputs with their numbers of rows

    def add(self, output: Any, rows: int) -> None:
        """Keep the output of a micro-batch, detached from the autograd graph."""
        with torch.no_grad():
            self._kept.append((replace_tensors(whole(output), _detached), rows))

    def latest(self) -> Any:
        """Return the output of a step without micro-batches; None if the model did not run to its end on this rank."""
        return self._kept[-1][0] if self._kept else None

    def together(self, rows: int) -> Any:
        """Return the joined output of all micro-batches; the last ones may be stand-ins, beyond ``rows``.

        Tensors with a row per sample are concatenated, and scalars are averaged over ``rows``. Tensors that other
        pipeline stages hold are None.
        """
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
    """Return the output with only the first ``rows`` rows of each tensor."""
    return replace_tensors(output, lambda tensor: tensor[:rows] if tensor.dim() else tensor)


def requested_outputs(outputs: Any) -> StepOutputs:
    """Return a collector for ``outputs=True``; raise UsageError for another value, such as a batch entry."""
    if outputs is not True:
        raise UsageError(
            f"outputs={type(outputs).__name__}: step() takes outputs=True or False; give a batch with an entry of that "
            "name as a dict: step({'outputs': ...})"
        )
    return StepOutputs()


def _detached(tensor: Tensor) -> Tensor | None:
    return None if is_placeholder(tensor) else tensor.detach()


def _joined(column: Sequence[Any], sizes: Sequence[tuple[int, int]]) -> Any:
    """Return one leaf joined over all micro-batches.

    sizes: for each micro-batch, its number of rows and how many of them count
    """
    if not all(isinstance(leaf, Tensor) for leaf in column):
        return column[0]
    if all(leaf.dim() and len(leaf) == of for leaf, (of, _) in zip(column, sizes, strict=True)):
        return torch.cat([leaf[:count] for leaf, (_, count) in zip(column, sizes, strict=True)])
    if all(leaf.dim() == 0 and leaf.is_floating_point() for leaf in column):
        total = sum(count for _, count in sizes)
        return torch.stack([leaf * (count / total) for leaf, (_, count) in zip(column, sizes, strict=True)]).sum()
    return column[0]
