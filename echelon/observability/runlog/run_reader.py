"""Reads the files of a run into types; missing or damaged parts are skipped.

A run may have been killed in the middle of a line, have resumed from an earlier step, or still be running. If a step
appears twice, the record of the later attempt counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from echelon.observability.runlog.log_files import EVENTS, LOGGED, MEMORY, METRICS, RUN
from echelon.observability.runlog.run_metadata import Footprint, RunMetadata
from echelon.observability.runlog.step_phases import BETWEEN, PHASES
from echelon.observability.runlog.tolerant_json import (
    JSON,
    an_object,
    integer,
    json_file,
    json_lines,
    number,
    numbers,
    text,
)


@dataclass(frozen=True)
class StepRecord:
    """A record of metrics.jsonl.

    phases:      milliseconds per step in each phase, since the previous record
    steps_per_s: speed if the number of examples is unknown; None otherwise
    gradient_norm: norm of the gradients before clipping; None if it was not recorded
    tokens_per_s: tokens of all ranks; None if batches have no token ids
    mfu:         FLOPs of the model over the nominal peak of the devices; None if either is unknown
    """

    step: int
    total: int | None
    time: float | None
    loss: float | None
    learning_rate: float | None
    examples_per_s: float | None
    phases: dict[str, float] = field(default_factory=dict)
    steps_per_s: float | None = None
    gradient_norm: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None


@dataclass(frozen=True)
class EvaluationRecord:
    step: int
    time: float | None
    results: dict[str, float]  #: "loss", "accuracy", ...


@dataclass(frozen=True)
class PredictionRecord:
    """Predicted and measured time and memory of a step."""

    step: int
    predicted_step_ms: float | None
    measured_step_ms: float | None
    predicted_memory: float | None
    measured_memory: float | None


@dataclass(frozen=True)
class RankStepRecord:
    """A record of one rank.

    phases:       milliseconds per step in each phase
    memory, peak: bytes
    utilisation:  percent of the time in which the rank's GPU ran kernels; None if unknown
    """

    step: int
    time: float | None
    phases: dict[str, float]
    memory: int | None
    peak: int | None
    utilisation: float | None = None


@dataclass(frozen=True)
class EventRecord:
    """An event of a run.

    kind:      warning, stall, restart, saved, resumed, failed, ended or notice
    step:      newest step that the failed rank had begun; None if unknown
    traceback: traceback of a failure; "" without one
    log:       path of the failed rank's log; "" if unknown
    """

    time: float
    kind: str
    rank: int | None
    text: str
    step: int | None = None
    traceback: str = ""
    log: str = ""


@dataclass(frozen=True)
class ServerRecord:
    """The state of a parameter server at one moment. Counts are since its start.

    staleness_*: staleness of updates in steps; None in synchronous mode
    """

    time: float
    rows: dict[str, int]
    bytes_in: int
    bytes_out: int
    pulls: int
    pushes: int
    staleness_mean: float | None
    staleness_max: int | None
    memory: int


@dataclass(frozen=True)
class Run:
    """The contents of a run's directory; each part is empty or None if its file is missing."""

    directory: Path
    facts: RunMetadata | None
    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]
    foretold: PredictionRecord | None
    ranks: dict[int, tuple[RankStepRecord, ...]]
    events: tuple[EventRecord, ...]
    servers: dict[int, tuple[ServerRecord, ...]]
    memory: Footprint | None
    logged: tuple[EvaluationRecord, ...] = ()  #: numbers that ``engine.log`` has written

    @property
    def empty(self) -> bool:
        return self.facts is None and not self.steps and not self.ranks and not self.events and not self.servers


def read(directory: str | Path) -> Run:
    """Read the run in that directory, which may still be running."""
    place = Path(directory)
    facts = RunMetadata.of(json_file(place / RUN))
    began = facts.began if facts is not None else 0.0
    metrics = _since(json_lines(place / METRICS), began)
    return Run(
        directory=place,
        facts=facts,
        steps=_latest([step for record in metrics if (step := _step(record))], lambda one: one.step),
        evaluations=_latest(
            [evaluation for record in metrics if (evaluation := _evaluation(record))], lambda one: one.step
        ),
        foretold=next((found for record in reversed(metrics) if (found := _foretold(record))), None),
        ranks=_ranks(place, began, facts),
        events=_events(place, began),
        servers={n: _looks(path, began) for n, path in _numbered(place, "server").items()},
        memory=Footprint.of(json_file(place / MEMORY)) or _held(place, facts),
        logged=_latest(_by_step([own for record in metrics if (own := _logged(record))]), lambda one: one.step),
    )


def _since(records: list[JSON], began: float) -> list[JSON]:
    """Drop records of earlier runs in the same directory. A record without a time has the time of the previous one."""
    kept: list[JSON] = []
    then = began
    for record in records:
        then = number(record, "time") or then
        if then >= began:
            kept.append(record)
    return kept


Item = TypeVar("Item")


def _latest(records: Sequence[Item], step_of: Callable[[Item], int]) -> tuple[Item, ...]:
    """Drop records that a later attempt has repeated: when the step goes back, later steps are replaced."""
    kept: list[Item] = []
    for record in records:
        while kept and step_of(kept[-1]) >= step_of(record):
            kept.pop()
        kept.append(record)
    return tuple(kept)


def _step(record: JSON) -> StepRecord | None:
    step = integer(record, "step")
    if step is None or "loss" not in record or "learning_rate" not in record:
        return None
    return StepRecord(
        step=step,
        total=integer(record, "total"),
        time=number(record, "time"),
        loss=number(record, "loss"),
        learning_rate=number(record, "learning_rate"),
        examples_per_s=number(record, "examples_per_s"),
        phases=_phases(record),
        steps_per_s=number(record, "steps_per_s"),
        gradient_norm=number(record, "gradient_norm"),
        tokens_per_s=number(record, "tokens_per_s"),
        mfu=number(record, "mfu"),
    )


def _phases(record: JSON) -> dict[str, float]:
    return {phase: value for phase in (*PHASES, *BETWEEN) if (value := number(record, phase)) is not None}


def _evaluation(record: JSON) -> EvaluationRecord | None:
    step = integer(record, "step")
    results = {name.removeprefix("eval_"): value for name, value in numbers(record).items() if name.startswith("eval_")}
    return EvaluationRecord(step, number(record, "time"), results) if step is not None and results else None


def _logged(record: JSON) -> EvaluationRecord | None:
    step, results = integer(record, "step"), numbers(an_object(record, LOGGED))
    return EvaluationRecord(step, number(record, "time"), results) if step is not None and results else None


def _by_step(found: Sequence[EvaluationRecord]) -> list[EvaluationRecord]:
    """Merge consecutive records that were logged at the same step."""
    kept: list[EvaluationRecord] = []
    for one in found:
        if kept and kept[-1].step == one.step:
            kept[-1] = replace(one, results={**kept[-1].results, **one.results})
        else:
            kept.append(one)
    return kept


def _foretold(record: JSON) -> PredictionRecord | None:
    step = integer(record, "step")
    if step is None or "predicted_step_ms" not in record:
        return None
    names = ("predicted_step_ms", "measured_step_ms", "predicted_memory", "measured_memory")
    return PredictionRecord(step, *(number(record, name) for name in names))


def _held(place: Path, facts: RunMetadata | None) -> Footprint | None:
    """Return the largest measured footprint, with those of all ranks of this run; None if there are none."""
    ranks = facts.world.size if facts is not None else 0
    began = facts.began if facts is not None else 0.0
    there = _numbered(place, "memory", "json").items()
    plain = [json_file(path) for rank, path in there if rank < ranks and _written_at(path) >= began]
    found = [one for one in map(Footprint.of, plain) if one is not None]
    if not found:
        return None
    fullest = max(found, key=lambda one: one.peak)
    return replace(fullest, each=tuple(found)) if len(found) > 1 else fullest


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # the file was removed meanwhile
        return 0.0


def _numbered(place: Path, kind: str, suffix: str = "jsonl") -> dict[int, Path]:
    found = ((re.fullmatch(rf"{kind}-(\d+)\.{suffix}", path.name), path) for path in place.glob(f"{kind}-*.{suffix}"))
    return dict(sorted((int(match[1]), path) for match, path in found if match is not None))


def _ranks(place: Path, began: float, facts: RunMetadata | None) -> dict[int, tuple[RankStepRecord, ...]]:
    """Read the records of the ranks of this run; files of an earlier, larger job may still be there."""
    read_ = {rank: _rank_steps(path, began) for rank, path in _numbered(place, "rank").items()}
    return {rank: steps for rank, steps in read_.items() if steps or (facts is not None and rank < facts.world.size)}


def _rank_steps(path: Path, began: float) -> tuple[RankStepRecord, ...]:
    found = [
        RankStepRecord(
            step=step,
            time=number(record, "time"),
            phases=_phases(record),
            memory=integer(record, "memory"),
            peak=integer(record, "peak"),
            utilisation=number(record, "utilisation"),
        )
        for record in _since(json_lines(path), began)
        if (step := integer(record, "step")) is not None
    ]
    return _latest(found, lambda one: one.step)


def _events(place: Path, began: float) -> tuple[EventRecord, ...]:
    found = [
        EventRecord(
            time,
            kind,
            integer(record, "rank"),
            text(record, "text"),
            integer(record, "step"),
            text(record, "traceback"),
            text(record, "log"),
        )
        for record in json_lines(place / EVENTS)
        if (time := number(record, "time")) is not None and time >= began and (kind := text(record, "kind"))
    ]
    return tuple(sorted(found, key=lambda event: event.time))


def _looks(path: Path, began: float) -> tuple[ServerRecord, ...]:
    found = []
    for record in json_lines(path):
        time = number(record, "time")
        if time is None or time < began:
            continue
        staleness = record.get("staleness")
        stale: JSON = staleness if isinstance(staleness, dict) else {}
        rows = record.get("rows")
        found.append(
            ServerRecord(
                time=time,
                rows={name: int(rows_) for name, rows_ in numbers(rows if isinstance(rows, dict) else {}).items()},
                bytes_in=integer(record, "bytes_in") or 0,
                bytes_out=integer(record, "bytes_out") or 0,
                pulls=integer(record, "pulls") or 0,
                pushes=integer(record, "pushes") or 0,
                staleness_mean=number(stale, "mean"),
                staleness_max=integer(stale, "max"),
                memory=integer(record, "memory") or 0,
            )
        )
    return tuple(found)
