"""Sections about the setup of a run and its history: settings with their origins, plan, environment, events."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.base import formatting
from echelon.observability.runlog.run_metadata import RunMetadata, SettingMetadata
from echelon.observability.runlog.run_reader import EventRecord
from echelon.tools.report.sections.html_table import HtmlTable
from echelon.tools.report.sections.overview import moment

#: Largest number of events shown; older ones are left out.
MOST_EVENTS = 400
#: Longest value in a table, in characters; longer ones are cut.
LONGEST = 400


@dataclass(frozen=True)
class SettingsSection:
    """The settings of a run as (name, value, origin).

    given: settings that were given
    usual: settings left at their defaults
    """

    given: list[tuple[str, str, str]]
    usual: list[tuple[str, str, str]]


def settings(facts: RunMetadata) -> SettingsSection | None:
    rows = [(each, (each.name, in_words(each.value), each.origin)) for each in facts.settings]
    given, usual = [row for each, row in rows if not _usual(each)], [row for each, row in rows if _usual(each)]
    return SettingsSection(given, usual) if rows else None


def _usual(setting: SettingMetadata) -> bool:
    return setting.origin == "default"


def in_words(value: Any) -> str:
    """Format a value: text as it is, other values as JSON, cut after ``LONGEST`` characters."""
    if value is None:
        return "none"
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]} ..."


def plan_text(facts: RunMetadata) -> str:
    return json.dumps(facts.plan, indent=2, ensure_ascii=False, default=str) if facts.plan else ""


def stages(facts: RunMetadata) -> HtmlTable | None:
    rows = [
        (
            str(stage.stage),
            ", ".join(map(str, stage.ranks)),
            formatting.count(stage.parameters),
            str(len(stage.units)),
            ", ".join(stage.units[:LIKE_THESE]) + (" ..." if len(stage.units) > LIKE_THESE else ""),
        )
        for stage in facts.stages
    ]
    head = ("stage", "ranks", "parameters", "units", "which")
    return HtmlTable("What each stage has", head, rows, (0, 2, 3)) if rows else None


#: Largest number of unit names in a row of the table of stages.
LIKE_THESE = 8


def environment(facts: RunMetadata) -> list[tuple[str, str]]:
    return [(name, value) for name, value in environment_rows(facts) if value]


def environment_rows(facts: RunMetadata) -> Iterator[tuple[str, str]]:
    world, batch = facts.world, facts.value("global_batch")
    yield "command", shlex.join(facts.command)
    yield "git commit", facts.commit
    yield "optimizer", facts.optimizer
    yield "global batch", f"{batch:,}" if isinstance(batch, int) else ""
    yield "started", f"{moment(facts.started)}{f' (attempt {facts.attempt + 1})' if facts.attempt else ''}"
    yield "first step after", start_parts(facts)
    yield "Echelon", facts.echelon
    yield "PyTorch", facts.torch
    yield "Python", facts.python
    yield "started by", world.launcher
    yield "messages", world.backend
    devices = dict.fromkeys(rank.device.partition(" ")[2] or rank.device for rank in facts.ranks)
    yield "devices", "; ".join(filter(None, devices))
    yield "hosts", ", ".join(dict.fromkeys(rank.host for rank in facts.ranks if rank.host))
    if facts.parameter_count:
        yield "parameters", f"{facts.parameter_count:,} ({formatting.size(facts.parameter_bytes)})"
    if facts.flops_per_step:
        yield "arithmetic of a step", f"{facts.flops_per_step:.4g} FLOP"


#: Part of a start whose seconds are among those of the other parts.
AMONG = "compile"


def start_parts(facts: RunMetadata) -> str:
    """Return the time from the start of a process to the end of its first step, with its parts; "" if unknown."""
    parts = {part: seconds for part, seconds in facts.start.items() if part != AMONG}
    if not parts:
        return ""
    listed = ", ".join(f"{part} {formatting.duration(seconds)}" for part, seconds in parts.items())
    compiled = f"; compiling took {formatting.duration(facts.start[AMONG])} of it" if facts.start.get(AMONG) else ""
    return f"{formatting.duration(sum(parts.values()))} ({listed}{compiled})"


@dataclass(frozen=True)
class EventsSection:
    """The events of a run.

    rows:     (time, kind, rank, text), the newest first
    counts:   number of events by kind
    left_out: number of older events that are not shown
    """

    rows: list[tuple[str, str, str, str]]
    counts: list[tuple[str, int]]
    left_out: int


def events(found: Sequence[EventRecord]) -> EventsSection | None:
    if not found:
        return None
    shown = list(reversed(found[-MOST_EVENTS:]))
    rows = [
        (moment(each.time), each.kind, "" if each.rank is None else f"rank {each.rank}", each.text) for each in shown
    ]
    kinds = dict.fromkeys(each.kind for each in found)
    counts = [(kind, sum(each.kind == kind for each in found)) for kind in kinds]
    return EventsSection(rows, counts, len(found) - len(shown))
