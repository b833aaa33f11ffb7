"""Tells user code, which may read anything, from library code, which is assumed not to change."""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from pathlib import Path

import torch

_INSTALLED = (
    *(Path(sysconfig.get_paths()[key]).resolve() for key in ("stdlib", "purelib", "platlib")),
    Path(torch.__file__).resolve().parent,
    Path(__file__).resolve().parents[1],
)


@functools.cache
def is_users(file: str) -> bool:
    """Return True if a source file is the user's own. Notebook cells and interactive input count as user code."""
    if file.startswith("<"):
        return not file.startswith("<frozen")
    path = Path(file).resolve()
    is_installed = any(path.is_relative_to(place) for place in _INSTALLED)
    return not is_installed and not {"site-packages", "dist-packages"} & set(path.parts)


def is_followed(thing: type | types.ModuleType) -> bool:
    """Return True if guards look into a class or module: the user's and Echelon's own, which hold progress."""
    name = thing.__module__ if isinstance(thing, type) else thing.__name__
    if name == "__main__" or name.partition(".")[0] == "echelon":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and is_users(file)


def is_library(kind: type) -> bool:
    """Return True if objects of a class are not user data: those of torch, NumPy and Python itself."""
    top = kind.__module__.partition(".")[0]
    return top in ("torch", "numpy") or top in sys.stdlib_module_names
