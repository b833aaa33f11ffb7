"""Find models and data sets by name; modules of ``models`` and ``datasets`` register their entries on import."""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from echelon.base.errors import UsageError
from echelon.zoo.entry import Dataset, Model
from echelon.zoo.entry_names import DATASETS, MODELS

#: former names of data sets -> present names
SYNONYMS = {"mock_image": "mock"}

#: model family -> the model that is used if only the family is given
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
    """Register an entry; called by the module that defines it."""
    known: dict[str, Model] | dict[str, Dataset] = _models if isinstance(entry, Model) else _datasets
    assert entry.name not in known, f"two entries are called {entry.name}"
    known[entry.name] = entry  # type: ignore[assignment]


def all_models() -> Mapping[str, Model]:
    """Return all models by name."""
    _import_all("echelon.zoo.models")
    return _models


def all_datasets() -> Mapping[str, Dataset]:
    """Return all data sets by name."""
    _import_all("echelon.zoo.datasets")
    return _datasets


def model(name: str) -> Model:
    """Return a model of the zoo.

    name: name of an entry; ``timm:NAME`` and ``hf:NAME`` are library models, ``file.py:Name`` is a user's

    >>> entry = echelon.zoo.model("resnet_v1_50")
    """
    library, _, inner = name.partition(":")
    if _is_own(name):
        from echelon.zoo.own import own_model

        return own_model(name)
    if inner:
        from echelon.zoo.library_models import borrow

        return borrow(library, inner)
    if name not in MODELS and name not in _models:
        raise _no_model(name)
    return all_models()[name]


def require_name(name: str) -> None:
    """Raise UsageError if the name is neither a model nor a data set, without importing the modules of the zoo."""
    if ":" not in name and name not in MODELS | DATASETS | _models.keys() | _datasets.keys():
        raise _no_model(name)


def _no_model(name: str) -> UsageError:
    near = _nearest_three(name, MODELS)
    return UsageError(f"there is no model '{name}'{near} (see 'echelon zoo list'; one of your own is file.py:Name)")


@functools.cache
def setting_names() -> frozenset[str]:
    """Return the names of all parameters of models and data sets; read from source, as an import would import torch."""
    sources = (file.read_text(encoding="utf-8") for file in Path(__file__).parent.rglob("*.py"))
    return frozenset(name for source in sources for name in re.findall(r'Setting\(\s*name="(\w+)"', source))


def dataset(name: str) -> Dataset:
    """Return a data set of the zoo.

    name: name of an entry; ``file.py:Name`` is a user's data set

    >>> entry = echelon.zoo.dataset("digits")
    """
    if _is_own(name):
        from echelon.zoo.own import own_dataset

        return own_dataset(name)
    require_dataset(name)
    return all_datasets()[SYNONYMS.get(name, name)]


def require_dataset(name: str) -> None:
    """Raise UsageError if the name is no data set, without importing the modules of the zoo."""
    if ":" in name or SYNONYMS.get(name, name) in DATASETS | _datasets.keys():
        return
    close = difflib.get_close_matches(name, DATASETS, n=1)
    meant = f"did you mean '{close[0]}'? " if close else ""
    raise UsageError(
        f"there is no data set '{name}'; {meant}known: {', '.join(sorted(DATASETS))} (one of your own is file.py:Name)"
    )


def _is_own(name: str) -> bool:
    if ":" not in name:  # avoids the import for most names
        return False
    from echelon.zoo.own.own_object import is_place

    return is_place(name)


def _nearest_three(name: str, known: Collection[str]) -> str:
    """Return text that names the closest three; ties are in alphabetical order: resnet_v1_50 before resnet_v2_50."""
    close = sorted(known, key=lambda each: (-difflib.SequenceMatcher(None, name, each).ratio(), each))
    return f"; the nearest are {', '.join(close[:3])}"


@functools.cache
def _import_all(name: str) -> None:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(found.name)
