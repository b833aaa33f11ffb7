"""Reads JSON that may be damaged, truncated or of another version; unreadable parts are skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

JSON = dict[str, Any]
LARGEST = 1e100


def json_file(path: Path) -> JSON | None:
    """Return the JSON object in a file; None if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def json_lines(path: Path) -> list[JSON]:
    """Return the JSON objects of all readable lines."""
    try:
        lines = path.read_bytes().splitlines() if path.is_file() else []  # reading a device would not end
    except OSError:
        return []
    return [value for line in lines if isinstance(value := json_value(line), dict)]


def json_value(text: str | bytes) -> Any:
    """Return the value of a JSON text; None if it is damaged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def number(record: JSON, name: str) -> float | None:
    """Return the finite number under that name, else None.

    Numbers beyond ``LARGEST`` count as damaged, because sums of them could overflow.
    """
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
    """Return all finite numbers of a record."""
    return {name: value for name in record if (value := number(record, name)) is not None}


def objects(record: JSON, name: str) -> list[JSON]:
    """Return the objects of the list under that name."""
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
