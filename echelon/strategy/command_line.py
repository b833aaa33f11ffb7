"""Build a Strategy from command-line arguments: a file, settings ``name=value``, or both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.base.errors import UsageError
from echelon.strategy import strategy_files
from echelon.strategy.parts import SHORTHAND
from echelon.strategy.strategy import Strategy


def strategy_from(words: Sequence[str]) -> Strategy:
    """Build a Strategy from a file, from settings ``name=value`` or ``name.setting=value``, or from both.

    A setting overrides the value in the file.
    """
    paths = [word for word in words if "=" not in word or Path(word).is_file()]
    if len(paths) > 1:
        raise UsageError(f"'{paths[0]}' and '{paths[1]}' are two strategies; give one file, and settings as name=value")
    for path in paths:
        if not Path(path).suffix:
            raise UsageError(f"'{path}' is neither a file (.yaml, .yml, .json) nor a setting such as {path}=true")
    values = strategy_files.read(paths[0]) if paths else {}
    for word in words:
        if word not in paths:
            name, _, text = word.partition("=")
            put(values, name.split("."), strategy_files.parse_value(text, word))
    return strategy_files.named(paths[0] if paths else None, lambda: Strategy.from_dict(values))


def put(values: dict[str, Any], path: list[str], value: Any) -> None:
    first, *rest = path
    if not rest:
        values[first] = value
        return
    inner = values.get(first)
    if isinstance(inner, str | int) and not isinstance(inner, bool) and first in SHORTHAND:  # amp=fp16 amp.growth=4
        inner = {SHORTHAND[first]: inner}
    values[first] = inner if isinstance(inner, dict) else {}
    put(values[first], rest, value)
