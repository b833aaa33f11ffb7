"""Format a Strategy as a text table."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from echelon.base.formatting import text_table
from echelon.strategy.parts import Fast

if TYPE_CHECKING:
    from echelon.strategy.strategy import Strategy

_HEAD = ("strategy", "settings (* differs from the default)")


def table(strategy: Strategy) -> str:
    """Return a table with one line for each option that is on, and one line for all that are off."""
    rows, off = [_HEAD], []
    for field in dataclasses.fields(strategy):
        value = getattr(strategy, field.name)
        if field.name == "sync_batch_norm" and value is None:
            rows.append((field.name, "yes, except where ranks step alone"))
        elif field.name == "fast" and value is None:
            parts = ", ".join(part.name for part in dataclasses.fields(Fast))
            rows.append((field.name, f"automatic, on GPUs: {parts}"))
        elif value == field.default and not dataclasses.is_dataclass(value):
            off.append(field.name)
        else:
            rows.append((field.name, settings(value, field.default)))
    return "\n".join(text_table([*rows, ("off", ", ".join(off))] if off else rows))


def settings(value: Any, default: Any) -> str:
    """Return all settings of an option as text, such as ``k_steps=4*  begin_step=0``, or the value itself."""
    if not dataclasses.is_dataclass(value):
        return f"{word(value)}{'' if value == default else '*'}"
    fields = [(field.name, getattr(value, field.name), field.default) for field in dataclasses.fields(value)]
    return "  ".join(f"{name}={word(now)}{'' if now == usual else '*'}" for name, now, usual in fields)


def word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return f"({', '.join(map(word, value))})"
    if dataclasses.is_dataclass(value):
        return f"({settings(value, None)})"
    return f"{value:g}" if isinstance(value, float) else str(value)
