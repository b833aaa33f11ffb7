"""Predict the memory of a training script, run in one process up to its first batch (plan_report/plan_script.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.base.errors import UsageError
from echelon.tools.memory_profile.memory_options import MemoryOptions
from echelon.tools.plan_report.plan_script import ask


def ask_script(options: MemoryOptions, arguments: Sequence[str]) -> dict[str, Any]:
    """Run the script and return ``{"title": ..., "footprint": ...}`` as JSON data."""
    if not Path(options.model).is_file():
        raise UsageError(f"MODEL: no file at '{options.model}'")
    return ask(options.model, arguments, {"footprint": options.to_dict()})
