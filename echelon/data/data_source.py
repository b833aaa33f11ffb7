"""The interface of data sources: they yield requests for batches, and answer each request.

Requests are made in the main process, in order. They are answered there or in a worker process, so a request carries
everything its answer depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch.utils.data

from echelon.base.errors import DataError
from echelon.data.cursor import Cursor


class RankBatch(NamedTuple):
    """One rank's part of one step. It is a tuple, so that torch's pinning thread pins the tensors in it."""

    batch: Any
    #: samples in it that count: 0 for a stand-in batch
    share: int
    #: samples of the global order that this step uses, over all ranks
    taken: int
    #: sequence elements in it, and the number of elements after padding
    real: int = 0
    room: int = 0
    #: seconds that reading it took, in the process that read it
    seconds: float = 0.0
    #: checksum of the samples that all ranks read from a stream, in the first step of an epoch
    mark: int | None = None
    #: place from which the samples after this step are read: ``resumable_source.Anchor``, ``stream_state.StreamRecord``
    anchor: Any = None


class DataSource(Protocol):
    """One data set, as read by one rank."""

    #: samples in the whole data set; None if it is known only after reading
    size: int | None

    def requests(self, cursor: Cursor) -> Iterator[Any]:
        """Yield requests from ``cursor`` to the end of its epoch (without end if the end is unknown)."""

    def fetch(self, request: Any) -> Any:
        """Return the ``RankBatch`` for one request; None after the end."""


class UnknownLengthError(DataError, TypeError):
    """The length of a loader is unknown. It is a TypeError too, because ``list(loader)`` ignores only that."""


def seen_lengths(lengths: Sequence[int]) -> tuple[int, int]:
    """Return the number of elements, and the number after padding all sequences to the longest."""
    return sum(lengths), len(lengths) * max(lengths, default=0)


def kind_name(dataset: Any) -> str:
    return type(dataset).__name__


def too_few(found: int, uneven: str, world_size: int, global_batch: int) -> str:
    """Return why ``found`` samples are not enough; empty if they are."""
    if found == 0:
        return "the data set is empty; check its path or filter"
    if found < world_size:
        return f"{found} samples for {world_size} ranks: every rank needs one; use fewer ranks or more data"
    if uneven == "drop" and found < global_batch:
        return (
            f"uneven='drop' keeps full batches only, but {found} samples do not fill one of {global_batch} "
            f"({global_batch // world_size} for each of {world_size} ranks); use a smaller batch_size or uneven='pad'"
        )
    return ""


def is_stream(dataset: Any) -> bool:
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def lengths_function(lengths: Any) -> Callable[[Any], int] | None:
    """Return ``lengths`` if it is a function of a sample, or None; raise for a list: a stream has no indices."""
    if lengths is not None and not callable(lengths):
        raise DataError(
            "lengths= is a list, but the samples of a stream have no numbers to look up in it; "
            "pass a function of a sample, such as lengths=len"
        )
    return lengths  # type: ignore[no-any-return]
