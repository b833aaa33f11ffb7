"""Output of a verdict as a table with sentences, and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from echelon.base.formatting import things
from echelon.tools.verify.verdict import Divergence, LargestDifference, StepComparison, Verdict

#: Output width in characters if the output is not a terminal.
WIDTH = 120
#: Longest parameter name in the table, in characters, so that two names fit in a line.
NAME = 25


def as_json(verdict: Verdict) -> str:
    """Return the verdict as JSON. Non-finite numbers become null."""
    return json.dumps(_plain(dataclasses.asdict(verdict)), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_verdict(verdict: Verdict) -> None:
    """Print the table, the notes and the conclusion of a verdict."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(_table(verdict))
    for line in (*notes(verdict), conclusion(verdict)):
        console.print(line, markup=False, soft_wrap=True)


def _table(verdict: Verdict) -> Table:
    title = f"losses of {verdict.ranks} processes ({_mesh(verdict)}) and of one; relative differences, the largest"
    table = Table(title=title, title_justify="left", title_style="")
    several = any(row.optimizer for row in verdict.rows)
    first = ("update", "of") if several else ("step",)
    for name in (*first, f"{verdict.ranks} processes", "one process", "apart", "gradients", "weights"):
        table.add_column(name, justify="right", overflow="fold")
    for row in verdict.rows:
        which = [row.optimizer or "all"] if several else []
        table.add_row(
            str(row.step),
            *which,
            f"{row.loss:.7g}",
            f"{row.reference:.7g}",
            size(row.difference),
            _named(row.gradient),
            _named(row.weight),
        )
    return table


def _mesh(verdict: Verdict) -> str:
    return " x ".join(f"{name} {count}" for name, count in verdict.mesh.items() if count > 1) or "one replica"


def _named(largest: LargestDifference | None) -> str:
    return "none" if largest is None else f"{size(largest.relative)}  {in_short(largest.name)}"


def in_short(name: str) -> str:
    """Shorten a long parameter name to its layer number and its end, so that a table row fits in one line."""
    if len(name) <= NAME:
        return name
    words = name.split(".")
    first = next(at for at in range(len(words)) if at == len(words) - 1 or len(".".join(words[at:])) <= NAME - 4)
    number = next((word for word in reversed(words[:first]) if word.isdigit()), "")
    return f"{number}..{'.'.join(words[first:])}"


def notes(verdict: Verdict) -> Iterator[str]:
    """Yield notes about how the runs were compared and what was left out."""
    if verdict.silenced:
        yield f"dropout was off in {_some(verdict.silenced, 'module')}: ranks draw numbers of their own"
    if verdict.unrest and not verdict.stray:
        yield (
            f"random numbers are in play: one process that computes a batch twice gets losses {size(verdict.unrest)} "
            "apart; switch off their source (functional dropout, noise, sampling) to verify the rest"
        )
    if verdict.status != "cannot tell":
        yield from verdict.doubts
    if verdict.unseen:
        yield (
            "the loop's batches come neither from a loader nor from torch's random numbers, so that one process could "
            "not be given those of all ranks: it has trained on its own"
        )
    if verdict.stray:
        yield (
            f"random numbers are in play that each rank draws for itself: {', '.join(verdict.stray)}; switch off "
            "their source to verify the rest"
        )
    if verdict.rounding and verdict.status == "same":
        few = _some(verdict.rounding, "parameter")
        yield f"gradients of {few} are zero but for rounding, in part or whole; their effect on weights is not compared"
    if verdict.options:
        yield f"the script gives one process other settings, and those of the ranks were taken: {verdict.options}"
    if verdict.passes > 1:
        yield f"one process took each global batch in {verdict.passes} passes and added up their losses: {verdict.why}"
    if verdict.status != "same":
        yield from (f"expected of {one.setting}: {one.says}" for one in verdict.expected)


def conclusion(verdict: Verdict) -> str:
    """Return one line: same, expected, the first difference, or the reason for "cannot tell"."""
    steps = f"{len(verdict.rows)} steps" if len(verdict.rows) > 1 else "1 step"
    if verdict.status == "cannot tell":
        return f"cannot tell: {'; '.join(verdict.doubts)}"
    if verdict.parting is not None and verdict.wide:
        return (
            f"same but for rounding: in 64 bits {steps} on {verdict.ranks} processes give what one process gives, "
            f"{_within(verdict.wide)}; in 32 bits rounding grows: {parted(verdict.parting)}"
        )
    if verdict.parting is None:
        return f"same: {steps} on {verdict.ranks} processes give what one process gives; {_within(verdict.rows)}"
    if verdict.status == "expected":
        settings = ", ".join(one.setting for one in verdict.expected)
        return f"within what is expected of {settings}: {_within(verdict.rows)}"
    cause = f"{verdict.parting.cause}. Seen where " if verdict.parting.cause else ""
    return f"differs: {cause}{parted(verdict.parting)}"


def parted(parting: Divergence) -> str:
    """Return a sentence that says where the runs first differ."""
    far, hint = size(parting.difference), f"; {parting.hint}" if parting.hint else ""
    where = f"'{parting.where}'" + (f" ({parting.kind})" if parting.kind else "")
    if parting.what == "outputs":
        where = where if parting.where else f"the model itself ({parting.kind})"
        return f"the first layer that computes something else is {where}, in step 1: its outputs are {far} apart"
    if parting.what == "loss":
        layers = "the layers compute the same, but " if parting.step == 1 else ""
        return f"{layers}the losses of step {parting.step} are {far} apart{hint}"
    if parting.what == "gradients":
        up_to = f"losses are the same up to step {parting.step}"
        return f"{up_to}; in its backward the gradient of {where} differs first, by {far}{hint}"
    up_to = f"gradients are the same up to step {parting.step}; its update"
    if parting.what == "replicas":
        return f"{up_to} leaves the replicas with different weights, {where} first{hint}"
    if parting.what == "moves":
        return f"{up_to} is another one: {where} is apart by {far} of what training has changed there{hint}"
    return f"{up_to} leaves {where} {far} apart{hint}"


def _within(rows: Sequence[StepComparison]) -> str:
    losses = max(row.difference for row in rows)
    gradients = max((row.gradient.relative for row in rows if row.gradient), default=0.0)
    weights = max((row.weight.relative for row in rows if row.weight), default=0.0)
    return f"losses within {size(losses)}, gradients {size(gradients)}, weights {size(weights)}"


def size(value: float) -> str:
    """Format a relative difference: in percent from 1e-3 on, else in scientific notation."""
    if not math.isfinite(value):
        return "beyond measure"
    if value == 0:
        return "0"
    return f"{value:.1%}" if value >= 1e-3 else f"{value:.1e}"


def _some(names: Sequence[str], thing: str) -> str:
    listed = ", ".join(map(in_short, names[:3])) + (", ..." if len(names) > 3 else "")
    return f"{things(len(names), thing)} ({listed})"
