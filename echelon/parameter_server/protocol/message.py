"""The message format: a small JSON head and a few arrays.

Everything that is sent to a server or written to a file has this form.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import EchelonError, one_line
from echelon.base.json_head import parse_object

#: Allowed dtypes of arrays.
KINDS = {kind: np.dtype(kind) for kind in ("int64", "int32", "float32", "float64", "uint8", "uint16", "uint32")}
#: Limits of one message. A larger message is refused before memory is allocated for it.
MAX_HEAD, MAX_ARRAYS, MAX_BYTES = 16 * 2**20, 8, 2 * 2**30


class WireMessageError(EchelonError):
    """The bytes are not a valid message, or the message is beyond the limits."""


@dataclass
class WireMessage:
    """A message: ``head`` is JSON, ``arrays`` are at most eight numpy arrays of the dtypes in ``KINDS``.

    parsed: the request in it, once it is parsed, for the receiver alone; None before
    """

    head: dict[str, Any]
    arrays: list[NDArray[Any]] = field(default_factory=list)
    parsed: Any = field(default=None, compare=False, repr=False)


def pack(frame: WireMessage) -> tuple[bytes, list[memoryview]]:
    """Return the encoded head, with the arrays' dtypes and shapes, and the arrays' bytes.

    Contiguous arrays are not copied. Raises ``WireMessageError`` if the message is beyond the limits.
    """
    arrays = [np.ascontiguousarray(array) for array in frame.arrays]
    shapes = [[array.dtype.name, list(array.shape)] for array in arrays]
    head = json.dumps({**frame.head, "arrays": shapes}, separators=(",", ":")).encode()
    if len(arrays) > MAX_ARRAYS or len(head) > MAX_HEAD or sum(array.nbytes for array in arrays) > MAX_BYTES:
        raise WireMessageError(
            f"a message of {len(arrays)} arrays and {sum(array.nbytes for array in arrays)} bytes is over the limits "
            f"({MAX_ARRAYS} arrays, {MAX_BYTES} bytes); use smaller batches"
        )
    return head, [
        memoryview(array.reshape(-1).view(np.uint8).data) if array.size else memoryview(b"") for array in arrays
    ]


def unpack(head: bytes, bodies: Sequence[Any]) -> WireMessage:
    """Decode what ``pack`` returned; ``bodies`` are bytes-like. Raises ``WireMessageError`` for invalid input."""
    if len(head) > MAX_HEAD:
        raise WireMessageError(f"a message head of {len(head)} bytes is over the limit of {MAX_HEAD}")
    try:
        known = parse_object(head)
        shapes = known.pop("arrays")
        if not isinstance(shapes, list) or len(shapes) > min(MAX_ARRAYS, len(bodies)):
            raise ValueError("it announces arrays that it does not contain")
        return WireMessage(
            known, [_array(kind, shape, body) for (kind, shape), body in zip(shapes, bodies, strict=False)]
        )
    except WireMessageError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise WireMessageError(f"a message cannot be read: {one_line(error)}") from None


def _array(kind: str, shape: list[int], body: Any) -> NDArray[Any]:
    dtype = KINDS[kind]
    size = 1
    for extent in shape:
        if type(extent) is not int or extent < 0:
            raise ValueError(f"a dimension of {extent!r}")
        size *= extent
    if size * dtype.itemsize != memoryview(body).nbytes or memoryview(body).nbytes > MAX_BYTES:
        raise ValueError(f"{memoryview(body).nbytes} bytes for an array of {size} {kind}")
    if not size:
        return np.empty(shape, dtype)
    array = np.frombuffer(body, dtype).reshape(shape)
    return array if array.flags.aligned else array.copy()
