"""Marks for ``Strategy(split=..., stages=...)`` on a model that has none."""

from __future__ import annotations

from typing import Any

from torch import nn

from echelon.base.errors import UsageError
from echelon.planner.apply.tensor_marks import annotate_tensor
from echelon.strategy import Strategy
from echelon.strategy.annotations.annotate import ModelMarks, annotate, collect
from echelon.strategy.annotations.marks import Pipeline, Split


def apply_requested_marks(
    model: nn.Module, strategy: Strategy, ranks: int, sample: Any = None, loss: Any = None
) -> list[str]:
    """Put the marks on the model that ``split`` and ``stages`` of the strategy ask for; return log lines about them.

    Marks that the model has already stay, if they mean the same.

    ranks:  number of ranks; one rank splits nothing
    sample: batch as in ``Engine.step``; None if there is none yet
    loss:   loss as in ``distribute``
    """
    marks = collect(model)
    if isinstance(strategy.stages, Pipeline):
        _add_stages(model, strategy.stages, marks)
    if strategy.split is None or ranks == 1 or marks.splits or isinstance(marks.default, Split):
        return []
    return [annotate_tensor(model, strategy.split, sample, loss).line(strategy.split)]


def _add_stages(model: nn.Module, requested: Pipeline, marks: ModelMarks) -> None:
    if marks.pipeline is None:
        annotate(model, {"": requested})
    elif marks.stages != requested.stages:
        raise UsageError(
            f"Strategy(stages={requested.stages}): the model is marked with {marks.stages} stages; drop one of the two"
        )
