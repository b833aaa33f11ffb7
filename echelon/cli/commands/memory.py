"""``echelon memory``: predict the memory of each rank and print tables or JSON, or write memory.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from echelon.base.errors import UsageError
from echelon.observability.runlog.log_files import MEMORY
from echelon.observability.runlog.run_metadata import Footprint
from echelon.plan.saved_plan import SavedPlan
from echelon.planner.cluster.cluster import Cluster
from echelon.tools.memory_profile.footprint import find_footprint
from echelon.tools.memory_profile.memory_options import MemoryOptions
from echelon.tools.memory_profile.memory_tables import show
from echelon.tools.memory_profile.requested_job import cluster_for, job_by_plan, remark, requested_job
from echelon.tools.plan_report import plan_options as plans
from echelon.tools.plan_report.model_source import DESCRIBED, find_source, is_script
from echelon.tools.plan_report.plan_script import ask

USUAL = "adamw"


def run_memory(
    options: MemoryOptions, args: Sequence[str] = (), *, as_json: bool = False, save: str | None = None
) -> None:
    """Predict the memory for these options, and print it; write it into the directory ``save``, if it is given."""
    if options.plan is not None:
        job_by_plan(options, SavedPlan.load(options.plan))  # report a mistake before a script runs for minutes
    title, found = _of_script(options, args) if is_script(options.model) else _of_model(options)
    if save is not None:
        _write(Path(save), found)
    print(json.dumps(found.to_json(), indent=1) if as_json else show(title, found))


def _of_script(options: MemoryOptions, arguments: Sequence[str]) -> tuple[str, Footprint]:
    """Run the script in one process up to its first batch."""
    if not Path(options.model).is_file():
        raise UsageError(f"MODEL: no file at '{options.model}'")
    answer = ask(options.model, arguments, {"footprint": options.to_dict()})
    result = Footprint.of(answer["footprint"])
    assert result is not None
    return answer["title"], result


def _of_model(options: MemoryOptions) -> tuple[str, Footprint]:
    saved = SavedPlan.load(options.plan) if options.plan is not None else None
    batch = options.batch if saved is None or options.batch is not None else job_by_plan(options, saved).samples
    _check_batch(options, batch)
    given = plans.PlanOptions(model=options.model, cluster=cluster_for(options), batch=batch, input=options.input)
    profile = find_source(given, Cluster.parse(cluster_for(options))).profile
    if saved is not None and saved.model:
        saved.check_model(profile.model)
    job = requested_job(options, profile) if saved is None else job_by_plan(options, saved)
    optimizer = options.optimizer or USUAL
    result = find_footprint(profile, job, optimizer)
    return f"{profile.name}, {optimizer}", replace(result, notes=(*remark(options, job), *result.notes))


def _check_batch(options: MemoryOptions, batch: int | None) -> None:
    """Raise UsageError if the model is only described, so that it has no batch, and no batch size is given."""
    kind = options.model.partition(":")[0]
    if batch is None and kind in DESCRIBED:
        raise UsageError(f"--batch-size is missing: {kind} is only described; write --batch-size 32")


def _write(directory: Path, found: Footprint) -> None:
    path = directory / MEMORY
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--log-dir: '{path}' cannot be written: {error.strerror}; give another directory") from None
