"""Support for data sets of Hugging Face, which are recognized without importing the library."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Subset, default_collate

from echelon.base.errors import DataError
from echelon.data.joined_datasets import JoinedDatasets
from echelon.data.repeated import Repeated, RepeatedStream

#: Number of rows in the checksum that ranks compare.
COMPARED = 16


def is_table(dataset: Any) -> bool:
    """Return True for ``datasets.Dataset``."""
    return _is_one_of(dataset, "Dataset")


def has_columns(dataset: Any) -> bool:
    """Return True if the samples are rows of a Hugging Face data set, or of a subset of one."""
    while type(dataset) in (Subset, Repeated, RepeatedStream):
        dataset = dataset.dataset
    if isinstance(dataset, JoinedDatasets):
        return all(map(has_columns, dataset.parts))
    return is_table(dataset) or is_table_stream(dataset)


def is_table_stream(dataset: Any) -> bool:
    """Return True for ``datasets.IterableDataset``."""
    return _is_one_of(dataset, "IterableDataset")


def shuffles_in_buffer(dataset: Any) -> bool:
    """Return True if a stream of the library shuffles in a buffer, or if that cannot be seen."""
    if not is_table_stream(dataset):
        return False
    pending = [getattr(dataset, "_ex_iterable", None)]
    for one in pending:
        if one is None or "BufferShuffled" in type(one).__name__:
            return True
        inner = getattr(one, "ex_iterable", None)
        pending += [*getattr(one, "ex_iterables", ()), *([] if inner is None else [inner])]
    return False


def reads_rows_at_once(dataset: Any) -> bool:
    """Return True if ``__getitems__`` reads many rows at once without running user code.

    A transform (``set_transform``) may draw random numbers, and would draw them for all rows together.
    """
    inner: Any = dataset.dataset if type(dataset) is Subset else dataset
    return is_table(inner) and hasattr(inner, "__getitems__") and inner.format["type"] != "custom"


def refuse_whole(dataset: Any, world_size: int) -> None:
    """Raise for a dict of data sets, and for a stream that is already split by rank."""
    if _is_one_of(dataset, "DatasetDict", "IterableDatasetDict"):
        names = ", ".join(map(repr, dataset))
        raise DataError(
            f"{type(dataset).__name__} holds the data sets {names}; pass one of them, such as data['train']"
        )
    if world_size > 1 and is_table_stream(dataset) and getattr(dataset, "_distributed", None) is not None:
        raise DataError(
            "the IterableDataset was split with split_dataset_by_node(), and engine.loader() deals samples out itself; "
            "pass it as it was before, or add rank=0, world_size=1"
        )


def column_collate(samples: list[Any]) -> Any:
    """Collate rows; a column of lists of numbers becomes one tensor, as it does with ``with_format("torch")``.

    torch's ``default_collate`` would make a list with one tensor per position of the row.
    """
    first = samples[0]
    if not isinstance(first, Mapping):
        return default_collate(samples)
    return {name: _column(name, [sample[name] for sample in samples]) for name in first}


def checksum(dataset: Any) -> int | None:
    """Return a checksum of a few rows as stored; None for other data sets."""
    if not is_table(dataset):
        return None
    rows = sorted({round(at * (len(dataset) - 1) / (COMPARED - 1)) for at in range(COMPARED)})
    return zlib.crc32(repr(dataset.with_format("arrow")[rows].to_pylist()).encode())


def _column(name: str, values: list[Any]) -> Any:
    if not isinstance(values[0], list):
        return default_collate(values)
    try:
        return torch.tensor(values)
    except (TypeError, ValueError) as error:
        lengths = sorted({len(value) for value in values if isinstance(value, list)})
        if len(lengths) > 1:
            raise ValueError(f"column '{name}' has rows of {lengths[0]} and of {lengths[-1]} entries") from None
        raise ValueError(f"column '{name}' cannot become a tensor: {error}") from None


def _is_one_of(dataset: Any, *names: str) -> bool:
    library = sys.modules.get("datasets")
    kinds = tuple(getattr(library, name) for name in names if hasattr(library, name))
    return bool(kinds) and isinstance(dataset, kinds)
