"""The phases of a step's time: their names, meanings and means, shared by all sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from echelon.observability.runlog.run_reader import PHASES

MEANING = {
    "data": "between two steps: waiting for the next batch, and the rest of the training loop",
    "forward": "the model, from batch to loss",
    "backward": "gradients, and the part of their exchange that it hides",
    "communicate": "the exchange that backward does not hide",
    "update": "the optimizer",
    "waiting": "for other ranks, and for parameter servers",
}
#: Meaning of backward if it includes forward: micro-batches alternate the two, and a CUDA graph contains both.
BOTH = "forward and backward, waits for other stages, and the hidden part of the exchange"
#: Phases to subtract waiting time from, in order: the communication phase first, then phases with pipeline messages.
WAITS_IN = ("communicate", "backward", "forward", "update", "data")
#: The same for runs with parameter servers, by the phases in which workers pull and push.
WAITS_FOR_SERVERS_IN = ("communicate", "forward", "update", "backward", "data")


def mean_phases(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean milliseconds by phase.

    The first of several records is left out, because it includes allocation, compilation and connection setup.
    """
    counted = records[1:] or records
    return {phase: fmean(record.get(phase, 0.0) for record in counted) for phase in PHASES} if counted else {}


def without_waits(phases: Mapping[str, float], waited: float, has_servers: bool = False) -> dict[str, float]:
    """Return the phases with ``waiting`` as a separate part, subtracted from the other parts.

    phases: milliseconds by phase
    waited: milliseconds of waiting
    has_servers: True if the run has parameter servers; default False
    """
    found, left = dict(phases), waited
    for phase in WAITS_FOR_SERVERS_IN if has_servers else WAITS_IN:
        taken = min(left, found.get(phase, 0.0))
        found[phase] = found.get(phase, 0.0) - taken
        left -= taken
    return found | {"waiting": waited - left}


def parts(phases: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return (name, milliseconds) in display order, without phases that take no time."""
    return [(name, phases[name]) for name in (*PHASES, "waiting") if phases.get(name, 0.0) > 0]
