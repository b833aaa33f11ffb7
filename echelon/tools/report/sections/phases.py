"""What a step's time consists of, as every section names and sums it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from echelon.observability.runlog.run_reader import PHASES

MEANING = {
    "data": "between two steps: waiting for the next batch, and the rest of the training loop",
    "forward": "the model, from batch to loss",
    "backward": "gradients, and what of their exchange it hides",
    "communicate": "the exchange that backward does not hide",
    "update": "the optimizer",
    "waiting": "for other ranks, and for parameter servers",
}
#: Of backward, where forward is timed with it: micro-batches take turns, and a CUDA graph is one.
BOTH = "forward and backward, waits for other stages, and what of the exchange is hidden"
#: Where waits are found: first in what is meant for them, then where messages between stages are.
WAITS_IN = ("communicate", "backward", "forward", "update", "data")
#: And where workers pull from parameter servers, and push to them.
WAITS_FOR_SERVERS_IN = ("communicate", "forward", "update", "backward", "data")


def mean_phases(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Milliseconds by phase. The first record is left out where there are others: it allocates, compiles and meets."""
    counted = records[1:] or records
    return {phase: fmean(record.get(phase, 0.0) for record in counted) for phase in PHASES} if counted else {}


def without_waits(phases: Mapping[str, float], waited: float, served: bool = False) -> dict[str, float]:
    """The same time, with ``waiting`` as a part of its own. ``served``: by parameter servers"""
    found, left = dict(phases), waited
    for phase in WAITS_FOR_SERVERS_IN if served else WAITS_IN:
        taken = min(left, found.get(phase, 0.0))
        found[phase] = found.get(phase, 0.0) - taken
        left -= taken
    return found | {"waiting": waited - left}


def parts(phases: Mapping[str, float]) -> list[tuple[str, float]]:
    """In the order they are shown, those that take no time left out."""
    return [(name, phases[name]) for name in (*PHASES, "waiting") if phases.get(name, 0.0) > 0]
