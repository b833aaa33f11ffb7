"""The TrainingJob that the options of ``echelon memory`` ask for."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, cast

import torch

from echelon.base.config import build
from echelon.base.errors import UsageError
from echelon.plan.axes import find_axes, requested_slice
from echelon.plan.saved_plan import SavedPlan
from echelon.planner.profiling.profile import Profile
from echelon.strategy import Shard, Strategy
from echelon.strategy.annotations.annotate import ModelMarks
from echelon.strategy.annotations.marks import Pipeline, ScheduleName
from echelon.strategy.annotations.slices import Slices
from echelon.tools.memory_profile.memory_options import MemoryOptions
from echelon.tools.memory_profile.training_job import TrainingJob

#: The cluster to profile for, by device type: memory depends on the kernels, which are the same on all GPUs or CPUs.
CLUSTERS = {"cuda": "1xH100", "cpu": "1xCPU"}
#: Most processes that are tried for one copy of a model, unless slices set the number.
MOST = 64


def cluster_for(options: MemoryOptions) -> str:
    """Return the cluster to profile for: the device of the options, or the one that is here."""
    return CLUSTERS[options.device or ("cuda" if torch.cuda.is_available() else "cpu")]


def job_by_plan(options: MemoryOptions, saved: SavedPlan) -> TrainingJob:
    """Return the job of a saved plan. Raises UsageError if options are given that the plan already sets."""
    names = ("amp", "recompute", "shard", "merge", "low_memory", "stages", "split", "micro_batches", "schedule")
    given = [name for name in names if getattr(options, name) is not None]
    beside = ["--gradient-merge" if name == "merge" else f"--{name.replace('_', '-')}" for name in given]
    if beside:
        raise UsageError(f"--plan already sets {', '.join(beside)}; remove {beside[0]} or --plan")
    if options.procs not in (None, saved.draft.ranks):
        raise UsageError(
            f"--procs {options.procs}: the plan is for {saved.draft.ranks} processes ({saved.draft}); leave --procs out"
        )
    return TrainingJob.of(saved, options.batch)


def requested_job(
    options: MemoryOptions,
    profile: Profile,
    strategy: Strategy | None = None,
    marks: ModelMarks | None = None,
    slices: Slices | None = None,
) -> TrainingJob:
    """Return the job for these options; the others come from the script, and by default the profile's batch."""
    strategy = _strategy(options, strategy or Strategy())
    if options.stages or options.split or options.micro_batches or options.schedule:
        if marks is not None and (marks.units or marks.splits or marks.pipeline):
            raise UsageError("the script's model has marks that say what is split and staged; leave --stages, "
                             "--split, --micro-batches and --schedule out, or the marks")  # fmt: skip
        marks, slices = _marks(options, profile)
    samples = profile.batch if options.batch is None else options.batch
    procs = options.procs or _fewest(strategy, marks, slices)
    return TrainingJob(samples=samples, procs=procs, strategy=strategy, marks=marks, slices=slices)


def remark(options: MemoryOptions, job: TrainingJob) -> tuple[str, ...]:
    """Return a note if the number of processes was not given, but chosen here."""
    if options.procs is not None or options.plan is not None or job.procs == 1:
        return ()
    return (f"{job.procs} processes are the fewest for this; --procs sets their number",)


def _strategy(options: MemoryOptions, own: Strategy) -> Strategy:
    changes: dict[str, Any] = {}
    if options.amp is not None:
        changes["amp"] = False if options.amp == "off" else options.amp
    if options.recompute is not None and options.recompute != (own.recompute is not None):
        changes["recompute"] = options.recompute or None
    if options.shard is not None:
        changes["shard"] = build(Shard, {"level": options.shard}) if options.shard else None
    if options.merge is not None:
        changes["gradient_merge"] = options.merge
    if options.low_memory is not None:
        changes["low_memory"] = options.low_memory or None
    return dataclasses.replace(own, **changes)


def _marks(options: MemoryOptions, profile: Profile) -> tuple[ModelMarks, Slices]:
    """Return marks and slices for --stages, --split etc.; the split layers are those that the planner splits."""
    stages, across = options.stages or 1, options.split or 1
    if across > 1 and across > profile.splits:
        raise UsageError(f"--split {across}: {_unsplit(profile)}")
    count, schedule = options.micro_batches or (4 if stages > 1 else 1), cast(ScheduleName, options.schedule or "1f1b")
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
    size = requested_slice(strategy.split, marks.stages, marks.pipeline)
    size = size or (slices.slice_size(1) if slices is not None and not slices.row else None)
    for ranks in [size] if size else range(2, MOST + 1):
        with contextlib.suppress(UsageError):
            if len(find_axes(marks.stages, marks.pipeline, bool(marks.splits), size, ranks)) > 1:
                return ranks * copies
    return copies
