"""Encoding of a message as one row of a fixed Arrow schema, for the stream between a worker and a server.

Column 0 is the head, the others are the arrays, each in its own buffer. Nothing is copied together: Arrow hands the
arrays' memory to the socket, and on the other side ``unpack`` reads the memory that the message arrived in.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from echelon.parameter_server.protocol.message import MAX_ARRAYS, MAX_HEAD, WireMessage, WireMessageError, pack, unpack

_BLOB = pa.large_binary()
SCHEMA = pa.schema([("head", _BLOB), *((f"array{at}", _BLOB) for at in range(MAX_ARRAYS))])
_OFFSETS = struct.Struct("<qq")


def _column(body: Any, size: int) -> Any:
    return pa.Array.from_buffers(_BLOB, 1, [None, pa.py_buffer(_OFFSETS.pack(0, size)), pa.py_buffer(body)], 0)


_ABSENT = [_column(b"", 0)] * MAX_ARRAYS


def to_batch(frame: WireMessage) -> Any:
    """Return the message as a record batch of one row; its arrays must stay unchanged until the batch is sent."""
    head, bodies = pack(frame)
    columns = [_column(head, len(head)), *(_column(body, body.nbytes) for body in bodies), *_ABSENT[len(bodies) :]]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def from_batch(batch: Any) -> WireMessage:
    """Return the message in a batch of ``SCHEMA``. The batch is untrusted, so it is checked before it is used."""
    if batch is None or batch.num_rows != 1:
        raise WireMessageError(f"a message of {0 if batch is None else batch.num_rows} rows; it must have one")
    head = _body(batch, 0)
    if len(head) > MAX_HEAD:
        raise WireMessageError(f"a message head of {len(head)} bytes is over the limit of {MAX_HEAD}")
    return unpack(bytes(head), _Bodies(batch))


class _Bodies(Sequence[memoryview]):
    """The arrays' bytes, read only for the arrays that the head names."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return MAX_ARRAYS

    def __getitem__(self, at: Any) -> Any:
        if at >= MAX_ARRAYS:
            raise IndexError(at)
        return _body(self._batch, at + 1)


def _body(batch: Any, at: int) -> memoryview:
    """Return the memory of one cell. Arrow does not check offsets that came over the wire, so this function does."""
    column = batch.column(at)
    valid, offsets, data = column.buffers()
    if valid is not None or column.offset or offsets is None or offsets.size < _OFFSETS.size:
        raise WireMessageError("a message whose columns are not plain bytes")
    first, last = _OFFSETS.unpack_from(offsets)
    if not 0 <= first <= last <= (data.size if data is not None else 0):
        raise WireMessageError(f"a message without its bytes {first} to {last}")
    return memoryview(data)[first:last] if data is not None else memoryview(b"")
