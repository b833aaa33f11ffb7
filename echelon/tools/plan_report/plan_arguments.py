"""Parse and check the command-line arguments of ``echelon plan`` before the planner and torch are imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from echelon.base.config import build
from echelon.base.errors import UsageError
from echelon.plan.saved_plan import SavedPlan
from echelon.planner.cluster.cluster import Cluster
from echelon.tools.plan_report.plan_options import PlanOptions, memory_words

#: Value of --cluster that means this machine; its GPUs are detected with torch.
HERE = "here"


def parse_plan_options(
    model: str | None, arguments: list[str], explain: str | None, words: dict[str, Any]
) -> PlanOptions:
    """Return the options of one ``echelon plan`` command.

    model:      MODEL argument; None if it was not given
    arguments:  arguments for the training script
    explain:    path of a saved plan whose options are the defaults; None if it was not given
    words:      options by name; None for those that were not given
    """
    given = {name: value for name, value in words.items() if value is not None}
    given["memory"] = memory_words(given.get("memory"))
    if "allow" in given:
        given["allow"] = tuple(filter(None, (name.strip() for name in given["allow"].split(","))))
    if explain is not None:
        return _options_of_plan(explain, model, given)
    if model is None:
        raise UsageError("MODEL is missing; give one (see 'echelon plan --help'), or --explain plan.json")
    if "cluster" not in given:
        raise UsageError("--cluster is missing; write --cluster 4x8xH100, a .yaml file, or --cluster here")
    return PlanOptions(model=model, arguments=tuple(arguments), **given)


def check_plan_options(options: PlanOptions, html: str | None, save: str | None) -> None:
    """Raise UsageError if the cluster is not valid, or if an output file cannot be written."""
    for option, path in (("--html", html), ("--save", save)):
        _check_room(option, path)
    if options.cluster != HERE:
        Cluster.parse(options.cluster, bench=options.bench)


def _check_room(option: str, path: str | None) -> None:
    """Raise UsageError if ``path`` cannot be written, before the search instead of after it."""
    if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        raise UsageError(f"{option} '{path}': it is a directory, or its parent does not exist; give another path")


def _options_of_plan(path: str, model: str | None, given: dict[str, Any]) -> PlanOptions:
    """Return the options that a saved plan was made from, overridden by the options given now."""
    before = SavedPlan.load(path).made_from
    if not before and model is None:
        raise UsageError(f"plan '{path}' names no model; give its MODEL too")
    if not before and "cluster" not in given:
        raise UsageError(f"plan '{path}' names no cluster; give --cluster too")
    words = {name: value for name, value in given.items() if value is not None}
    return build(PlanOptions, {**before, **({"model": model} if model else {}), **words}, f"plan '{path}'")
