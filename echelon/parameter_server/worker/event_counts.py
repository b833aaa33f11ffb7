"""``EventCounts``: the shows and clicks of a step's rows, for tables that keep rows by their score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.base.errors import DataError
from echelon.parameter_server.protocol.job_spec import EVENTS, TableSpec

Floats = NDArray[np.float32]


class EventCounts:
    """Counts shows and clicks of the ids of a batch; ``leaves`` are the batch's tensors.

    A show is an occurrence of an id in a sample; it is a click if the tensor of clicks is above 0 for the sample.
    """

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        self._scores = {table.name: table.score for table in tables if table.score is not None}
        self.leaves: Sequence[Tensor] = ()

    def counts(self, table: str) -> bool:
        """Return True if shows and clicks of this table are counted."""
        return table in self._scores

    def of(
        self, table: str, ids: Tensor, inverse: NDArray[np.int64], rows: int, offsets: Tensor | None = None
    ) -> Floats:
        """Return shows and clicks, [rows, 2], of the rows that ``inverse`` gives for the flat ``ids``.

        offsets: where each sample's bag begins, if ``ids`` are ragged bags
        """
        clicked = self._clicked(table)
        clicks = clicked.repeat_interleave(_bag_sizes(table, ids, len(clicked), offsets)).cpu().numpy()
        found = np.empty((rows, EVENTS), np.float32)
        found[:, 0] = np.bincount(inverse, minlength=rows)
        found[:, 1] = np.bincount(inverse, weights=clicks, minlength=rows)
        return found

    def _clicked(self, table: str) -> Tensor:
        at, tensors = self._scores[table].clicks, len(self.leaves)
        if not -tensors <= at < tensors:
            raise DataError(f"table '{table}': ShowClickScore(clicks={at}), but the batch has {tensors} tensors")
        leaf = self.leaves[at].detach()
        if not leaf.dim() or leaf.numel() != len(leaf):
            raise DataError(
                f"table '{table}': ShowClickScore(clicks={at}) is a tensor of shape {tuple(leaf.shape)}; it must have "
                "one value a sample"
            )
        return (leaf.reshape(-1) > 0).double()


def _bag_sizes(table: str, ids: Tensor, samples: int, offsets: Tensor | None) -> Tensor:
    """Return the number of ids of each sample."""
    if offsets is None and ids.dim() and len(ids) == samples:
        return torch.full((samples,), ids.numel() // max(samples, 1))
    if offsets is None or len(offsets) != samples:
        raise DataError(
            f"table '{table}': ids of shape {tuple(ids.shape)} cannot be told by sample, of which the batch has "
            f"{samples}; look up one row of ids, or one bag, a sample"
        )
    ends = torch.cat([offsets[1:], offsets.new_tensor([ids.numel()])])
    return (ends - offsets).cpu()
