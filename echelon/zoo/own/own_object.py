"""Find the object that ``file.py:Name`` names, and the tasks it declares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from echelon.base.errors import UsageError, nearest
from echelon.base.object_path import object_at
from echelon.zoo.tasks import OWN, TASKS


def is_place(name: str) -> bool:
    """Return True for ``file.py:Name`` and ``package.module:Name``, and False for ``timm:NAME``."""
    source, colon, inner = name.rpartition(":")
    return bool(colon and inner) and ("." in source or "/" in source)


def found_at(place: str, option: str) -> Any:
    return object_at(place, option)


def short_name(place: str) -> str:
    """Return ``file.py:Name`` without its folder."""
    source, _, name = place.rpartition(":")
    return f"{Path(source).name}:{name}"


def declared_tasks(made: Any, place: str, first: str) -> tuple[str, ...]:
    """Return the task in the object's attribute ``task``; without it, all tasks, with ``first`` at the beginning."""
    declared = getattr(made, "task", None)
    if not isinstance(declared, str):
        return tuple(dict.fromkeys([first, *TASKS]))
    if declared not in TASKS:
        raise UsageError(f"{place}: there is no task '{declared}'{nearest(declared, [n for n in TASKS if n != OWN])}")
    return (declared,)
