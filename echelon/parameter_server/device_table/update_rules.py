"""The update rules in torch's operations: the order of operations is that of ``table.updates``, for the same bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from echelon.strategy.sparse_update_rules import Adagrad, Adam, Ftrl, Momentum, Rule, Sgd

#: Rows [n, dim + state] and gradients [n, dim] to new rows; the settings are those of ``table.updates.settings_of``.
RowUpdate = Callable[[Tensor, Tensor, list[float]], Tensor]


def row_update_of(rule: Rule) -> RowUpdate:
    if isinstance(rule, Adagrad):
        return row_adagrad if rule.row_wise else adagrad
    if isinstance(rule, Momentum):
        return nesterov if rule.nesterov else momentum
    return {Sgd: sgd, Adam: adam, Ftrl: ftrl}[type(rule)]


def root(values: Tensor) -> Tensor:
    """Return the nearest float32 of each root; torch's own on a CPU is off by one unit for a fifth of all values."""
    return values.double().sqrt().float()


def sgd(rows: Tensor, grads: Tensor, settings: list[float]) -> Tensor:
    return rows - grads * settings[0]


def momentum(rows: Tensor, grads: Tensor, settings: list[float]) -> Tensor:
    weights, velocity = rows.chunk(2, 1)
    velocity = velocity * settings[1] + grads
    return torch.cat([weights - velocity * settings[0], velocity], 1)


def nesterov(rows: Tensor, grads: Tensor, settings: list[float]) -> Tensor:
    weights, velocity = rows.chunk(2, 1)
    velocity = velocity * settings[1] + grads
    return torch.cat([weights - (grads + velocity * settings[1]) * settings[0], velocity], 1)


def adagrad(rows: Tensor, grads: Tensor, settings: list[float]) -> Tensor:
    weights, total = rows.chunk(2, 1)
    total = total + grads * grads
    return torch.cat([weights - grads * settings[0] / (root(total) + settings[1]), total], 1)


def mean_squares(grads: Tensor) -> Tensor:
    """Return the mean square of each row, [n, 1], in four sums side by side as ``table.updates.mean_square``."""
    squares, dim = grads * grads, grads.shape[1]
    sums = torch.zeros(len(grads), 4, device=grads.device)
    for begin in range(0, dim // 4 * 4, 4):
        sums = sums + squares[:, begin : begin + 4]
    first = sums[:, 0]
    for column in range(dim // 4 * 4, dim):
        first = first + squares[:, column]
    return (((first + sums[:, 1]) + (sums[:, 2] + sums[:, 3])) / float(dim)).unsqueeze(1)


def row_adagrad(rows: Tensor, grads: Tensor, settings: list[float]) -> Tensor:
    weights, total = rows[:, :-1], rows[:, -1:] + mean_squares(grads)
    rate = torch.full_like(total, settings[0]) / (root(total) + settings[1])
    return torch.cat([weights - rate * grads, total], 1)


def adam(rows: Tensor, grads: Tensor, settings: list[float]) -> Tensor:
    rate, first_share, second_share, eps = settings
    weights, mean, square = rows.chunk(3, 1)
    mean = mean + (grads - mean) * first_share
    square = square + (grads * grads - square) * second_share
    return torch.cat([weights - (mean / (root(square) + eps)) * rate, mean, square], 1)


def ftrl(rows: Tensor, grads: Tensor, settings: list[float]) -> Tensor:
    lr, l1, twice_l2, power = settings
    weights, before, linear = rows.chunk(3, 1)
    after = before + grads * grads
    scale = _power(after, power)
    linear = linear + grads - (scale - _power(before, power)) / lr * weights
    beyond = linear.clamp(-l1, l1) - linear
    weights = torch.where(beyond != 0, beyond / (scale / lr + twice_l2), 0.0)
    return torch.cat([weights, after, linear], 1)


def _power(values: Tensor, exponent: float) -> Tensor:
    return root(values) if exponent == 0.5 else values.pow(exponent)
