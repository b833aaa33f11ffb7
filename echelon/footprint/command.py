"""``echelon memory``: from the words of a command line to tables, JSON, or memory.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.errors import UsageError
from echelon.footprint.asked import Asked
from echelon.footprint.footprint import Job, find_footprint
from echelon.footprint.script import ask_script
from echelon.footprint.show import show
from echelon.footprint.state import named_optimizer
from echelon.planner.explain import asked as plans
from echelon.planner.explain.source import find_source, is_script
from echelon.planner.machines.cluster import Cluster
from echelon.record.facts import Footprint
from echelon.record.files import MEMORY
from echelon.strict import build

USUAL = "adamw"


def memory_words(
    model: str, arguments: Sequence[str], *, as_json: bool = False, save: str | None = None, **words: Any
) -> None:
    """The command. ``words`` are its other options, as they were written; None where they were not."""
    asked = build(Asked, {"model": model, **words}, "echelon memory")
    if asked.optimizer is not None:
        named_optimizer(asked.optimizer)  # a slip is told before a script has run for minutes
    title, job, found = _of_script(asked, arguments) if is_script(model) else _of_model(asked)
    if save is not None:
        _write(Path(save), found)
    print(json.dumps(found.to_json(), indent=1) if as_json else show(title, job, found))


def _of_script(asked: Asked, arguments: Sequence[str]) -> tuple[str, Job, Footprint]:
    answer = ask_script(asked, arguments)
    found = Footprint.of(answer["footprint"])
    assert found is not None
    return answer["title"], build(Job, answer["job"], "job"), found


def _of_model(asked: Asked) -> tuple[str, Job, Footprint]:
    given = plans.Asked(model=asked.model, cluster=asked.cluster, batch=asked.batch, input=asked.input)
    profile = find_source(given, Cluster.parse(asked.cluster)).profile
    job, optimizer = asked.job(profile.batch), asked.optimizer or USUAL
    return f"{profile.name}, {optimizer}", job, find_footprint(profile, job, optimizer)


def _write(directory: Path, found: Footprint) -> None:
    path = directory / MEMORY
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--save: '{path}' cannot be written: {error.strerror}; give another directory") from None
