"""``Cursor``: a loader's position, and its conversion to and from checkpoint state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echelon.base.errors import DataError


@dataclass
class Cursor:
    """A position in the global order of the data."""

    #: the global batch size for which the order of this epoch was made; it matters for buckets only
    cut: int
    epoch: int = 0
    #: batches yielded in this epoch
    position: int = 0
    #: samples of this epoch's global order that all ranks together have used
    samples: int = 0
    #: for a stream with places: from where it is read on, as ``resumable_source.Anchor`` has it
    anchor: Any = None

    def advance(self, samples: int) -> None:
        self.position += 1
        self.samples += samples

    def next_epoch(self, cut: int, *, goes_on: bool = False) -> None:
        """Move to the next epoch; if it goes on in the same stream, without losing the place there."""
        self.epoch += 1
        self.position = 0
        if not goes_on:
            self.samples, self.anchor = 0, None
        self.cut = cut


def to_state(cursor: Cursor, order: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state for a checkpoint.

    order:  facts on which the epoch's order depends; a state can be loaded in mid-epoch only with equal facts
    data:   identity of the data set
    """
    anchor = {} if cursor.anchor is None else {"anchor": list(cursor.anchor)}
    return {
        "epoch": cursor.epoch,
        "position": cursor.position,
        "samples": cursor.samples,
        "cut": cursor.cut,
        "order": dict(order),
        "data": dict(data),
        **anchor,
    }


def from_state(state: Mapping[str, Any], order: Mapping[str, Any], global_batch: int) -> Cursor:
    missing = [name for name in ("epoch", "position", "samples", "cut", "order") if name not in state]
    if missing:
        raise DataError(f"this is no state of a loader: it lacks '{missing[0]}'; pass the result of state_dict()")
    cursor = Cursor(state["cut"], state["epoch"], state["position"], state["samples"], state.get("anchor"))
    if cursor.samples == 0:
        return Cursor(global_batch, cursor.epoch)
    for name, now in order.items():
        then = state["order"].get(name)
        if then != now:
            raise DataError(
                f"the state is from the middle of epoch {cursor.epoch} with {name}={then}, this loader has "
                f"{name}={now} and would go through other samples; use {name}={then} until that epoch is done"
            )
    cursor.position = -(-cursor.samples // global_batch)
    return cursor
