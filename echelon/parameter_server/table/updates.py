"""The update rules, one kernel each; the formulas are those of ``echelon.strategy.sparse_update_rules``.

Fast-math is off: every sum has one order, so that a row's bits do not depend on the other rows of a push.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from echelon.base.errors import UsageError
from echelon.parameter_server.table.compiled import inner, kernel, load_float
from echelon.parameter_server.table.records import AHEAD, DIM, NOW, SLOT, WORDS, Float32s, Int64s, fetch, mark
from echelon.strategy.sparse_update_rules import Adagrad, Adam, Ftrl, Momentum, Rule, Sgd

#: The arguments are slots, gradients, records, the description of the records, and the rule's numbers.
Update = Callable[[Int64s, Float32s, Float32s, Int64s, Float32s], None]


def update_of(rule: Rule) -> Update:
    if isinstance(rule, Adagrad):
        return row_adagrad if rule.row_wise else adagrad
    return {Sgd: sgd, Momentum: nesterov if _nesterov(rule) else momentum, Adam: adam, Ftrl: ftrl}[type(rule)]


def _nesterov(rule: Rule) -> bool:
    return isinstance(rule, Momentum) and rule.nesterov


def settings_of(rule: Rule, lr: float, step: int) -> Float32s:
    """Return the numbers of a rule in the order in which its kernel takes them."""
    numbers: list[float] = [lr]
    if isinstance(rule, Momentum):
        numbers += [rule.momentum]
    elif isinstance(rule, Adagrad):
        numbers += [rule.eps]
    elif isinstance(rule, Adam):
        correction = math.sqrt(1 - rule.beta2**step) / (1 - rule.beta1**step)
        numbers = [lr * correction, 1 - rule.beta1, 1 - rule.beta2, rule.eps]
    elif isinstance(rule, Ftrl):
        if lr <= 0:
            raise UsageError(f"FTRL divides by its learning rate, which is {lr} now; let the schedule end above 0")
        numbers += [rule.l1, 2 * rule.l2, -rule.lr_power]
    return np.array(numbers, np.float32)


@kernel
def sgd(slots: Int64s, grads: Float32s, rows: Float32s, shape: Int64s, settings: Float32s) -> None:
    flat, dim, lr = grads.reshape(-1), np.uint64(shape[DIM]), settings[0]
    memory, words, n = rows.ctypes.data, shape[WORDS], len(slots)
    for i in range(n):
        if i + AHEAD < n:
            fetch(memory, slots[i + AHEAD], words, words)
        if slots[i] >= 0:
            mark(memory, slots[i], words, shape[NOW])
            w, g = np.uint64((slots[i] & SLOT) * words), np.uint64(i) * dim
            for j in range(dim):
                rows[w + j] -= lr * flat[g + j]


@kernel
def momentum(slots: Int64s, grads: Float32s, rows: Float32s, shape: Int64s, settings: Float32s) -> None:
    flat, dim, lr, mu = grads.reshape(-1), np.uint64(shape[DIM]), settings[0], settings[1]
    memory, words, n = rows.ctypes.data, shape[WORDS], len(slots)
    for i in range(n):
        if i + AHEAD < n:
            fetch(memory, slots[i + AHEAD], words, words)
        if slots[i] >= 0:
            mark(memory, slots[i], words, shape[NOW])
            w, g = np.uint64((slots[i] & SLOT) * words), np.uint64(i) * dim
            v = w + dim
            for j in range(dim):
                velocity = mu * rows[v + j] + flat[g + j]
                rows[v + j] = velocity
                rows[w + j] -= lr * velocity


@kernel
def nesterov(slots: Int64s, grads: Float32s, rows: Float32s, shape: Int64s, settings: Float32s) -> None:
    flat, dim, lr, mu = grads.reshape(-1), np.uint64(shape[DIM]), settings[0], settings[1]
    memory, words, n = rows.ctypes.data, shape[WORDS], len(slots)
    for i in range(n):
        if i + AHEAD < n:
            fetch(memory, slots[i + AHEAD], words, words)
        if slots[i] >= 0:
            mark(memory, slots[i], words, shape[NOW])
            w, g = np.uint64((slots[i] & SLOT) * words), np.uint64(i) * dim
            v = w + dim
            for j in range(dim):
                velocity = mu * rows[v + j] + flat[g + j]
                rows[v + j] = velocity
                rows[w + j] -= lr * (flat[g + j] + mu * velocity)


@kernel
def adagrad(slots: Int64s, grads: Float32s, rows: Float32s, shape: Int64s, settings: Float32s) -> None:
    flat, dim, lr, eps = grads.reshape(-1), np.uint64(shape[DIM]), settings[0], settings[1]
    memory, words, n = rows.ctypes.data, shape[WORDS], len(slots)
    for i in range(n):
        if i + AHEAD < n:
            fetch(memory, slots[i + AHEAD], words, words)
        if slots[i] >= 0:
            mark(memory, slots[i], words, shape[NOW])
            w, g = np.uint64((slots[i] & SLOT) * words), np.uint64(i) * dim
            a = w + dim
            for j in range(dim):
                grad = flat[g + j]
                total = rows[a + j] + grad * grad
                rows[a + j] = total
                rows[w + j] -= lr * grad / (np.sqrt(total) + eps)


@inner
def mean_square(at: Any, dim: int) -> Any:
    """Return the mean square of ``dim`` floats.

    The processor computes the four independent sums in parallel, and the order of additions is still fixed.
    """
    a = b = c = d = np.float32(0)
    for x in range(at, at + dim // 4 * 16, 16):
        a += load_float(x) * load_float(x)
        b += load_float(x + 4) * load_float(x + 4)
        c += load_float(x + 8) * load_float(x + 8)
        d += load_float(x + 12) * load_float(x + 12)
    for x in range(at + dim // 4 * 16, at + dim * 4, 4):
        a += load_float(x) * load_float(x)
    return ((a + b) + (c + d)) / np.float32(dim)


@kernel
def row_adagrad(slots: Int64s, grads: Float32s, rows: Float32s, shape: Int64s, settings: Float32s) -> None:
    flat, dim, lr, eps = grads.reshape(-1), np.uint64(shape[DIM]), settings[0], settings[1]
    memory, words, n = rows.ctypes.data, shape[WORDS], len(slots)
    for i in range(n):
        if i + AHEAD < n:
            fetch(memory, slots[i + AHEAD], words, words)
        if slots[i] >= 0:
            mark(memory, slots[i], words, shape[NOW])
            w, g = np.uint64((slots[i] & SLOT) * words), np.uint64(i) * dim
            total = rows[w + dim] + mean_square(flat.ctypes.data + np.int64(g) * 4, shape[DIM])
            rows[w + dim] = total
            rate = lr / (np.sqrt(total) + eps)
            for j in range(dim):
                rows[w + j] -= rate * flat[g + j]


@kernel
def adam(slots: Int64s, grads: Float32s, rows: Float32s, shape: Int64s, settings: Float32s) -> None:
    flat, dim = grads.reshape(-1), np.uint64(shape[DIM])
    rate, first_share, second_share, eps = settings[0], settings[1], settings[2], settings[3]
    memory, words, n = rows.ctypes.data, shape[WORDS], len(slots)
    for i in range(n):
        if i + AHEAD < n:
            fetch(memory, slots[i + AHEAD], words, words)
        if slots[i] >= 0:
            mark(memory, slots[i], words, shape[NOW])
            w, g = np.uint64((slots[i] & SLOT) * words), np.uint64(i) * dim
            m, v = w + dim, w + dim + dim
            for j in range(dim):
                grad = flat[g + j]
                mean = rows[m + j] + (grad - rows[m + j]) * first_share
                square = rows[v + j] + (grad * grad - rows[v + j]) * second_share
                rows[m + j] = mean
                rows[v + j] = square
                rows[w + j] -= rate * (mean / (np.sqrt(square) + eps))


@kernel
def ftrl(slots: Int64s, grads: Float32s, rows: Float32s, shape: Int64s, settings: Float32s) -> None:
    flat, dim = grads.reshape(-1), np.uint64(shape[DIM])
    lr, l1, twice_l2, power = settings[0], settings[1], settings[2], settings[3]
    memory, words, n = rows.ctypes.data, shape[WORDS], len(slots)
    for i in range(n):
        if i + AHEAD < n:
            fetch(memory, slots[i + AHEAD], words, words)
        if slots[i] >= 0:
            mark(memory, slots[i], words, shape[NOW])
            w, g = np.uint64((slots[i] & SLOT) * words), np.uint64(i) * dim
            squares, linears = w + dim, w + dim + dim
            for j in range(dim):
                grad, before = flat[g + j], rows[squares + j]
                after = before + grad * grad
                scale = _power(after, power)
                linear = rows[linears + j] + grad - (scale - _power(before, power)) / lr * rows[w + j]
                rows[squares + j] = after
                rows[linears + j] = linear
                beyond = min(max(linear, -l1), l1) - linear
                rows[w + j] = beyond / (scale / lr + twice_l2) if beyond != 0 else np.float32(0)


@inner
def _power(value: Any, exponent: Any) -> Any:
    return np.sqrt(value) if exponent == np.float32(0.5) else np.float32(value**exponent)
