"""``EarlyCalls``: what a script asked of an engine that waited for its first batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from echelon.parallel.ema_weights import Ema

if TYPE_CHECKING:
    from echelon.engine.resume import WaitingState


class EarlyCalls(NamedTuple):
    """State to restore and average to start when the engine is created; None if not asked for."""

    state: WaitingState | None = None
    ema: Ema | None = None


NOTHING_EARLY = EarlyCalls()
