"""Format the output of a run: its parameters and their origin at the start, one JSON object at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.base.formatting import text_table
from echelon.observability.runlog.log_files import RUN
from echelon.zoo.train.resolve import DEFAULT, TrainConfig


def resolved_lines(resolved: TrainConfig, directory: Path) -> list[str]:
    """Return one line per non-default parameter, with its origin, and one line for those with default values."""
    chosen = {name: value for name, value in resolved.values.items() if value.origin != DEFAULT}
    rows = [(name, f"{_shown(value.value)}  ({value.origin})") for name, value in chosen.items()]
    rows += [(name, f"{_shown(value)}  (strategy)") for name, value in resolved.strategy.items()]
    rest = len(resolved.values) - len(chosen)
    return [
        f"{resolved.model.name} on '{resolved.dataset.name}', task '{resolved.task}'",
        *text_table(rows, indent=2),
        f"  {rest} others have their defaults: all are in {directory / RUN}, 'echelon train --help' has them",
    ]


def recorded_settings(resolved: TrainConfig) -> dict[str, tuple[Any, str]]:
    """Return value and origin of every parameter, for run.json."""
    values = {name: (value.value, value.origin) for name, value in resolved.values.items()}
    return values | {name: (value, "strategy") for name, value in resolved.strategy.items()}


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def final_line(results: Mapping[str, Any]) -> str:
    """Return the results as one JSON object; NaN and infinity, which JSON lacks, become null."""
    return json.dumps({name: _plain(value) for name, value in results.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
