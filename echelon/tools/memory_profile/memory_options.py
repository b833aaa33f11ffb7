"""The checked options of ``echelon memory``; the child process of a script receives them as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Literal

import torch

from echelon.base.config import require, strict
from echelon.base.errors import UsageError
from echelon.plan.axes import find_axes
from echelon.plan.saved_plan import SavedPlan
from echelon.planner.profiling.profile import Profile
from echelon.strategy import Shard, Strategy
from echelon.strategy.annotations.annotate import ModelMarks
from echelon.strategy.annotations.marks import Pipeline, ScheduleName
from echelon.strategy.annotations.slices import Slices
from echelon.tools.memory_profile.training_job import TrainingJob

#: The cluster to profile for, by device type: memory depends on the kernels, which are the same on all GPUs or CPUs.
CLUSTERS = {"cuda": "1xH100", "cpu": "1xCPU"}
#: Most processes that are tried for one copy of a model, unless slices set the number.
MOST = 64


@strict
class MemoryOptions:
    """The options of one ``echelon memory`` command. None stands for the script's own setting, or the default.

    model:   MODEL argument in the syntax of ``echelon plan``
    batch:   samples of each replica
    amp:     "off" overrides the amp setting of a script
    """

    model: str
    procs: int | None = None
    batch: int | None = None
    device: Literal["cpu", "cuda"] | None = None
    optimizer: str | None = None
    amp: Literal["bf16", "fp16", "off"] | None = None
    recompute: bool | None = None
    shard: Literal[0, 1, 2, 3] | None = None
    merge: int | None = None
    low_memory: bool | None = None
    stages: int | None = None
    split: int | None = None
    micro_batches: int | None = None
    schedule: ScheduleName | None = None
    plan: str | None = None
    input: str | None = None

    def __post_init__(self) -> None:
        for name in ("procs", "batch", "stages", "split", "micro_batches", "merge"):
            value = getattr(self, name)
            require(value is None or value >= 1, self, name, "1 or more")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def cluster(self) -> str:
        return CLUSTERS[self.device or ("cuda" if torch.cuda.is_available() else "cpu")]

    def by_plan(self, saved: SavedPlan) -> TrainingJob:
        """Return the job of a saved plan. Raises UsageError if options are given that the plan already sets."""
        names = ("amp", "recompute", "shard", "merge", "low_memory", "stages", "split", "micro_batches", "schedule")
        beside = [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]
        if beside:
            raise UsageError(f"--plan already sets {', '.join(beside)}; remove {beside[0]} or --plan")
        if self.procs not in (None, saved.draft.ranks):
            raise UsageError(
                f"--procs {self.procs}: the plan is for {saved.draft.ranks} processes ({saved.draft}); leave --procs "
                "out"
            )
        return TrainingJob.of(saved, self.batch)

    def job(
        self,
        profile: Profile,
        strategy: Strategy | None = None,
        marks: ModelMarks | None = None,
        slices: Slices | None = None,
    ) -> TrainingJob:
        """Return the job for these options; the others come from the script, and by default the profile's batch."""
        asked = self._strategy(strategy or Strategy())
        if self.stages or self.split or self.micro_batches or self.schedule:
            if marks is not None and (marks.units or marks.splits or marks.pipeline):
                raise UsageError("the script's model has marks that say what is split and staged; leave --stages, "
                                 "--split, --micro-batches and --schedule out, or the marks")  # fmt: skip
            marks, slices = self._marks(profile)
        samples = profile.batch if self.batch is None else self.batch
        procs = self.procs or _fewest(asked, marks, slices)
        return TrainingJob(samples=samples, procs=procs, strategy=asked, marks=marks, slices=slices)

    def remark(self, job: TrainingJob) -> tuple[str, ...]:
        """Return a note if the number of processes was not given, but chosen here."""
        if self.procs is not None or self.plan is not None or job.procs == 1:
            return ()
        return (f"{job.procs} processes are the fewest for this; --procs sets their number",)

    def _strategy(self, own: Strategy) -> Strategy:
        changes: dict[str, Any] = {}
        if self.amp is not None:
            changes["amp"] = False if self.amp == "off" else self.amp
        if self.recompute is not None and self.recompute != (own.recompute is not None):
            changes["recompute"] = self.recompute or None
        if self.shard is not None:
            changes["shard"] = Shard(level=self.shard) if self.shard else None
        if self.merge is not None:
            changes["gradient_merge"] = self.merge
        if self.low_memory is not None:
            changes["low_memory"] = self.low_memory or None
        return dataclasses.replace(own, **changes)

    def _marks(self, profile: Profile) -> tuple[ModelMarks, Slices]:
        """Return marks and slices for --stages, --split etc.; the split layers are those that the planner splits."""
        stages, across = self.stages or 1, self.split or 1
        if across > 1 and across > profile.splits:
            raise UsageError(f"--split {across}: {_unsplit(profile)}")
        count, schedule = self.micro_batches or (4 if stages > 1 else 1), self.schedule or "1f1b"
        staged = Pipeline(micro_batches=count, schedule=schedule, stages=stages) if stages > 1 or count > 1 else None
        splits = dict(profile.split_marks) if across > 1 else {}
        marks = ModelMarks(units={}, splits=splits, replicates=(), pipeline=staged, default=None)
        return marks, Slices(average=_along(marks) * across)


def _unsplit(profile: Profile) -> str:
    name, count = profile.name, profile.splits
    if count > 1:
        return f"layers of '{name}' can be cut in at most {count}; take fewer, or mark modules with split()"
    return f"'{name}' has no layers that plans split by themselves; mark modules with split(), or leave --split out"


def _along(marks: ModelMarks) -> int:
    """Return the largest number of ranks along the stage axis that the stages can be distributed to."""
    if marks.stages == 1:
        return 1
    return find_axes(marks.stages, marks.pipeline, False, None, marks.stages).get("stage", 1)


def _fewest(strategy: Strategy, marks: ModelMarks | None, slices: Slices | None) -> int:
    """Return the fewest processes with which all options take effect: one copy of the model, or two with shard."""
    copies = 2 if strategy.shard else 1
    if marks is None or not (marks.splits or marks.stages > 1):
        return copies
    if slices is not None and slices.specific is not None:
        return sum(map(len, slices.specific))
    size = slices.slice_size(1) if slices is not None and not slices.row else None
    for ranks in [size] if size else range(2, MOST + 1):
        with contextlib.suppress(UsageError):
            if len(find_axes(marks.stages, marks.pipeline, bool(marks.splits), size, ranks)) > 1:
                return ranks * copies
    return copies
