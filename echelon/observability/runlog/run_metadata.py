"""Typed contents of run.json and memory.json: ranks, model, plan, settings and memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from echelon.observability.runlog.tolerant_json import (
    JSON,
    an_object,
    integer,
    integers,
    number,
    numbers,
    objects,
    text,
    texts,
)


@dataclass(frozen=True)
class WorldMetadata:
    size: int
    hosts: int
    device: str
    backend: str
    launcher: str
    servers: int = 0


@dataclass(frozen=True)
class RankMetadata:
    """One rank of a run.

    memory: bytes of memory of its device; None if unknown
    at:     indices along the axes of the mesh
    """

    rank: int
    host: str
    device: str
    memory: int | None
    at: dict[str, int]
    pid: int | None


@dataclass(frozen=True)
class StageMetadata:
    """One stage of a pipeline.

    units:      modules of the stage
    parameters: number of elements in its parameters
    """

    stage: int
    ranks: tuple[int, ...]
    units: tuple[str, ...]
    parameters: int


@dataclass(frozen=True)
class ScheduleMetadata:
    name: str
    micro_batches: int


@dataclass(frozen=True)
class SettingMetadata:
    name: str
    value: Any
    origin: str


@dataclass(frozen=True)
class PredictedAction:
    """One predicted action of a pipeline's schedule; times are seconds from the start of the step.

    kind: F, B, I or W
    """

    rank: int
    kind: str
    micro_batch: int
    stage: int
    begin: float
    end: float


@dataclass(frozen=True)
class PredictionMetadata:
    """The planner's prediction.

    seconds: time of a step
    parts:   seconds of a step by part
    memory:  bytes by kind, for each place along the stage axis
    events:  actions of the pipeline's schedule
    """

    seconds: float
    parts: dict[str, float]
    memory: tuple[dict[str, float], ...]
    events: tuple[PredictedAction, ...]


@dataclass(frozen=True)
class RunMetadata:
    """The contents of run.json.

    started: start time of this attempt, seconds since the epoch
    began:   start time of the first attempt, seconds since the epoch
    commit:  git commit of the script's directory; "" if unknown
    start:   seconds from the start of rank 0's process to the end of its first step, by part, in their order; those of
             the compiler are among the others
    """

    echelon: str
    torch: str
    python: str
    command: tuple[str, ...]
    script: str
    started: float
    began: float
    attempt: int
    world: WorldMetadata
    mesh: dict[str, int]
    ranks: tuple[RankMetadata, ...]
    plan: dict[str, Any]
    parameter_count: int
    parameter_bytes: int
    stages: tuple[StageMetadata, ...]
    schedule: ScheduleMetadata | None
    settings: tuple[SettingMetadata, ...]
    said: tuple[str, ...]
    predicted: PredictionMetadata | None
    flops_per_step: float | None
    environment: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    optimizer: str = ""
    start: dict[str, float] = field(default_factory=dict)

    @property
    def is_zoo(self) -> bool:
        """True if ``echelon train`` has started the run; its script is then Echelon's own."""
        return Path(self.script).parts[-4:] == ("echelon", "zoo", "train", "run.py")

    def value(self, name: str) -> Any:
        """Return the value of a setting; None if there is no setting of that name."""
        return next((each.value for each in self.settings if each.name == name), None)

    @classmethod
    def of(cls, plain: JSON | None) -> RunMetadata | None:
        if plain is None:
            return None
        started = number(plain, "started") or 0.0
        began = number(plain, "began")
        parameters, schedule = an_object(plain, "parameters"), plain.get("schedule")
        return cls(
            echelon=text(plain, "echelon"),
            torch=text(plain, "torch"),
            python=text(plain, "python"),
            command=texts(plain, "command"),
            script=text(plain, "script"),
            started=started,
            began=started if began is None else began,
            attempt=integer(plain, "attempt") or 0,
            world=_world(an_object(plain, "world")),
            mesh=_counts(an_object(plain, "mesh")),
            ranks=tuple(_rank(one) for one in objects(plain, "ranks")),
            plan=an_object(plain, "plan"),
            parameter_count=integer(parameters, "count") or 0,
            parameter_bytes=integer(parameters, "bytes") or 0,
            stages=tuple(_stage(one) for one in objects(plain, "stages")),
            schedule=_schedule(schedule) if isinstance(schedule, dict) else None,
            settings=tuple(_setting(one) for one in objects(plain, "settings")),
            said=texts(plain, "said"),
            predicted=_predicted(plain.get("predicted")),
            flops_per_step=number(plain, "flops_per_step"),
            environment={k: v for k, v in an_object(plain, "environment").items() if isinstance(v, str)},
            commit=text(plain, "commit"),
            optimizer=text(plain, "optimizer"),
            start=numbers(an_object(plain, "start")),
        )


def _counts(plain: JSON) -> dict[str, int]:
    return {name: int(value) for name, value in numbers(plain).items()}


def _world(plain: JSON) -> WorldMetadata:
    return WorldMetadata(
        size=integer(plain, "size") or 1,
        hosts=integer(plain, "hosts") or 1,
        device=text(plain, "device"),
        backend=text(plain, "backend"),
        launcher=text(plain, "launcher"),
        servers=integer(plain, "servers") or 0,
    )


def _rank(plain: JSON) -> RankMetadata:
    return RankMetadata(
        rank=integer(plain, "rank") or 0,
        host=text(plain, "host"),
        device=text(plain, "device"),
        memory=integer(plain, "memory"),
        at=_counts(an_object(plain, "at")),
        pid=integer(plain, "pid"),
    )


def _stage(plain: JSON) -> StageMetadata:
    return StageMetadata(
        stage=integer(plain, "stage") or 0,
        ranks=integers(plain, "ranks"),
        units=texts(plain, "units"),
        parameters=integer(plain, "parameters") or 0,
    )


def _schedule(plain: JSON) -> ScheduleMetadata:
    return ScheduleMetadata(text(plain, "name"), integer(plain, "micro_batches") or 1)


def _setting(plain: JSON) -> SettingMetadata:
    return SettingMetadata(text(plain, "name"), plain.get("value"), text(plain, "origin"))


def _predicted(plain: Any) -> PredictionMetadata | None:
    seconds = number(plain, "seconds") if isinstance(plain, dict) else None
    if seconds is None:
        return None
    events = plain.get("events")
    spans = [_span(one) for one in events] if isinstance(events, list) else []
    return PredictionMetadata(
        seconds=seconds,
        parts=numbers(an_object(plain, "parts")),
        memory=tuple(numbers(one) for one in objects(plain, "memory")),
        events=tuple(span for span in spans if span is not None),
    )


def _span(plain: Any) -> PredictedAction | None:
    try:
        rank, kind, micro_batch, stage, begin, end = plain
        return PredictedAction(int(rank), str(kind), int(micro_batch), int(stage), float(begin), float(end))
    except (TypeError, ValueError, OverflowError):
        return None


#: ``Footprint.moment`` of measurements without an allocator's peak.
BETWEEN = "between two steps"


@dataclass(frozen=True)
class ModuleBytes:
    """Bytes of a module, without those of submodules that have a row of their own."""

    name: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int


@dataclass(frozen=True)
class MemorySaving:
    """A possible saving of memory.

    what:  the option that saves it
    bytes: reduction of the peak
    """

    what: str
    bytes: int


@dataclass(frozen=True)
class Footprint:
    """The contents of memory.json: the peak memory, the moment of the peak, and its composition.

    how:          description of the training setup
    ranks, place: ranks of this footprint, and their place in the mesh, such as "stage 0, split 1 of 2"
    notes:        limitations of the estimate
    each:         footprints of all ranks if they differ; this one is then the largest
    """

    peak: int
    moment: str
    kinds: dict[str, int]
    modules: tuple[ModuleBytes, ...]
    savings: tuple[MemorySaving, ...]
    measured: bool
    how: str = ""
    ranks: tuple[int, ...] = ()
    place: str = ""
    notes: tuple[str, ...] = ()
    each: tuple[Footprint, ...] = ()

    @classmethod
    def of(cls, plain: JSON | None) -> Footprint | None:
        if plain is None:
            return None
        peak = an_object(plain, "peak")
        return cls(
            peak=integer(peak, "bytes") or 0,
            moment=text(peak, "moment"),
            kinds=_counts(an_object(plain, "kinds")),
            modules=tuple(_module(one) for one in objects(plain, "modules")),
            savings=tuple(
                MemorySaving(text(one, "what"), integer(one, "bytes") or 0) for one in objects(plain, "savings")
            ),
            measured=plain.get("measured") is True,
            how=text(plain, "how"),
            ranks=integers(plain, "ranks"),
            place=text(plain, "place"),
            notes=texts(plain, "notes"),
            each=tuple(one for one in map(cls.of, objects(plain, "each")) if one is not None),
        )

    def to_json(self) -> JSON:
        """Return the footprint in the format of memory.json."""
        return {
            "peak": {"bytes": self.peak, "moment": self.moment},
            "kinds": self.kinds,
            "modules": [asdict(module) for module in self.modules],
            "savings": [asdict(saving) for saving in self.savings],
            "measured": self.measured,
            "how": self.how,
            "ranks": list(self.ranks),
            "place": self.place,
            "notes": list(self.notes),
            "each": [one.to_json() for one in self.each],
        }


def _module(plain: JSON) -> ModuleBytes:
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
    return ModuleBytes(text(plain, "name"), *(integer(plain, kind) or 0 for kind in kinds))
