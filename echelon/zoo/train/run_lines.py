"""What a run says of itself: its parameters and where they came from at the start, one JSON object at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.observability.runlog.log_files import RUN
from echelon.zoo.train.resolve import DEFAULT, TrainConfig


def resolved_lines(resolved: TrainConfig, directory: Path) -> list[str]:
    """Return a line a parameter that was chosen, with who chose it, and one line for those left at their defaults."""
    chosen = {name: value for name, value in resolved.values.items() if value.origin != DEFAULT}
    width = max((len(name) for name in [*chosen, *resolved.strategy]), default=0)
    lines = [f"{resolved.model.name} on '{resolved.dataset.name}', task '{resolved.task}'"]
    lines += [f"  {name:<{width}}  {_shown(value.value)}  ({value.origin})" for name, value in chosen.items()]
    lines += [f"  {name:<{width}}  {_shown(value)}  (strategy)" for name, value in resolved.strategy.items()]
    rest = len(resolved.values) - len(chosen)
    return [
        *lines,
        f"  {rest} others have their defaults: all are in {directory / RUN}, 'echelon train --help' has them",
    ]


def recorded_settings(resolved: TrainConfig) -> dict[str, tuple[Any, str]]:
    """The same for run.json: every parameter's value and who chose it."""
    values = {name: (value.value, value.origin) for name, value in resolved.values.items()}
    return values | {name: (value, "strategy") for name, value in resolved.strategy.items()}


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def final_line(results: Mapping[str, Any]) -> str:
    """One JSON object; numbers that are none (NaN) become null, which JSON has."""
    return json.dumps({name: _plain(value) for name, value in results.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
