"""Log lines on the ends of epochs and of the run: samples drawn again, gradients left without an update."""

from __future__ import annotations

from echelon.data import Loader
from echelon.data.data_source import UnknownLengthError


def epoch_padding(loader: Loader) -> str | None:
    """Return a log line if samples are drawn again to give every replica equally many, else None."""
    again = loader.samples_drawn_again
    if not again:
        return None
    return (
        f"data: {again} {'sample is' if again == 1 else 'samples are'} drawn again to fill up an epoch's last batch, "
        "whose step is not that of one process; with uneven='join' it is"
    )


def epoch_leftover(loader: Loader, merge: int) -> str | None:
    """Return a log line if the batches of an epoch do not make up whole updates, else None."""
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
    """Return a log line if the run ends with gradients that were not applied, else None.

    merged:     passes of ``engine.step`` since the last update
    merge:      passes per update
    is_waiting: True if ``engine.backward`` was called without an ``engine.update`` after it
    """
    if is_waiting:
        return "gradients: engine.backward() was called after the last engine.update(); its gradients were not applied"
    if not merged:
        return None
    return (
        f"gradient_merge: the run has ended after {merged} of the {merge} batches of an update; their gradients were "
        "not applied"
    )
