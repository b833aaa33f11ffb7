"""``RowsToUpdate``: a batch's gradients, and the row of each of its runs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from echelon.parameter_server.device_table.segments import Segments


@dataclass(frozen=True)
class RowsToUpdate:
    """The work of one update.

    ids, grads: by position
    slots:      row of each run, negative for a run without a row, and behind the last run
    new:        True for a run whose row is not initialized yet
    before:     number of earlier pushes of the id of each new run
    settings:   numbers of the rule, as ``table.updates.settings_of``
    scale:      factor of the summed gradients
    seen:       last-seen time
    """

    ids: Tensor
    grads: Tensor
    segments: Segments
    slots: Tensor
    new: Tensor
    before: Tensor
    settings: list[float]
    scale: float
    seen: int
