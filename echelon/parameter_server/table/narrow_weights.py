"""Weights of a record in 16 or 8 bits, and their rounding.

    bf16   two weights in a word, each the upper half of a float32
    int8   ``dim`` signed bytes, then a byte e: weight j is byte j times 2 ** (e - 133)

An update rounds stochastically: a weight between two neighbours of its format becomes the upper one with a probability
equal to its distance from the lower one, so that updates smaller than a step are not lost on average. The draw is a
hash of (seed of the table, id, number of the id's pushes, column), so a replayed journal, another number of servers and
a numpy reference give the same bits. A row's scale in int8 is a power of two, so that a weight without an update keeps
its value as long as the scale stays or becomes finer. Conversions outside of updates round to the nearest.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from echelon.parameter_server.protocol.hashing import mix
from echelon.parameter_server.table.compiled import inner, kernel, load32, load_float, store32, store_float
from echelon.parameter_server.table.initial import begin
from echelon.parameter_server.table.records import (
    AHEAD,
    COUNT,
    DIM,
    META,
    NEW,
    SEED,
    SLOT,
    STATE,
    WORDS,
    Float32s,
    Float64s,
    Int64s,
    Words,
    fetch,
)

#: Numbers of the formats.
FLOAT32, BF16, INT8 = 0, 1, 2
#: Further indices of the description of a record: its format, and the words that the same record takes as float32.
KIND, WIDE = 5, 6

_SALT, _STEP = np.uint64(0xA0761D6478BD642F), np.uint64(0x9E3779B97F4A7C15)
_U32, _U16, _U8 = np.uint64(0xFFFFFFFF), np.uint64(0xFFFF), np.uint64(0xFF)
_MAGNITUDE, _INFINITY, _QUIET = np.uint64(0x7FFFFFFF), np.uint64(0x7F800000), np.uint64(0x40)
_MANTISSA, _MOST = np.uint64(0x7FFFFF), np.uint64(0x7E0000)  # 127 / 64 is the largest mantissa that a byte can hold
_HALF = np.uint64(0x7FFF)
_NOT_FINITE = 255
_BIAS = 133  # a float32 with exponent field e is below 2 ** (e - 126), which is 128 * 2 ** (e - 133)


def weight_words(kind: int, dim: int) -> int:
    """Return the number of 32-bit words of ``dim`` weights."""
    return {FLOAT32: dim, BF16: -(-dim // 2), INT8: -(-(dim + 1) // 4)}[kind]


@inner
def _stream(seed: int, key: int, version: Any) -> Any:
    """Return the start of the random numbers of one rounding of one row."""
    return mix(mix(mix(np.uint64(seed) ^ _SALT) ^ np.uint64(key)) ^ np.uint64(version))


@inner
def read_weights(row: int, dim: int, kind: int, out: int) -> None:
    """Write the weights of the record at address ``row`` as float32 to address ``out``."""
    if kind == BF16:
        for j in range(dim):
            half = (np.uint64(load32(row + 4 * (j >> 1))) >> np.uint64(16 * (j & 1))) & _U16
            store32(out + 4 * j, np.uint32(half << np.uint64(16)))
    else:
        exponent: Any = np.int64((np.uint64(load32(row + 4 * (dim >> 2))) >> np.uint64(8 * (dim & 3))) & _U8)
        scale = math.nan if exponent == _NOT_FINITE else math.ldexp(1.0, exponent - _BIAS)
        for j in range(dim):
            byte = np.int64((np.uint64(load32(row + 4 * (j >> 2))) >> np.uint64(8 * (j & 3))) & _U8)
            store_float(out + 4 * j, np.float32((byte if byte < 128 else byte - 256) * scale))


@inner
def write_weights(row: int, dim: int, kind: int, values: int, stream: Any, nearest: bool) -> None:
    """Round the float32 weights at address ``values`` into the record at address ``row``."""
    if kind == BF16:
        _write_halves(row, dim, values, stream, nearest)
    else:
        _write_bytes(row, dim, values, stream, nearest)


@inner
def _write_halves(row: int, dim: int, values: int, stream: Any, nearest: bool) -> None:
    drawn = low = np.uint64(0)
    for j in range(dim):
        if j & 3 == 0:
            drawn = mix(stream + np.uint64(1 + (j >> 2)) * _STEP)
        bits = np.uint64(load32(values + 4 * j))
        added = _HALF + ((bits >> np.uint64(16)) & np.uint64(1)) if nearest else drawn & _U16
        drawn >>= np.uint64(16)
        half = _rounded_half(bits, added)
        if j & 1:
            store32(row + 4 * (j >> 1), np.uint32(low | (half << np.uint64(16))))
        else:
            low = half
    if dim & 1:
        store32(row + 4 * (dim >> 1), np.uint32(low))


@inner
def _rounded_half(bits: Any, added: Any) -> Any:
    """Return the upper half after ``added`` went to the lower one; finite stays finite, a NaN stays a NaN."""
    magnitude = bits & _MAGNITUDE
    if magnitude > _INFINITY:
        return (bits >> np.uint64(16)) | _QUIET
    if magnitude == _INFINITY or magnitude + added >= _INFINITY:
        return bits >> np.uint64(16)
    return (bits + added) >> np.uint64(16)


@inner
def _exponent(values: int, dim: int) -> Any:
    """Return the exponent byte of the finest scale at which all weights fit into [-127, 127]."""
    most = np.uint64(0)
    for j in range(dim):
        most = max(most, np.uint64(load32(values + 4 * j)) & _MAGNITUDE)
    return min(np.int64(most >> np.uint64(23)) + np.int64((most & _MANTISSA) > _MOST), _NOT_FINITE)


@inner
def _write_bytes(row: int, dim: int, values: int, stream: Any, nearest: bool) -> None:
    exponent = _exponent(values, dim)
    inverse = 0.0 if exponent == _NOT_FINITE else math.ldexp(1.0, _BIAS - exponent)
    drawn = word = np.uint64(0)
    for j in range(dim + 1):
        byte = np.uint64(exponent)
        if j < dim:
            if j & 1 == 0:
                drawn = mix(stream + np.uint64(1 + (j >> 1)) * _STEP)
            byte = (
                np.uint64(_rounded_byte(np.float64(load_float(values + 4 * j)) * inverse, drawn & _U32, nearest)) & _U8
            )
            drawn >>= np.uint64(32)
        word |= byte << np.uint64(8 * (j & 3))
        if j & 3 == 3 or j == dim:
            store32(row + 4 * (j >> 2), np.uint32(word))
            word = np.uint64(0)


@inner
def _rounded_byte(value: float, drawn: Any, nearest: bool) -> Any:
    below = math.floor(value)
    share = value - below
    if nearest:
        up = share > 0.5 or (share == 0.5 and np.int64(below) & 1 == 1)
    else:
        up = np.float64(drawn) < share * 4294967296.0
    return np.int64(below) + np.int64(up)


@kernel
def gather_narrow(
    ids: Int64s, slots: Int64s, words32: Words, shape: Int64s, first: Float64s, width: int, out: Float32s
) -> None:
    """Write the first ``width`` floats of each record to ``out``; an id without a row reads its initial values."""
    memory, words, dim, n = words32.ctypes.data, shape[WORDS], shape[DIM], len(slots)
    packed = words - META - (shape[WIDE] - META - dim)
    fresh = np.empty(dim + shape[STATE], np.float32)
    flat = out.reshape(-1)
    base = flat.ctypes.data
    for i in range(n):
        if i + AHEAD < n:
            fetch(memory, slots[i + AHEAD], words, words)
        to = base + 4 * i * width
        if slots[i] >= 0:
            row = memory + slots[i] * words * 4
            read_weights(row, dim, shape[KIND], to)
            for j in range(width - dim):
                store32(to + 4 * (dim + j), load32(row + 4 * (packed + j)))
        else:
            begin(fresh.ctypes.data, dim, shape[STATE], ids[i], shape[SEED], first.ctypes.data)
            for j in range(width):
                store_float(to + 4 * j, fresh[j])


@kernel
def widen_rows(
    ids: Int64s, slots: Int64s, words32: Words, shape: Int64s, first: Float64s, wide: Words, places: Int64s
) -> None:
    """Write records as float32 to ``wide``, new rows with their initial values, and the place of each to ``places``."""
    memory, words, dim, n = words32.ctypes.data, shape[WORDS], shape[DIM], len(slots)
    rest, to = shape[WIDE] - dim, wide.ctypes.data
    for i in range(n):
        if i + AHEAD < n:
            fetch(memory, slots[i + AHEAD], words, words)
        places[i] = i if slots[i] >= 0 else slots[i]
        if slots[i] >= 0:
            row, at = memory + (slots[i] & SLOT) * words * 4, to + 4 * i * shape[WIDE]
            for j in range(rest):
                store32(at + 4 * (dim + j), load32(row + 4 * (words - rest + j)))
            if slots[i] & NEW:
                begin(at, dim, shape[STATE], ids[i], shape[SEED], first.ctypes.data)
            else:
                read_weights(row, dim, shape[KIND], at)


@kernel
def narrow_rows(ids: Int64s, slots: Int64s, words32: Words, shape: Int64s, wide: Words, nearest: bool) -> None:
    """Round float32 records in ``wide`` back into their slots."""
    memory, words, dim, n = words32.ctypes.data, shape[WORDS], shape[DIM], len(slots)
    rest, source = shape[WIDE] - dim, wide.ctypes.data
    for i in range(n):
        if i + AHEAD < n:
            fetch(memory, slots[i + AHEAD], words, words)
        if slots[i] >= 0:
            row, at = memory + (slots[i] & SLOT) * words * 4, source + 4 * i * shape[WIDE]
            version = np.int64(load32(at + 4 * (shape[WIDE] - META))) & COUNT
            stream = _stream(shape[SEED], ids[i], version)
            write_weights(row, dim, shape[KIND], at, stream, nearest)
            for j in range(rest):
                store32(row + 4 * (words - rest + j), load32(at + 4 * (dim + j)))
