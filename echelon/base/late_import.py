"""``late_import``: a package's names whose modules are imported on first access."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def late_import(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    modules: the module of each name that is imported on first access
    """

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(modules[name]), name)

    return find
