"""``ClickWindow``: metrics of the last samples of training, over all ranks."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from echelon.base.errors import UsageError
from echelon.distributed.world import World
from echelon.parallel.evaluate import (
    area_under_curve,
    calibration,
    click_sums,
    gathered,
    in_order,
    normalized_entropy,
    numbered,
    scored,
)


class ClickWindow:
    """The predictions of the last samples that all ranks were trained on, made before the model had learned from them.

    samples: samples in the window, of all ranks together
    world:   ``engine.world``

    Workers that are connected through parameter servers only have a window each.

    >>> window = ClickWindow(100_000, engine.world)
    >>> engine.step(ids, numbers, labels, outputs=True)
    >>> window.add(engine.output, labels)
    >>> engine.log(window.result())
    """

    def __init__(self, samples: int, world: World) -> None:
        if samples < 1:
            raise UsageError(f"ClickWindow({samples}): expected a window of one sample or more")
        self._samples, self._world = samples, world
        self._kept: deque[Tensor] = deque()
        self._rows, self._batches = 0, 0

    def add(self, output: Any, target: Tensor) -> None:
        """Add the logits and labels of this rank's batch; every rank does so once a step, also with an empty batch."""
        self._batches += 1
        rows = numbered(torch.cat([scored(output, target), click_sums(output, target)], dim=1), self._batches)
        self._kept.append(rows)
        self._rows += len(rows)
        # others may have fewer rows of late, so this rank keeps a window of its own
        while self._rows - len(self._kept[0]) >= self._samples:
            self._rows -= len(self._kept.popleft())

    def result(self) -> dict[str, float]:
        """Return ``auc``, ``ne`` and ``calibration`` of the window; all ranks call it at the same step."""
        rows = gathered(list(self._kept), self._world)
        if not len(rows):
            raise UsageError("ClickWindow.result(): nothing was added yet; call add() after a step")
        rows = in_order(rows)[-self._samples :]
        sums = rows[:, 2:].sum(0)
        return {
            "auc": area_under_curve(rows[:, :2]),
            "ne": normalized_entropy(sums),
            "calibration": calibration(sums),
        }
