"""Figures of the phases of a step, shared by all sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from echelon.observability.runlog.step_phases import BETWEEN, PHASES

MEANING = PHASES | BETWEEN
#: Meaning of backward if it includes forward: micro-batches alternate the two, and a CUDA graph contains both.
BOTH = "forward and backward, which alternate or are one graph"
#: On a GPU, which times phases on the device.
INSIDE = "; on a GPU with messages inside it, which a timeline separates"

PhaseTimes = Mapping[str, float]  #: milliseconds per step by phase


def counted(records: Sequence[PhaseTimes]) -> Sequence[PhaseTimes]:
    """Return the records without the first of several, which includes allocation, compilation and connection setup."""
    there = [record for record in records if record]
    return there[1:] or there


def step_time(record: PhaseTimes) -> float:
    """Return the milliseconds of a step, without checkpoints and evaluations between two steps."""
    return sum(record.get(phase, 0.0) for phase in PHASES)


def own_work(record: PhaseTimes) -> float:
    """Return the milliseconds of a step that are not communication."""
    return step_time(record) - record.get("communicate", 0.0)


def median_step(records: Sequence[PhaseTimes]) -> float | None:
    """Return the median milliseconds of a step; None without records. The page has no other step time of the run."""
    there = counted(records)
    return median(map(step_time, there)) if there else None


def median_phases(records: Sequence[PhaseTimes]) -> dict[str, float]:
    """Return the median milliseconds of each phase of a step, in order, without phases that take no time."""
    there = counted(records)
    found = {phase: median(record.get(phase, 0.0) for record in there) for phase in PHASES} if there else {}
    return {phase: took for phase, took in found.items() if took > 0}
