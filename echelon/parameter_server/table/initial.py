"""Initial values of a row, from (seed, id) alone: they do not depend on server count, order of arrival or time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.parameter_server.protocol.hashing import mix
from echelon.parameter_server.protocol.job_spec import Initializer
from echelon.parameter_server.table.compiled import inner, load_double, store_float
from echelon.strategy.sparse_update_rules import Adagrad, Ftrl, Rule

UNIFORM, NORMAL, CONSTANT = 0, 1, 2
#: Indices of the parameters that kernels take.
KIND, LOW, SPAN, TOP, START, FILLED = 0, 1, 2, 3, 4, 5

_STEP = np.uint64(0x9E3779B97F4A7C15)  # increment of splitmix64: an odd number near 2^64 / golden ratio
_HALF, _LOW_HALF, _EIGHT = np.uint64(32), np.uint64(0xFFFFFFFF), np.uint64(8)
_TURN = 2 * np.pi


def described(initializer: Initializer, rule: Rule, dim: int) -> NDArray[np.float64]:
    """Return the parameters of initialization in the form that kernels take.

    ``KIND``, ``LOW``, ``SPAN`` and ``TOP`` (the largest value) are for the weights. The first ``FILLED`` floats of the
    state are ``START``, the others 0.
    """
    low, high = np.float32(initializer.low), np.float32(initializer.high)
    kind = {"uniform": UNIFORM, "normal": NORMAL, "constant": CONSTANT}[initializer.kind]
    span = high - low if kind == UNIFORM else high
    start = rule.initial_accumulator if isinstance(rule, Adagrad | Ftrl) else 0.0
    filled = 1 if isinstance(rule, Adagrad) and rule.row_wise else dim
    return np.array([kind, low, span, np.nextafter(high, low), start, filled], np.float64)


@inner
def begin(row: int, dim: int, state: int, key: int, seed: int, first: int) -> None:
    """Write the initial weights and state of the row of ``key`` at address ``row``."""
    stream = mix(mix(np.uint64(seed) + _STEP) ^ np.uint64(key))
    kind, low, span = load_double(first), load_double(first + 8 * LOW), load_double(first + 8 * SPAN)
    if kind == UNIFORM:
        _uniform(row, dim, stream, np.float32(low), np.float32(span), np.float32(load_double(first + 8 * TOP)))
    elif kind == NORMAL:
        _normal(row, dim, stream, low, span)
    else:
        for j in range(dim):
            store_float(row + 4 * j, np.float32(low))
    start, filled = np.float32(load_double(first + 8 * START)), load_double(first + 8 * FILLED)
    for j in range(state):
        store_float(row + 4 * (dim + j), start if j < filled else np.float32(0))


@inner
def _drawn(stream: Any, j: int) -> Any:
    """Return 64 random bits, which entries 2k and 2k + 1 share."""
    return mix(stream + np.uint64(1 + (j >> 1)) * _STEP)


@inner
def _uniform(row: int, dim: int, stream: Any, low: Any, span: Any, top: Any) -> None:
    for j in range(dim):
        drawn = _drawn(stream, j)
        part = (drawn >> _HALF) if j & 1 else (drawn & _LOW_HALF)
        share = np.float32(np.int32(part >> _EIGHT)) * np.float32(2.0**-24)
        store_float(row + 4 * j, min(low + span * share, top) if span > 0 else low)  # rounding may reach ``high``


@inner
def _normal(row: int, dim: int, stream: Any, mean: float, deviation: float) -> None:
    for j in range(dim):  # Box-Muller transform
        drawn = _drawn(stream, j)
        radius = np.sqrt(-2.0 * np.log((np.float64(drawn >> _HALF) + 1.0) * 2.0**-32))
        angle = _TURN * np.float64(drawn & _LOW_HALF) * 2.0**-32
        store_float(row + 4 * j, np.float32(mean + deviation * radius * (np.sin(angle) if j & 1 else np.cos(angle))))
