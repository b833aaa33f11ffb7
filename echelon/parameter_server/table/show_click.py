"""Shows and clicks of rows, which decay with every pass over the data.

A record holds both as they were at its last push. The decay of the passes since then is applied when they are read or
pushed again, so that the end of a pass writes no records.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from echelon.parameter_server.protocol.job_spec import EVENTS
from echelon.parameter_server.table.compiled import kernel
from echelon.parameter_server.table.records import (
    META,
    NEW,
    NOW,
    SLOT,
    WORDS,
    Float32s,
    Float64s,
    Int64s,
    Words,
)
from echelon.strategy.show_click_score import ShowClickScore


def decay_powers(score: ShowClickScore, passes: int) -> Float64s:
    """Return the factors of shows and clicks that are 0, 1, ..., ``passes`` passes old."""
    powers = np.full(passes + 1, score.decay)
    powers[0] = 1.0
    return np.cumprod(powers)


@kernel
def count_events(slots: Int64s, events: Float32s, words32: Words, shape: Int64s, powers: Float64s) -> None:
    """Add shows and clicks to the rows of a push, before the push changes their last-seen time."""
    floats, words = words32.view(np.float32), shape[WORDS]
    for i in range(len(slots)):
        if slots[i] >= 0:
            at = ((slots[i] & SLOT) + 1) * words - META - EVENTS
            if slots[i] & NEW:
                floats[at] = events[i, 0]
                floats[at + 1] = events[i, 1]
            else:
                factor = powers[max(shape[NOW] - np.int64(words32[at + EVENTS + 1]), 0)]
                floats[at] = np.float32(floats[at] * factor) + events[i, 0]
                floats[at + 1] = np.float32(floats[at + 1] * factor) + events[i, 1]


@kernel
def read_events(slots: Int64s, words32: Words, shape: Int64s, powers: Float64s, out: Float32s) -> None:
    """Write the shows and clicks of each row, as they are in the present pass, to ``out``."""
    floats, words = words32.view(np.float32), shape[WORDS]
    for i in range(len(slots)):
        if slots[i] >= 0:
            at = ((slots[i] & SLOT) + 1) * words - META - EVENTS
            factor = powers[max(shape[NOW] - np.int64(words32[at + EVENTS + 1]), 0)]
            out[i, 0] = np.float32(floats[at] * factor)
            out[i, 1] = np.float32(floats[at + 1] * factor)


def scores_of(score: ShowClickScore, events: Float32s) -> NDArray[np.float32]:
    """Return the score of each row from its shows and clicks."""
    shows, clicks = events[:, 0], events[:, 1]
    return (shows - clicks) * np.float32(score.show) + clicks * np.float32(score.click)
