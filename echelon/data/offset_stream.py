"""``OffsetStream``: an iterator with offsets, such as a consumer of a message queue, as a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from echelon.base.errors import DataError, UsageError
from echelon.data.data_source import kind_name
from echelon.data.resumable_source import ResumableStream


class OffsetStream(ResumableStream):
    """Records with offsets, which a checkpoint holds: a resumed run reads on behind the last one it trained on.

    source: one of these. A function that is given the offset of the last record that was read, or None at the
            beginning, and returns pairs of an offset and a record from there on. An object with ``seek(offset)``, where
            seeking an offset means reading on behind it, whose iterator yields such pairs. An object with
            ``state_dict`` and ``load_state_dict``, whose iterator yields records alone
    parse:  function that makes a sample of a record, on the rank that keeps it only; default: the record is the sample
    repeat: True reads all records again in every epoch; default False: an epoch reads on behind the one before

    An offset is a JSON value: a number, a text, or lists and dicts of them. All ranks read the same records in the same
    order.

    >>> def read_after(offset):
    ...     first = 0 if offset is None else offset + 1
    ...     return ((n, torch.tensor([float(n)])) for n in range(first, 1000))
    >>> stream = echelon.data.OffsetStream(read_after)
    """

    def __init__(self, source: Any, *, parse: Callable[[Any], Any] | None = None, repeat: bool = False) -> None:
        super().__init__(parse, repeat)
        self._source = source
        self._read_after: Callable[[Any], Iterable[tuple[Any, Any]]]
        if hasattr(source, "state_dict") and hasattr(source, "load_state_dict"):
            self._beginning = source.state_dict()
            self._read_after = self._by_state
        elif hasattr(source, "seek"):
            self._read_after = self._by_seek
        elif callable(source):
            self._read_after = source
        else:
            raise UsageError(
                f"OffsetStream({kind_name(source)}): expected a function of an offset, or an object with seek(offset), "
                "or with state_dict() and load_state_dict()"
            )

    def __repr__(self) -> str:
        return f"OffsetStream({kind_name(self._source)})"

    def samples_after(self, place: Any) -> Iterator[tuple[Any, Any]]:
        for pair in self._read_after(place):
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise DataError(
                    f"{self} yielded a {type(pair).__name__}; it has to yield pairs of an offset and a record"
                )
            yield pair

    def _by_seek(self, place: Any) -> Iterator[tuple[Any, Any]]:
        self._source.seek(place)
        yield from self._source

    def _by_state(self, place: Any) -> Iterator[tuple[Any, Any]]:
        self._source.load_state_dict(self._beginning if place is None else place)
        for record in self._source:
            yield self._source.state_dict(), record
