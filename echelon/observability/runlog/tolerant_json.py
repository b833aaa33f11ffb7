"""JSON that may be damaged, cut or of another version: what can be read of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

JSON = dict[str, Any]
LARGEST = 1e100


def json_file(path: Path) -> JSON | None:
    """The object in it; None where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def json_lines(path: Path) -> list[JSON]:
    """The objects of its lines that can be read."""
    try:
        lines = path.read_bytes().splitlines() if path.is_file() else []  # a device would have no end
    except OSError:
        return []
    return [value for line in lines if (value := _line(line)) is not None]


def _line(line: bytes) -> JSON | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def number(record: JSON, name: str) -> float | None:
    """A finite number under that name; one beyond all measure is damage, and sums of it would be no numbers."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -LARGEST < value < LARGEST else None


def integer(record: JSON, name: str) -> int | None:
    value = number(record, name)
    return None if value is None else int(record[name])


def text(record: JSON, name: str) -> str:
    value = record.get(name)
    return value if isinstance(value, str) else ""


def numbers(record: JSON) -> dict[str, float]:
    """All of its finite numbers."""
    return {name: value for name in record if (value := number(record, name)) is not None}


def objects(record: JSON, name: str) -> list[JSON]:
    """The objects of the list under that name."""
    value = record.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def an_object(record: JSON, name: str) -> JSON:
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def texts(record: JSON, name: str) -> tuple[str, ...]:
    value = record.get(name)
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()


def integers(record: JSON, name: str) -> tuple[int, ...]:
    value = record.get(name)
    return tuple(item for item in value if type(item) is int) if isinstance(value, list) else ()
