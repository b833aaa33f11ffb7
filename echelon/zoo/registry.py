"""Finding models and data sets by name. Modules of ``models`` and ``datasets`` add their own when they are imported."""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Mapping

from echelon.errors import UsageError
from echelon.zoo.entry import Dataset, Model

#: families of models, each with the one that is taken when only the family is named
RUNNERS = {
    "images": "inception_resnet_v2",
    "bert": "bert_base",
    "gpt": "gpt",
    "t5": "t5_moe",
    "classification": "large_scale_classification",
    "ctr": "wide_deep",
    "word2vec": "word2vec",
    "toy": "toy",
}

_models: dict[str, Model] = {}
_datasets: dict[str, Dataset] = {}


def add(entry: Model | Dataset) -> None:
    """Called by the module that has the entry."""
    known: dict[str, Model] | dict[str, Dataset] = _models if isinstance(entry, Model) else _datasets
    assert entry.name not in known, f"two entries are called {entry.name}"
    known[entry.name] = entry  # type: ignore[assignment]


def all_models() -> Mapping[str, Model]:
    """All models by name."""
    _import_all("echelon.zoo.models")
    return _models


def all_datasets() -> Mapping[str, Dataset]:
    """All data sets by name."""
    _import_all("echelon.zoo.datasets")
    return _datasets


def model(name: str) -> Model:
    """The model of this name; ``timm:NAME`` and ``hf:NAME`` are those of other libraries."""
    library, _, inner = name.partition(":")
    if inner:
        from echelon.zoo.borrowed import borrow

        return borrow(library, inner)
    if name not in all_models():
        raise UsageError(f"there is no model '{name}'{_nearest_three(name, _models)} (see 'echelon zoo list')")
    return _models[name]


def dataset(name: str) -> Dataset:
    if name not in all_datasets():
        raise UsageError(f"there is no data set '{name}'; known: {', '.join(sorted(_datasets))}")
    return _datasets[name]


def _nearest_three(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
    return f"; the nearest are {', '.join(close)}"


@functools.cache
def _import_all(name: str) -> None:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(found.name)
