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
    steps: int = 250,
    tasks: Sequence[Hashable] = (),
) -> dict[str, float]:
    """Return the constants for which the output of ``predict`` is nearest to ``measured``.

    steps: iterations of the minimizer; default 250
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

    return values(minimize(loss, np.zeros(len(names)), steps))


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
