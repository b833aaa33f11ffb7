"""``StreamRecords``: the states from which a stream that can save its position (``state_dict``) is continued.

A stream that is not stateful is read again from its beginning. A stateful one is continued from a recorded state a
little before the position: so that the samples in the shuffle window and those for padding are read again, too.
"""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from echelon.data.data_source import is_stream
from echelon.data.hugging_face import is_table_stream, shuffles_in_buffer
from echelon.data.loader_options import LoaderOptions

#: Samples at the end of a stateful stream from which the last batch is padded.
RECENT = 256


class StreamRecord(NamedTuple):
    """The state of a stream after ``position`` samples of its epoch."""

    position: int
    state: Mapping[str, Any]


class StreamRecords:
    """The latest records of one pass, one every ``every`` samples."""

    def __init__(self, every: int, first: StreamRecord | None) -> None:
        """Prepare to record. ``first``: the record from which the pass itself is continued, if it is."""
        self._every = every
        self._kept: deque[StreamRecord] = deque([] if first is None else [first], maxlen=4)

    def read(self, stream: Any, begin: int) -> Iterator[Any]:
        """Yield the samples of a stream, and record its state between them. ``begin``: position of the first."""
        for position, sample in enumerate(stream, begin + 1):
            yield sample
            if position % self._every == 0:
                self._record(stream, position)

    def before(self, position: int) -> StreamRecord | None:
        """Return the record from which the samples after ``position`` are read again; None for the beginning."""
        latest = (position // self._every - 1) * self._every
        found = [record for record in self._kept if record.position <= latest]
        return found[-1] if found else None

    def _record(self, stream: Any, position: int) -> None:
        state = stream.state_dict()
        try:
            json.dumps(state)
        except (TypeError, ValueError):
            return  # a checkpoint's head is JSON; the stream is read again from its beginning
        self._kept.append(StreamRecord(position, state))


def is_stateful(dataset: Any, options: LoaderOptions) -> bool:
    """Return True if the loader continues this stream from a saved state.

    A shuffle buffer of the library datasets is not part of its state: what lay in it would be lost. Buckets
    (``lengths``) reach over more samples than are read again.
    """
    able = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
    return (
        able
        and is_stream(dataset)
        and not options.cache
        and options.lengths is None
        and (not shuffles_in_buffer(dataset))
    )


def record_interval(options: LoaderOptions) -> int:
    """Return the samples between two records: whole shuffle windows, and enough for padding and stand-in batches."""
    window = options.shuffle_buffer if options.shuffle else 1
    return -(-max(RECENT, options.global_batch) // window) * window


def continued(dataset: Any, record: StreamRecord) -> Iterable[Any]:
    """Return the stream, to be read from a recorded state on."""
    result = copy.deepcopy(dataset) if is_table_stream(dataset) else dataset  # its own would apply to later epochs, too
    result.load_state_dict(record.state)
    return result  # type: ignore[no-any-return]
