"""Parses the list of hosts and their processes: ``--hosts`` and ``--hostfile``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.base.errors import UsageError

#: A name that ssh cannot mistake for an option; ``user@`` may precede it; an IPv6 address stands in brackets.
_HOST = r"(?:[\w.][\w.-]*@)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_][\w.-]*)"
_ENTRY = re.compile(rf"({_HOST})(?::(\d+))?", re.ASCII)
_SLOTS = re.compile(r"(slots|max[-_]slots)\s*=\s*(\d+)", re.ASCII)


@dataclass(frozen=True)
class HostListEntry:
    """One host as the user wrote it; ``procs`` is ``None`` if no number was given."""

    name: str
    procs: int | None = None

    @property
    def address(self) -> str:
        """The name without user and brackets."""
        return self.name.rpartition("@")[2].strip("[]")


def parse_host_list(hosts: str | None, hostfile: str | None) -> tuple[HostListEntry, ...]:
    """Return the hosts of ``--hosts a:8,b:8`` or of a file; raises a one-line ``UsageError``."""
    if hosts is not None and hostfile is not None:
        raise UsageError("--hosts and --hostfile both name the hosts; leave one of them out")
    if hostfile is not None:
        return _read(hostfile)
    entries = [_entry(part.strip(), "--hosts") for part in (hosts or "").split(",") if part.strip()]
    if not entries:
        raise UsageError("--hosts names no host; name them by commas, as in --hosts a:8,b:8")
    names = [entry.name for entry in entries]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--hosts names '{twice}' twice; name each host once, with its processes: {twice}:2")
    return tuple(entries)


def _read(path: str) -> tuple[HostListEntry, ...]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"--hostfile '{path}' cannot be read: {reason}") from None
    found = [_line(text, f"--hostfile {path}, line {number},") for number, text in enumerate(lines, 1)]
    entries = [entry for entry in found if entry is not None]
    if not entries:
        raise UsageError(f"--hostfile '{path}' names no host; write one a line, as in 'gpu01 slots=8'")
    return _added_up(entries)


def _line(text: str, where: str) -> HostListEntry | None:
    """Parse ``host``, ``host:8`` or ``host slots=8`` (Open MPI's ``max_slots=`` is ignored)."""
    name, _, rest = text.partition("#")[0].strip().partition(" ")
    if not name:
        return None
    entry = _entry(name, where)
    if _SLOTS.sub("", rest).strip():
        raise UsageError(f"{where} has '{rest.strip()}' after host {name}; known: slots=N")
    slots = [int(count) for kind, count in _SLOTS.findall(rest) if kind == "slots"]
    return _counted(entry, slots[0], where) if slots else entry


def _entry(text: str, where: str) -> HostListEntry:
    match = _ENTRY.fullmatch(text)
    if match is None:
        raise UsageError(f"{where} names '{text}', which is no host; write it as name or name:processes")
    entry = HostListEntry(match[1])
    return entry if match[2] is None else _counted(entry, int(match[2]), where)


def _counted(entry: HostListEntry, procs: int, where: str) -> HostListEntry:
    if procs < 1:
        raise UsageError(f"{where} gives the host {entry.name} no process; give it one or more, or leave it out")
    return replace(entry, procs=procs)


def _added_up(entries: Sequence[HostListEntry]) -> tuple[HostListEntry, ...]:
    """Merge entries of the same host: some files have one line per process, so their processes are added."""
    result: dict[str, HostListEntry] = {}
    for entry in entries:
        before = result.get(entry.name)
        result[entry.name] = entry if before is None else replace(entry, procs=(before.procs or 1) + (entry.procs or 1))
    return tuple(result.values())
