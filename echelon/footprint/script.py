"""The footprint of a training script: it runs as it is, alone, up to its first batch (planner/explain/script.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.errors import UsageError
from echelon.footprint.asked import Asked
from echelon.planner.explain.script import ask


def ask_script(asked: Asked, arguments: Sequence[str]) -> dict[str, Any]:
    """``{"title": ..., "footprint": ...}``, as JSON has it."""
    if not Path(asked.model).is_file():
        raise UsageError(f"MODEL: no file at '{asked.model}'")
    return ask(asked.model, arguments, {"footprint": asked.to_dict()})
