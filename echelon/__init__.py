"""Echelon: train one PyTorch model on many devices, with the numbers one process gives."""

import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from echelon.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """The public names are all loaded with the first that is asked for, and torch with them.

        So commands that train nothing start in a tenth of the time.
        """
        from importlib import import_module
        from importlib.util import find_spec

        if name == "__all__" or not name.startswith("_"):
            found = find_spec(f"echelon.{name}")
            if found is not None and found.origin is not None:  # no file: a folder that an older version left behind
                return import_module(f"echelon.{name}")
            public = import_module("echelon.public")
            if hasattr(public, name):
                return globals().setdefault(name, getattr(public, name))
        raise AttributeError(f"module 'echelon' has no attribute '{name}'")


if "torch" in sys.modules:  # before an optimizer is made, where that can still be
    import echelon.untraced  # noqa: F401
