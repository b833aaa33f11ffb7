"""Lines on batches whose gradients wait for an update that an epoch, or the run, ends before."""

from __future__ import annotations

from echelon.data import Loader
from echelon.data.data_source import UnknownLengthError


def epoch_leftover(loader: Loader, merge: int) -> str | None:
    """A line where the batches of an epoch do not make up whole updates."""
    try:
        batches = len(loader)
    except UnknownLengthError:
        return None
    rest = batches % merge
    if not rest:
        return None
    return (
        f"gradient_merge: an epoch has {batches} batches, and {merge} make an update; {rest} left over at its end "
        f"{'counts' if rest == 1 else 'count'} in the first update of the next epoch, and after the last one in none"
    )


def run_leftover(merged: int, merge: int, is_waiting: bool) -> str | None:
    """A line where the run ends with gradients that were not applied.

    merged:     passes of ``engine.step`` since the last update
    is_waiting: ``engine.backward`` was called, and no ``engine.update`` after it
    """
    if is_waiting:
        return "gradients: engine.backward() was called after the last engine.update(); what it added was not applied"
    if not merged:
        return None
    return (
        f"gradient_merge: the run has ended after {merged} of the {merge} batches of an update; their gradients were "
        "not applied"
    )
