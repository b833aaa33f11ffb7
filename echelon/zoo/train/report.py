"""What a run says of itself: its parameters and where they came from at the start, one JSON object at the end."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping
from typing import Any

from echelon.zoo.train.parameters import PARAMETERS
from echelon.zoo.train.resolve import DEFAULT, Resolved

WIDTH = 118


def resolved_lines(resolved: Resolved) -> list[str]:
    """Every parameter: those that somebody chose with who did, the others in one paragraph."""
    chosen = {name: value for name, value in resolved.values.items() if value.origin != DEFAULT}
    width = max((len(name) for name in chosen), default=0)
    lines = [f"{resolved.model.name} on '{resolved.dataset.name}', task '{resolved.task}'"]
    lines += [f"  {name:<{width}}  {_shown(value.value)}  ({value.origin})" for name, value in chosen.items()]
    lines += [f"  {name:<{width}}  {_shown(value)}  (strategy)" for name, value in resolved.strategy.items()]
    common = {parameter.name for parameter in PARAMETERS}
    for title, own in (("common", True), ("of the model and the data set", False)):
        rest = [
            f"{name}={_shown(value.value)}"
            for name, value in resolved.values.items()
            if name not in chosen and (name in common) is own
        ]
        if rest:
            lines.append(f"  defaults, {title}:")
            lines += textwrap.wrap(" ".join(rest), WIDTH, initial_indent="    ", subsequent_indent="    ")
    return lines


def recorded_settings(resolved: Resolved) -> dict[str, tuple[Any, str]]:
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
