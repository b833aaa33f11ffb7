"""Format the output of ``echelon zoo list`` and ``echelon zoo show NAME``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from torch import nn

from echelon.base.formatting import count, size, text_table
from echelon.zoo import registry
from echelon.zoo.entry import Dataset, Model, Setting
from echelon.zoo.own.own_object import found_at, is_place
from echelon.zoo.sample import sample
from echelon.zoo.train.optimizers import make_optimizer
from echelon.zoo.train.statistics import ModelStatistics, statistics


def list_zoo(as_json: bool) -> str:
    models = sorted(registry.all_models().values(), key=_by_family_and_size)
    datasets = sorted(registry.all_datasets().values(), key=lambda entry: entry.name)
    if as_json:
        return json.dumps(
            {
                "models": {entry.name: _model_row(entry) for entry in models},
                "datasets": {entry.name: {"about": entry.about, "tasks": entry.tasks} for entry in datasets},
            },
            indent=2,
        )
    lines = ["models (timm:NAME and hf:NAME are those of the libraries timm and transformers, file.py:Name your own):"]
    for runner, members in groupby(models, key=lambda entry: entry.runner):
        lines += ["", f"  {runner}"]
        rows = [(entry.name, _size(entry), _about(entry, models)) for entry in members if entry.same_as is None]
        lines += text_table(rows, indent=4)
    lines += ["", "data sets:", ""]
    lines += text_table([(entry.name, entry.about) for entry in datasets], indent=4)
    return "\n".join(lines)


#: The suffix of a name that gives the size of the model within its family.
_SIZE = re.compile(r"_(tiny|mini|small|medium|base|large|xl|\d+)$")


def _by_family_and_size(entry: Model) -> tuple[int, str, int, str]:
    return list(registry.RUNNERS).index(entry.runner), _SIZE.sub("", entry.name), _known_size(entry), entry.name


def _known_size(entry: Model) -> int:
    return entry.parameters or (0 if entry.name.endswith("_tiny") else 1)


def _about(entry: Model, models: Iterable[Model]) -> str:
    """Return the description of the entry, with its aliases."""
    others = [other.name for other in models if other.same_as == entry.name]
    return f"{entry.about}; the name {' and '.join(others)} means it too" if others else entry.about


def show_zoo_entry(name: str, as_json: bool) -> str:
    if is_place(name):
        return _shown_own(name, as_json)
    if name in registry.all_datasets() and name not in registry.all_models():
        return _shown_dataset(registry.dataset(name), as_json)
    entry = registry.model(name)
    made = sample(name, batch=1, device="meta" if not _has_tables(entry) else None)
    result = statistics(made.model, made.batch, make_optimizer(made.model, made.resolved.request))
    if as_json:
        return json.dumps({"name": entry.name, **_model_row(entry), **_figures(result)}, indent=2)
    return "\n".join([*_headline(entry, result), *_advice(entry), *_settings("its own parameters", entry.settings)])


def _shown_own(place: str, as_json: bool) -> str:
    """Return a table of the parameters of a user's class, without costs, which depend on the data."""
    found = found_at(place, "zoo show")
    option = "--model_name" if isinstance(found, type) and issubclass(found, nn.Module) else "--dataset_name"
    entry = registry.model(place) if option == "--model_name" else registry.dataset(place)
    if as_json:
        return json.dumps({"name": place, "settings": {each.name: each.default for each in entry.settings}}, indent=2)
    rows = [("its defaults", " ".join(f"--{key} {value}" for key, value in entry.defaults.items()) or "-")]
    rows.append(("train it", f"echelon train {option} {place}"))
    return "\n".join([entry.about, "", *text_table(rows, indent=2), *_settings("its own parameters", entry.settings)])


def _has_tables(entry: Model) -> bool:
    """Return True if the model has sparse tables.

    They cannot be built on the meta device, but they are empty at first and take no memory.
    """
    return entry.runner in ("ctr", "word2vec")


def _headline(entry: Model, found: ModelStatistics) -> list[str]:
    tasks = "; ".join(f"{kind}: {', '.join(tasks)}" for kind, tasks in entry.tasks.items())
    rows = [
        ("runner", entry.runner),
        ("learns", tasks),
        ("parameters", f"{found.parameters:,}" + (f" (published: {_published(entry)})" if entry.parameters else "")),
        ("arithmetic", _arithmetic(found)),
        ("memory", _memory(found)),
    ]
    return [f"{entry.name}: {entry.about}", "", *text_table(rows, indent=2)]


def _arithmetic(found: ModelStatistics) -> str:
    if found.multiply_adds is None:
        return f"not known: {found.reason}"
    return f"{count(found.multiply_adds)} multiply-adds forward, for each example"


def _memory(found: ModelStatistics) -> str:
    parts = {"weights": found.weights, "gradients": found.gradients, "optimizer": found.state}
    held = ", ".join(f"{name} {size(amount)}" for name, amount in parts.items() if amount is not None)
    return held + ("" if found.activations is None else f"; activations {size(found.activations)} for each example")


def _published(entry: Model) -> str:
    where = " with " + ", ".join(f"{name} {value}" for name, value in entry.counted.items()) if entry.counted else ""
    return f"{entry.parameters:,}{where}, {entry.published}"


def _advice(entry: Model) -> list[str]:
    flags = " ".join(_flag(name, value) for name, value in entry.strategy.items())
    rows = [
        ("recommended", f"{flags or 'nothing'}{f': {entry.advice}' if entry.advice else ''}"),
        ("recompute", ", ".join(entry.recompute) or "-"),
        ("stages may begin at", _shortened(entry.cuts)),
        ("--split model", "; ".join(f"{name}: {_marks(marks)}" for name, marks in entry.split.items()) or "-"),
        ("its defaults", " ".join(f"--{name} {value}" for name, value in entry.defaults.items()) or "-"),
        ("try it", f"echelon train --model_name {entry.name} {_tiny(entry)}".rstrip()),
    ]
    return ["", *text_table(rows, indent=2)]


def _tiny(entry: Model) -> str:
    return " ".join(f"--{name} {value}" for name, value in entry.tiny.items())


def _flag(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"--{name}.{inner} {each}" for inner, each in value.items())
    return f"--{name}" if value is True else f"--{name} {value}"


def _marks(marks: Any) -> str:
    return " and ".join(str(mark) for mark in (marks if isinstance(marks, list) else [marks]))


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 8 else [*names[:4], "...", *names[-2:]]) or "-"


def _settings(title: str, settings: Iterable[Setting]) -> list[str]:
    rows = [(f"--{each.name}", _shown_default(each.default), each.meaning) for each in settings]
    return ["", f"  {title}:", *text_table(rows, indent=4)] if rows else []


def _shown_default(value: Any) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _shown_dataset(entry: Dataset, as_json: bool) -> str:
    if as_json:
        return json.dumps({"name": entry.name, "about": entry.about, "tasks": entry.tasks}, indent=2)
    models = [model.name for model in registry.all_models().values() if _fits(model, entry)]
    rows = [("feeds", ", ".join(entry.tasks)), ("models", _shortened(models))]
    lines = [f"{entry.name}: {entry.about}", "", *text_table(rows, indent=2)]
    return "\n".join([*lines, *_settings("its own parameters", entry.settings)])


def _fits(model: Model, dataset: Dataset) -> bool:
    return any(task in dataset.tasks for tasks in model.tasks.values() for task in tasks)


def _model_row(entry: Model) -> dict[str, Any]:
    return {
        "runner": entry.runner,
        "about": entry.about,
        "tasks": dict(entry.tasks),
        "published_parameters": entry.parameters,
        "strategy": dict(entry.strategy),
        "recompute": entry.recompute,
        "cuts": entry.cuts,
        "split": {name: _marks(marks) for name, marks in entry.split.items()},
        "defaults": dict(entry.defaults),
        "settings": {each.name: each.default for each in entry.settings},
    }


def _figures(found: ModelStatistics) -> dict[str, Any]:
    return {"parameters": found.parameters, "multiply_adds": found.multiply_adds}


def _size(entry: Model) -> str:
    return f"{count(entry.parameters)}" if entry.parameters else "-"
