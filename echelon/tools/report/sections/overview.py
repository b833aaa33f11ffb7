"""Head of the page: title of the run, its status, and the most important figures."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from echelon.base import formatting
from echelon.observability.runlog.run_metadata import RunMetadata
from echelon.observability.runlog.run_reader import EventRecord, Run
from echelon.observability.runlog.tolerant_json import number
from echelon.tools.report.figures.curves import figure
from echelon.tools.report.run_files import RunFiles
from echelon.tools.report.sections.phases import median_step, step_time

#: A run is silent after this many seconds, and at least this many record intervals, without a record.
QUIET, QUIET_RECORDS = 60.0, 10
#: Number of latest records whose median is the current speed.
RECENT = 10

Fact = tuple[str, str, str]  #: figure, description, detail


@dataclass(frozen=True)
class OverviewStatus:
    """The status of a run.

    kind:  running, ended, failed or silent
    words: the status as text
    """

    kind: str
    words: str


@dataclass(frozen=True)
class Overview:
    title: str
    lines: list[str]
    status: OverviewStatus
    facts: list[Fact]
    alerts: list[Alert]


@dataclass(frozen=True)
class Alert:
    """A failure, stall or warning, with what is known about a failed rank.

    where: step and log of the rank, as text; "" if unknown
    """

    kind: str
    text: str
    where: str = ""
    traceback: str = ""


def overview(gathered: RunFiles, now: float) -> Overview:
    run = gathered.run
    state = status(run, now)
    lines = [*_lines(run), _times(run, state, now)]
    return Overview(_title(run), [*filter(None, lines)], state, list(_facts(gathered, state)), alerts(run.events))


def _title(run: Run) -> str:
    if run.facts is None:
        return run.directory.resolve().name
    if run.facts.is_zoo and (model := run.facts.value("model_name")):
        return f"{model} on {data}" if (data := run.facts.value("dataset_name")) else str(model)
    return Path(run.facts.script).name or shlex.join(run.facts.command) or run.directory.resolve().name


def _lines(run: Run) -> Iterator[str]:
    facts = run.facts
    if facts is None:
        yield "The run has no run.json; this page is made from its other files."
        return
    yield f"{_model(facts)}on {_machines(facts)}"
    batch = facts.value("global_batch")
    yield ", ".join(filter(None, [facts.optimizer, f"global batch {batch:,}" if isinstance(batch, int) else ""]))


def _model(facts: RunMetadata) -> str:
    mesh = " x ".join(f"{axis} {size}" for axis, size in facts.mesh.items() if size > 1)
    count = f"{formatting.count(facts.parameter_count)} parameters, " if facts.parameter_count else ""
    return f"{count}{mesh}{', ' if mesh else ''}"


def _machines(facts: RunMetadata) -> str:
    world, kinds = facts.world, {rank.device.partition(" ")[2] or rank.device for rank in facts.ranks}
    kind = f" ({kinds.pop()})" if len(kinds) == 1 else ""
    servers = f" and {_several(world.servers, 'parameter server')}" if world.servers else ""
    hosts = f" on {_several(world.hosts, 'host')}" if world.hosts > 1 else ""
    return f"{_several(world.size, 'rank')}{servers}{hosts}{kind}"


def _several(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def _times(run: Run, state: OverviewStatus, now: float) -> str:
    """Return start and duration of the run, and how often it was restarted."""
    if run.facts is None:
        return state.words
    again = f", restarted {_how_often(run.facts.attempt)}" if run.facts.attempt else ""
    took = duration(run, state, now)
    what = f", {state.words}" if state.words not in ("ended", "failed", "running") else ""
    return (
        f"started {moment(run.facts.began)}, {'running for' if state.kind == 'running' else 'took'} {took}{again}{what}"
    )


def duration(run: Run, state: OverviewStatus, now: float) -> str:
    """Return the time from the first attempt's start to the last record, or to now while the run goes on."""
    began = run.facts.began if run.facts is not None else 0.0
    until = now if state.kind == "running" else last_sign(run) or now
    return in_words(max(0.0, until - began))


def _how_often(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


# ---- status ----


def status(run: Run, now: float) -> OverviewStatus:
    last = next((each for each in reversed(run.events) if each.kind in ("failed", "ended", "restart", "resumed")), None)
    seen = last_sign(run)
    if last is not None and last.kind == "failed" and _nothing_after(run, last.time):
        return OverviewStatus("failed", "failed")
    if last is not None and last.kind == "ended" and _nothing_after(run, last.time):
        return OverviewStatus("ended", "ended")
    if run.steps and run.steps[-1].total is not None and run.steps[-1].step >= run.steps[-1].total:
        return OverviewStatus("ended", "all steps done")
    if seen is None:
        return OverviewStatus("silent", "nothing written yet")
    if now - seen <= max(QUIET, QUIET_RECORDS * _interval(run)):
        return OverviewStatus("running", "running")
    return OverviewStatus("silent", f"nothing written since {moment(seen)}: it was killed, or has stalled")


def _nothing_after(run: Run, then: float) -> bool:
    return not run.steps or (run.steps[-1].time or 0.0) <= then + 1.0


def last_sign(run: Run) -> float | None:
    times = [run.steps[-1].time if run.steps else None, run.events[-1].time if run.events else None]
    times += [steps[-1].time for steps in run.ranks.values() if steps]
    times += [looks[-1].time for looks in run.servers.values() if looks]
    if not any(times) and run.facts is not None:
        times.append(run.facts.started)
    return max((each for each in times if each), default=None)


def _interval(run: Run) -> float:
    times = [each.time for each in run.steps[-RECENT:] if each.time is not None]
    return max(0.0, (times[-1] - times[0]) / (len(times) - 1)) if len(times) > 1 else 0.0


def alerts(events: Sequence[EventRecord]) -> list[Alert]:
    """Return the newest three failures, stalls and warnings."""
    return [_alert(each) for each in events if each.kind in ("failed", "stall", "warning")][-3:]


def _alert(event: EventRecord) -> Alert:
    named = event.rank is None or event.text.startswith(f"rank {event.rank} ")
    at = [f"at step {event.step:,}" if event.step else "", f"log: {event.log}" if event.log else ""]
    text = event.text if named else f"rank {event.rank}: {event.text}"
    return Alert(event.kind, text, "; ".join(filter(None, at)), event.traceback)


# ---- figures ----


def _facts(gathered: RunFiles, state: OverviewStatus) -> Iterator[Fact]:
    run = gathered.run
    if run.steps:
        yield _progress(run, state)
        yield from _loss(run)
        yield from _speed(run)
    peaks = {rank: max((one.peak or 0 for one in steps), default=0) for rank, steps in run.ranks.items()}
    if peaks and max(peaks.values()):
        rank = max(peaks, key=lambda each: peaks[each])
        yield formatting.size(peaks[rank]), "memory at most", f"rank {rank}{_of(run.facts, rank)}"
    if (used := number(gathered.summary, "mfu")) is not None:
        yield formatting.percent(used), "of the peak arithmetic", "MFU, from the timeline"
    elif recorded := [each.mfu for each in run.steps if each.mfu is not None]:
        yield formatting.percent(median(recorded)), "of the peak arithmetic", "MFU, median"
    if run.servers:
        rows = sum(sum(looks[-1].rows.values()) for looks in run.servers.values() if looks)
        yield f"{rows:,}", "rows in tables", f"on {_several(len(run.servers), 'server')}"


def _progress(run: Run, state: OverviewStatus) -> Fact:
    last = run.steps[-1]
    if not last.total or last.total < 0:
        return f"{last.step:,}", "step" if last.step == 1 else "steps", ""
    left = (last.total - last.step) * _interval(run) / max(1, _stride(run))
    small = (
        f"about {in_words(left)} left"
        if state.kind == "running" and left
        else formatting.percent(last.step / last.total)
    )
    return f"{last.step:,}", f"of {last.total:,} steps", small


def _stride(run: Run) -> float:
    recent = run.steps[-RECENT:]
    return (recent[-1].step - recent[0].step) / (len(recent) - 1) if len(recent) > 1 else 1.0


def _loss(run: Run) -> Iterator[Fact]:
    losses = [(each.loss, each.step) for each in run.steps if each.loss is not None]
    if run.steps[-1].loss is None:
        yield "nan", "loss", f"not a number at step {run.steps[-1].step:,}"
    elif losses:
        lowest, step = min(losses)
        yield figure(run.steps[-1].loss), "loss", f"lowest {figure(lowest)} at step {step:,}"


def _speed(run: Run) -> Iterator[Fact]:
    examples = [each.examples_per_s for each in run.steps if each.examples_per_s is not None]
    if speeds := examples or [each.steps_per_s for each in run.steps if each.steps_per_s is not None]:
        what = f"{'examples' if examples else 'steps'} a second"
        yield formatting.rate(median(speeds)), what, f"median; latest {formatting.rate(speeds[-1])}"
    if tokens := [each.tokens_per_s for each in run.steps if each.tokens_per_s is not None]:
        yield formatting.rate(median(tokens)), "tokens a second", f"median; latest {formatting.rate(tokens[-1])}"
    if (took := median_step([each.phases for each in run.steps])) is not None:
        records = [each.phases for each in run.steps if each.phases]
        small = f"median; latest {formatting.duration(step_time(records[-1]) / 1e3)}"
        yield formatting.duration(took / 1e3), "a step", small


def _of(facts: RunMetadata | None, rank: int) -> str:
    limit = next((each.memory for each in facts.ranks if each.rank == rank and each.memory), None) if facts else None
    return f", of {formatting.size(limit)}" if limit else ""


# ---- times ----


def moment(seconds: float) -> str:
    """Format a time in UTC, because the reader may be in another time zone than the run."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, OSError, ValueError):
        return "at an unknown time"


def in_words(seconds: float) -> str:
    """Format a duration as ``7.4 s``, ``3 min``, ``2 h 10 min`` or ``4 d 3 h``."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return formatting.duration(seconds)
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
