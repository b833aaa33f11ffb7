"""A numpy reference of tables with narrow weights: the rules in float32, and the rounding of their results."""

from __future__ import annotations

import numpy as np

from echelon.parameter_server.protocol.hashing import mix_all

SALT, STEP = np.uint64(0xA0761D6478BD642F), np.uint64(0x9E3779B97F4A7C15)


def draws(seed: int, ids: np.ndarray, version: np.ndarray, dim: int, each: int) -> np.ndarray:
    """Random integers of ``each`` bits, [n, dim]: a hash of seed, id, number of the id's pushes, and column."""
    per = 64 // each
    with np.errstate(over="ignore"):
        root = mix_all(np.array([seed % 2**64], np.uint64) ^ SALT)
        stream = mix_all(mix_all(root ^ ids.view(np.uint64)) ^ version.astype(np.uint64))[:, None]
        column = np.arange(dim, dtype=np.uint64)
        drawn = mix_all(stream + (column // np.uint64(per) + np.uint64(1)) * STEP)
    return drawn >> (column % np.uint64(per)) * np.uint64(each) & np.uint64(2**each - 1)


def as_bf16(values: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + drawn) & np.uint64(0xFFFF0000)).astype(np.uint32).view(np.float32)


def as_int8(values: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Each row at the finest power of two at which it fits into -127 to 127."""
    most = np.abs(values.astype(np.float64)).max(axis=1, keepdims=True)
    step = 2.0 ** np.ceil(np.log2(np.maximum(most, 1e-30) / 127))
    below = np.floor(values / step)
    return ((below + (drawn / 2.0**32 < values / step - below)) * step).astype(np.float32)


def rounded(dtype: str, seed: int, ids: np.ndarray, version: np.ndarray, values: np.ndarray) -> np.ndarray:
    if dtype == "float32":
        return values
    bits, rounding = (16, as_bf16) if dtype == "bf16" else (32, as_int8)
    return rounding(values, draws(seed, ids, version, values.shape[1], bits))
