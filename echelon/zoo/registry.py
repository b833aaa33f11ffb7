"""Finding models and data sets by name. Modules of ``models`` and ``datasets`` add their own when they are imported."""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Collection, Mapping

from echelon.base.errors import UsageError
from echelon.zoo.entry import Dataset, Model
from echelon.zoo.entry_names import DATASETS, MODELS

#: names of data sets that earlier systems gave them
SYNONYMS = {"mock_image": "mock"}

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
    """The model of this name; ``timm:NAME`` and ``hf:NAME`` are those of other libraries, ``file.py:Name`` a user's."""
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
    """Refuse what names neither a model nor a data set; nothing of the zoo is imported for it."""
    if ":" not in name and name not in MODELS | DATASETS | _models.keys() | _datasets.keys():
        raise _no_model(name)


def _no_model(name: str) -> UsageError:
    near = _nearest_three(name, MODELS)
    return UsageError(f"there is no model '{name}'{near} (see 'echelon zoo list'; one of your own is file.py:Name)")


def dataset(name: str) -> Dataset:
    """Return the data set of this name; ``file.py:Name`` is one of the user's."""
    if _is_own(name):
        from echelon.zoo.own import own_dataset

        return own_dataset(name)
    require_dataset(name)
    return all_datasets()[SYNONYMS.get(name, name)]


def require_dataset(name: str) -> None:
    """Refuse what names no data set; nothing of the zoo is imported for it."""
    if ":" in name or SYNONYMS.get(name, name) in DATASETS | _datasets.keys():
        return
    close = difflib.get_close_matches(name, DATASETS, n=1)
    meant = f"did you mean '{close[0]}'? " if close else ""
    raise UsageError(
        f"there is no data set '{name}'; {meant}known: {', '.join(sorted(DATASETS))} (one of your own is file.py:Name)"
    )


def _is_own(name: str) -> bool:
    if ":" not in name:  # most names need no import
        return False
    from echelon.zoo.own.own_object import is_place

    return is_place(name)


def _nearest_three(name: str, known: Collection[str]) -> str:
    """Name the closest; of equally close ones the first by name: resnet_v1_50 before resnet_v2_50."""
    close = sorted(known, key=lambda each: (-difflib.SequenceMatcher(None, name, each).ratio(), each))
    return f"; the nearest are {', '.join(close[:3])}"


@functools.cache
def _import_all(name: str) -> None:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(found.name)
