"""Fit of a few constants to measured runs: minimizes the mean error of logarithms, with a prior on each constant.

The prior keeps a constant that few runs depend on near its usual value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

#: Weight of the prior: a squared deviation of one ``spread`` counts as much as a mean error of 0.1 %.
PRIOR = 0.001
#: Two runs whose predictions differ by less than this fraction count as equally likely to be chosen.
BLUR = 0.02
#: Steps of the first approach: largest number, spreads for a slope, largest step, error below which all are alike, and
#: the gain that is not worth another step.
ROUNDS, STEP, FURTHEST, SMALL, ENOUGH = 12, 0.05, 1.5, 0.01, 2e-4
#: Spreads by which each constant alone is moved to begin with: where the larger of two costs counts, the smaller one
#: has no slope, and the approach would end there.
AWAY = 2.5


@dataclass(frozen=True)
class FittedConstant:
    """A constant to fit, with its prior.

    usual:  expected value
    spread: standard deviation of the value's logarithm
    says:   description
    """

    usual: float
    spread: float
    says: str = ""


def fit(
    constants: Mapping[str, FittedConstant],
    predict: Callable[[Mapping[str, float]], Sequence[float]],
    measured: Sequence[float],
    steps: int = 60,
    tasks: Sequence[Hashable] = (),
) -> dict[str, float]:
    """Return the constants for which the output of ``predict`` is nearest to ``measured``.

    steps: iterations of the last search; default 60
    tasks: one task per run; among runs of the same task, predicting the wrong one as fastest counts as an error too
    """
    names = list(constants)
    usual = np.log([constants[name].usual for name in names])
    spread = np.array([constants[name].spread for name in names])
    seen = np.log(measured)
    rivals = _rivals(tasks)

    def values(point: Vector) -> dict[str, float]:
        return {name: math.exp(value) for name, value in zip(names, usual + point * spread, strict=True)}

    def loss(point: Vector) -> float:
        foretold = np.log(predict(values(point)))
        errors = float(np.abs(foretold - seen).mean())
        return errors + regret(foretold, seen, rivals) + PRIOR * float((point**2).sum())

    away = AWAY * np.eye(len(names))
    begin = min([np.zeros(len(names)), *away, *-away], key=loss)
    start = approach(lambda point: np.log(predict(values(point))) - seen, begin, ROUNDS)
    return values(minimize(loss, start, steps, width=0.15))


def _rivals(tasks: Sequence[Hashable]) -> list[list[int]]:
    """Return the indices of the runs of each task that has several runs."""
    found: dict[Hashable, list[int]] = {}
    for run, task in enumerate(tasks):
        found.setdefault(task, []).append(run)
    return [runs for runs in found.values() if len(runs) > 1]


def regret(foretold: Vector, seen: Vector, rivals: Sequence[Sequence[int]]) -> float:
    """Return how much longer than the best run the predicted one takes, as a mean fraction over tasks.

    The choice is a softmin over the predictions with temperature ``BLUR``, so that the result is smooth.
    """
    if not rivals:
        return 0.0
    total = 0.0
    for runs in rivals:
        chances = np.exp(-(foretold[runs] - foretold[runs].min()) / BLUR)
        longer = np.exp(seen[runs] - seen[runs].min()) - 1
        total += float((chances * longer).sum() / chances.sum())
    return total / len(rivals)


def approach(errors: Callable[[Vector], Vector], begin: Vector, rounds: int) -> Vector:
    """Minimize the mean absolute error and the prior by damped Gauss-Newton steps on reweighted squares.

    errors: logarithms of predicted over measured at a point, which is in units of the constants' spreads
    begin:  the point to begin at
    rounds: largest number of steps
    """
    point, damping, size = begin, 1.0, len(begin)
    now = errors(point)
    for _ in range(rounds):
        slopes = np.stack([(errors(point + STEP * axis) - now) / STEP for axis in np.eye(size)], axis=1)
        weights = 1.0 / (np.abs(now) + SMALL) / len(now)
        normal = slopes.T @ (slopes * weights[:, None]) + 2 * PRIOR * np.eye(size)
        slope = slopes.T @ (weights * now) + 2 * PRIOR * point
        for _ in range(5):
            step = np.linalg.solve(normal + damping * 0.01 * np.eye(size), -slope)
            step *= min(1.0, FURTHEST / float(np.abs(step).max()))
            further = errors(point + step)
            if _loss(further, point + step) < _loss(now, point):
                break
            damping *= 4
        else:
            break
        gained = _loss(now, point) - _loss(further, point + step)
        point, now, damping = point + step, further, damping / 3
        if gained < ENOUGH:
            break
    return point


def _loss(errors: Vector, point: Vector) -> float:
    return float(np.abs(errors).mean()) + PRIOR * float((point**2).sum())


def minimize(loss: Callable[[Vector], float], start: Vector, steps: int, width: float = 0.7) -> Vector:
    """Minimize ``loss`` by the simplex method of Nelder and Mead (1965), which needs no gradients of ``loss``."""
    corners = [start, *(start + width * axis for axis in np.eye(len(start)))]
    losses = [loss(corner) for corner in corners]
    for _ in range(steps):
        order = np.argsort(losses)
        corners, losses = [corners[i] for i in order], [losses[i] for i in order]
        middle = np.mean(corners[:-1], axis=0)
        found, point = _moved(loss, middle, middle - corners[-1], losses)
        if found < losses[-1]:
            corners[-1], losses[-1] = point, found
            continue
        corners = [corners[0] + (corner - corners[0]) / 2 for corner in corners]
        losses = [losses[0], *(loss(corner) for corner in corners[1:])]
    return corners[int(np.argmin(losses))]


def _moved(
    loss: Callable[[Vector], float], middle: Vector, across: Vector, losses: Sequence[float]
) -> tuple[float, Vector]:
    """Return the loss and position of the worst corner's replacement.

    The worst corner is reflected; it is moved twice as far if that is the best point so far, and only half as far back
    if the reflected point is still bad.
    """
    mirrored = loss(middle + across)
    if mirrored < losses[0]:
        further = loss(middle + 2 * across)
        return (further, middle + 2 * across) if further < mirrored else (mirrored, middle + across)
    if mirrored < losses[-2]:
        return mirrored, middle + across
    return loss(middle - across / 2), middle - across / 2
