"""Paths that a worker names, at which a server writes or reads files with the rights of its own user."""

from __future__ import annotations

import os
from pathlib import Path

from echelon.base.environment import PS_PATHS
from echelon.base.errors import UsageError
from echelon.base.formatting import brief


def requested_path(name: str) -> Path:
    """Return the path that a request names. Raises ``UsageError`` if this server does not write or read there.

    With ``ECHELON_PS_PATHS`` it lies in one of those directories, wherever links in it lead.
    """
    path = Path(name)
    if not path.is_absolute():
        raise UsageError(f"the path {brief(name)} of a request is relative, and a server has its own directory")
    roots = [Path(root) for root in os.environ.get(PS_PATHS, "").split(":") if root]
    if not roots:
        return path
    real = path.resolve()
    if not any(real.is_relative_to(root.resolve()) for root in roots):
        allowed = ", ".join(map(str, roots))
        raise UsageError(f"the path {brief(name)} lies outside of {allowed}; name one inside, or add to {PS_PATHS}")
    return real


def absolute(path: Path) -> Path:
    """Return a path as a request names it: absolute, and without ``..``, which may mean another place there."""
    return path.resolve() if ".." in path.parts else path.absolute()
