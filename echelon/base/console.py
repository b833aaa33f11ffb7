"""``say``: one line of Echelon on the console."""

from __future__ import annotations

import sys


def say(line: str, *, stdout: bool = False) -> None:
    """Print a line that begins with ``echelon:``, to stderr by default."""
    print(f"echelon: {line}", file=sys.stdout if stdout else sys.stderr, flush=True)
