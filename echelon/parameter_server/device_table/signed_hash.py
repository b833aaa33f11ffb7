"""The hash of ids in torch's operations, which have no unsigned 64-bit integers; same bits as ``hashing.mix``."""

from __future__ import annotations

from torch import Tensor

from echelon.parameter_server.protocol.job_spec import BUCKETS

#: Low half of a word.
LOW_HALF = 0xFFFFFFFF


def signed(word: int) -> int:
    """Return the signed number with the same 64 bits."""
    word %= 2**64
    return word - 2**64 if word >= 2**63 else word


_FIRST, _SECOND = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def shifted(words: Tensor, by: int) -> Tensor:
    """Shift words to the right as unsigned ones."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def mix(keys: Tensor) -> Tensor:
    """Return the 64-bit hash of each int64, as int64."""
    words = (keys ^ shifted(keys, 30)) * _FIRST
    words = (words ^ shifted(words, 27)) * _SECOND
    return words ^ shifted(words, 31)


def bucket_of(ids: Tensor) -> Tensor:
    """Return the bucket of each id, like ``hashing.bucket_of``."""
    return (shifted(mix(ids), 32) * BUCKETS) >> 32
