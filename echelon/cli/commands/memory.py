"""``echelon memory``: predict the memory of each rank and print tables or JSON, or write memory.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.base.config import build
from echelon.base.errors import UsageError
from echelon.observability.runlog.log_files import MEMORY
from echelon.observability.runlog.run_metadata import Footprint
from echelon.plan.saved_plan import SavedPlan
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.profiling.named_optimizers import check_name
from echelon.tools.memory_profile.footprint import find_footprint
from echelon.tools.memory_profile.memory_options import MemoryOptions
from echelon.tools.memory_profile.memory_script import ask_script
from echelon.tools.memory_profile.memory_tables import show
from echelon.tools.plan_report import plan_options as plans
from echelon.tools.plan_report.model_source import DESCRIBED, find_source, is_script

USUAL = "adamw"


def run_memory(
    model: str, args: Sequence[str] | None, *, as_json: bool = False, save: str | None = None, **words: Any
) -> None:
    """Run the command.

    words: its other options as given; None for those that were not given
    """
    asked = build(MemoryOptions, {"model": model, **words}, "echelon memory")
    if asked.optimizer is not None:
        check_name(asked.optimizer)  # report a typo before a script runs for minutes
    if asked.plan is not None:
        asked.by_plan(SavedPlan.load(asked.plan))
    title, found = _of_script(asked, args or []) if is_script(model) else _of_model(asked)
    if save is not None:
        _write(Path(save), found)
    print(json.dumps(found.to_json(), indent=1) if as_json else show(title, found))


def _of_script(asked: MemoryOptions, arguments: Sequence[str]) -> tuple[str, Footprint]:
    answer = ask_script(asked, arguments)
    found = Footprint.of(answer["footprint"])
    assert found is not None
    return answer["title"], found


def _of_model(asked: MemoryOptions) -> tuple[str, Footprint]:
    saved = SavedPlan.load(asked.plan) if asked.plan is not None else None
    batch = asked.batch if saved is None or asked.batch is not None else asked.by_plan(saved).samples
    _check_batch(asked, batch)
    given = plans.PlanOptions(model=asked.model, cluster=asked.cluster, batch=batch, input=asked.input)
    profile = find_source(given, Cluster.parse(asked.cluster)).profile
    if saved is not None and saved.model:
        saved.check_model(profile.model)
    job = asked.job(profile) if saved is None else asked.by_plan(saved)
    optimizer = asked.optimizer or USUAL
    found = find_footprint(profile, job, optimizer)
    return f"{profile.name}, {optimizer}", replace(found, notes=(*asked.remark(job), *found.notes))


def _check_batch(asked: MemoryOptions, batch: int | None) -> None:
    """Raise UsageError if the model is only described, so that it has no batch, and no batch size is given."""
    kind = asked.model.partition(":")[0]
    if batch is None and kind in DESCRIBED:
        raise UsageError(f"--batch-size is missing: {kind} is only described; write --batch-size 32")


def _write(directory: Path, found: Footprint) -> None:
    path = directory / MEMORY
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--log-dir: '{path}' cannot be written: {error.strerror}; give another directory") from None
