"""Hashes text to int64 ids, the same in every process and version (trained tables depend on it).

Surrounding white space is removed, and the text is read in words of eight bytes, the last one padded with zeros. Each
word is mixed into the state, which begins with the salt of the column; the length is mixed in last. A missing value has
its own id, different from that of the empty text.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from echelon.base.kernel_cache import cached_jit

U64 = np.uint64
#: value that is mixed into the salt for a missing value, instead of words
MISSING = 0x6D697373696E6721
_BITS = 2**64 - 1
_WHITE = b" \t\r"


def salt_of(name: str, seed: int = 0) -> int:
    """Return the 64-bit salt of a column: equal values in two columns have different ids."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")


def text_id(text: str | bytes | None, salt: int) -> int:
    """Return the id of one value: ``hash_texts`` in plain Python."""
    if text is None:
        return _signed(_mix(salt ^ MISSING))
    data = (text.encode() if isinstance(text, str) else text).strip(_WHITE)
    state = salt
    for at in range(0, len(data), 8):
        state = _mix(state ^ int.from_bytes(data[at : at + 8], "little"))
    return _signed(_mix((state + len(data)) & _BITS))


def _mix(h: int) -> int:
    """Apply the finalizer of splitmix64, after one step of its counter (otherwise 0 would stay 0)."""
    h = (h + 0x9E3779B97F4A7C15) & _BITS
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _BITS
    return h ^ (h >> 31)


def _signed(h: int) -> int:
    return h - 2**64 if h >= 2**63 else h


@numba.njit(inline="always")
def _mixed(h: Any) -> Any:
    h = h + U64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> U64(27))) * U64(0x94D049BB133111EB)
    return h ^ (h >> U64(31))


@numba.njit(inline="always")
def _is_white(byte: Any) -> Any:
    return byte == 32 or byte == 9 or byte == 13  # noqa: PLR1714  numba


@numba.njit(inline="always")
def _hashed(data: Any, start: Any, stop: Any, salt: Any) -> Any:
    while start < stop and _is_white(data[start]):
        start += 1
    while start < stop and _is_white(data[stop - 1]):
        stop -= 1
    state, at = salt, start
    while at + 8 <= stop:
        word = U64(0)
        for byte in range(8):  # unrolled by the compiler
            word |= U64(data[at + byte]) << U64(8 * byte)
        state = _mixed(state ^ word)
        at += 8
    if at < stop:
        word = U64(0)
        for byte in range(stop - at):
            word |= U64(data[at + byte]) << U64(8 * byte)
        state = _mixed(state ^ word)
    return _mixed(state + U64(stop - start))


@cached_jit((Path(__file__),), nogil=True)
def _hash_all(offsets: Any, data: Any, valid: Any, first: Any, salt: Any, out: Any) -> None:
    """Hash all rows. ``valid`` is Arrow's bitmap, empty if no value is missing; ``first`` is the bit of row 0."""
    missing = np.int64(_mixed(salt ^ U64(MISSING)))
    for row in range(len(out)):
        bit = first + row
        if len(valid) and not (valid[bit >> 3] >> (bit & 7)) & 1:
            out[row] = missing
        else:
            out[row] = np.int64(_hashed(data, offsets[row], offsets[row + 1], salt))


def hash_texts(array: Any, salt: int, out: NDArray[np.int64]) -> None:
    """Write the ids of an Arrow array of (large) text or binary to ``out``, which may be strided."""
    valid, offsets, data = array.buffers()
    wide = str(array.type).startswith("large")
    starts = np.frombuffer(offsets, np.int64 if wide else np.int32)[array.offset : array.offset + len(array) + 1]
    _hash_all(starts, _bytes(data), _bytes(valid), array.offset, U64(salt), out)


def _bytes(buffer: Any) -> NDArray[np.uint8]:
    return np.empty(0, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)
