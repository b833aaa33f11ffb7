"""Argument checks that run before imports that take seconds."""

from __future__ import annotations

import difflib
from pathlib import Path

from echelon.base.errors import UsageError


def require_model(word: str) -> None:
    """Raise UsageError if the file of ``script.py`` or ``file.py:callable`` is missing, or ``zoo:NAME`` is unknown."""
    if word.startswith("zoo:"):
        from echelon.zoo.registry import require_name

        require_name(word.removeprefix("zoo:").split(",")[0])
    source = word if word.endswith(".py") else word.rpartition(":")[0]
    if source.endswith(".py") and not Path(source).is_file():
        raise UsageError(f"MODEL: no file at '{source}'{_near(Path(source))}")


def require_path(path: str, line: str) -> None:
    """Raise UsageError with the message ``line`` if the path does not exist; URLs are not checked."""
    if "://" not in path and not Path(path).exists():
        raise UsageError(line)


def _near(path: Path) -> str:
    beside = [str(found) for found in path.parent.glob("*.py")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(str(path), beside, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
