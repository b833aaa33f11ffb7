"""Checks that depend on the number of ranks, done before any rank starts."""

from __future__ import annotations

from echelon.base.errors import UsageError
from echelon.plan.axes import find_axes
from echelon.strategy.annotations.marks import Pipeline, Split, Stage
from echelon.zoo.entry import OWN_RUNNER
from echelon.zoo.train.hooks.profiler import check_profiled_rank
from echelon.zoo.train.model_marks import requested_marks
from echelon.zoo.train.resolve import TrainConfig


def check_ranks(resolved: TrainConfig, ranks: int) -> None:
    """Raise UsageError if the layout does not fit ``ranks``; otherwise each rank would fail with the same line."""
    if resolved["profile_every_n_iters"]:
        check_profiled_rank(resolved["profile_at_task"], ranks)
    if resolved.model.runner == OWN_RUNNER or resolved.strategy.get("auto"):
        return  # a user's class may contain marks, and the planner chooses the layout itself
    marks = [mark for own in requested_marks(resolved.model, resolved.request).values() for mark in own]
    pipeline = next((mark for mark in marks if isinstance(mark, Pipeline)), None)
    stages = max([1 + mark.index for mark in marks if isinstance(mark, Stage)], default=resolved["stages"])
    has_splits = any(isinstance(mark, Split) for mark in marks)
    size = resolved["average"] if resolved.is_user_set("average") else None
    mesh = find_axes(stages, pipeline, has_splits, size, ranks)
    if size is not None and ranks > 1 and mesh.get("stage", 1) * mesh.get("split", 1) != size:
        raise UsageError(f"--average {size}: one copy of the model takes {ranks // mesh['replicate']}; give that")
