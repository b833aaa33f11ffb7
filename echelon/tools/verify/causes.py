"""Likely causes of a loss difference, found from the losses of the replicas and of one process. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from echelon.tools.verify.denominators import LABELS, SHIFTED
from echelon.tools.verify.differences import relative

#: Largest fraction of the difference that a cause may leave unexplained.
REST = 0.01
#: Losses with a smaller relative difference are the same, and have no cause.
DIGITS = 2e-6
#: Relative tolerance of "the loss of one process is N times as large" (a sum over N replicas) if random numbers differ.
NOISE = 0.02

#: One pass of one replica, or of one process: its loss, the samples it counts for, and other possible denominators.
Share = Mapping[str, Any]


def likely_cause(step: Mapping[str, Any], reference: Mapping[str, Any], replicas: int, *, noisy: bool) -> str:
    """Return a sentence with the likely cause of the loss difference in one step; "" if no cause is found.

    noisy: True if one process draws other random numbers than the ranks
    """
    own, one = step["loss"], reference["loss"]
    if replicas < 2 or not all(map(math.isfinite, (own, one))) or relative(own, one) <= DIGITS:
        return ""
    if _is_sum(own, one, replicas, NOISE if noisy else 1e-3):
        return (
            f"one process's loss is {replicas} times as large, as there are {replicas} replicas: a sum, not a mean? "
            "Take the mean, or give Strategy(reduction=Reduction(op='sum'))"
        )
    for shares, whole in zip(step.get("passes", ()), reference.get("passes", ()), strict=False):
        if result := _cause_of_pass(shares, whole, noisy):
            return result
    return ""


def _is_sum(own: float, one: float, replicas: int, room: float) -> bool:
    return bool(own) and abs(one / own - replicas) < room * replicas


def _cause_of_pass(shares: Sequence[Share], whole: Share, noisy: bool) -> str:
    if len(shares) < 2 or noisy:
        return ""
    counted, loss = [share["counted"] for share in shares], whole["loss"]
    own = _mean(shares, counted)
    if own is None or relative(own, loss) <= DIGITS:
        return ""
    for what in shares[0]["counts"]:
        numbers = [share["counts"].get(what, 0.0) for share in shares]
        mean = _mean(shares, numbers)
        if mean is not None and abs(mean - loss) <= max(DIGITS * abs(loss), REST * abs(own - loss)):
            return (
                f"the loss is a mean over {what}, of which the replicas have {_listed(numbers)}, and they count as "
                f"{_listed(counted)}: give engine.step(..., samples=...) that number (backward() in a loop of its own)"
            )
    return _other_padding(shares, whole) or _beyond(shares, loss)


def _other_padding(shares: Sequence[Share], whole: Share) -> str:
    """Return the cause if padding changes the number of labels that a shifted loss counts.

    In a row with padding on the left, the first token is not at position 0, so a loss over ``labels[:, 1:]`` counts it.
    """

    def replicas(what: str) -> list[float]:
        return [share["counts"].get(what, 0.0) for share in shares]

    for what, total in whole["counts"].items():
        numbers, all_of_it = replicas(what), what.replace(SHIFTED, "")
        shifts = what.startswith(LABELS) and what != all_of_it
        if shifts and sum(numbers) != total and sum(replicas(all_of_it)) == whole["counts"].get(all_of_it):
            return (
                f"padding changes what the loss counts: {what} are {_listed(numbers)} on the replicas and {total:.6g} "
                "in one process; pad on the right, or to one length"
            )
    return ""


def _beyond(shares: Sequence[Share], loss: float) -> str:
    """Return the cause if the loss of one process lies outside the range of the replicas' losses.

    A mean over samples always lies within that range, whatever the weights of the replicas.
    """
    losses = [share["loss"] for share in shares]
    room = 1e-3 * (max(losses) - min(losses)) + 1e-4 * abs(loss)
    if min(losses) - room <= loss <= max(losses) + room:
        return ""
    return (
        f"the loss of all samples, {loss:.6g}, does not lie between those of the replicas, {_listed(losses)}: it is no "
        "mean over samples. Does it compare samples with each other (a contrastive loss)? Then give it those of all "
        "replicas, by echelon.nn.gather_batch()"
    )


def _mean(shares: Sequence[Share], numbers: Sequence[float]) -> float | None:
    total = sum(numbers)
    if not total:
        return None
    return sum(float(share["loss"]) * number for share, number in zip(shares, numbers, strict=True) if number) / total


def _listed(numbers: Sequence[float]) -> str:
    few = [f"{number:.6g}" for number in numbers[:4]]
    return ", ".join(few[:-1]) + f" and {few[-1]}" if len(numbers) <= 4 else ", ".join(few) + ", ..."
