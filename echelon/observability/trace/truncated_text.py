"""Formats the description of a trace that was cut short."""

from __future__ import annotations

from typing import Any

from echelon.base.formatting import duration


def headline(cut: dict[str, Any]) -> str:
    """Return one line with the requested steps and the outcome."""
    requested = "" if cut["asked"] is None else f"{_steps(*cut['asked'])} requested; "
    if cut["running"]:
        return f"still recording: {requested}the result is partial"
    words = f"cut short: {requested}{_progress(cut)}"
    if cut["first"] is not None:
        words += f"; rank {cut['first']} stopped first"
    return words


def lines(cut: dict[str, Any]) -> list[str]:
    """Return the headline and a line for each rank; the rank lines are left out if the run simply ended."""
    found = [headline(cut)]
    if cut["because"]:
        found.append(f"the launcher said: {cut['because']}")
    if cut["running"] or any(row["said"] != "" for row in cut["ranks"]):
        found += [f"  rank {row['rank']}: {_rank(row, cut['running'])}" for row in cut["ranks"]]
    if cut["missing"]:
        ranks = ", ".join(map(str, cut["missing"][:8])) + (", ..." if len(cut["missing"]) > 8 else "")
        one = len(cut["missing"]) == 1
        found.append(
            f"  rank{'' if one else 's'} {ranks}: no records here; they are on the disk of another host, or were "
            "never begun"
        )
    return found


def _progress(cut: dict[str, Any]) -> str:
    """Return text for the last step that all ranks have completed."""
    known = [row["step"] for row in cut["ranks"]]
    if any(step is None for step in known):
        return "no step was completed by all ranks"
    return f"all ranks completed step {min(known)}" if len(known) > 1 else f"it completed step {known[0]}"


def _rank(row: dict[str, Any], running: bool) -> str:
    words = "no step done" if row["step"] is None else f"step {row['step']} done"
    if row["doing"]:
        words += "; then " + _doing(row["doing"])
    if row["said"]:
        words += f"; it ended with {row['said']}"
    elif row["said"] is None and not running:
        silent = row["silent_ms"] / 1e3
        early = f", {duration(silent)} before the last record of another rank" if silent >= 0.1 else ""
        words += f"; no record after that{early}"
    return words


def _doing(under_way: list[dict[str, Any]]) -> str:
    phase, *waits = under_way
    words = f"{duration(phase['ms'] / 1e3)} in {phase['name']} of step {phase['step']}"
    for wait in waits:
        words += f", {duration(wait['ms'] / 1e3)} of it in '{wait['name']}' with ranks {wait['ranks']}"
    return words


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
