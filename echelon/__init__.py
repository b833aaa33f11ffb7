"""Distributed training engine for PyTorch, numerically equivalent to one process."""

import sys
from typing import TYPE_CHECKING

from echelon.base import moved_modules
from echelon.base.version import __version__ as __version__

#: Submodules that are part of the public API, such as ``echelon.nn.SparseEmbedding``.
_PUBLIC_MODULES = ("data", "errors", "hf", "nn", "optim", "plan", "planner", "strategy", "zoo")

moved_modules.install()

if TYPE_CHECKING:
    from echelon.api.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """Return the public name or submodule; the first public name imports all of them, and torch.

        Because of this lazy import, commands that do not train start in a tenth of the time.
        """
        from importlib import import_module
        from importlib.util import find_spec

        if name == "__all__" or not name.startswith("_"):
            found = find_spec(f"echelon.{name}")
            if found is not None and found.origin is not None:  # origin is None for a directory of an older version
                return import_module(f"echelon.{name}")
            public = import_module("echelon.api.public")
            if hasattr(public, name):
                return globals().setdefault(name, getattr(public, name))
        raise AttributeError(f"module 'echelon' has no attribute '{name}'", name=name, obj=sys.modules[__name__])

    def __dir__() -> list[str]:
        """Return the public names. They are read from the source, because an import would import torch."""
        import ast
        from pathlib import Path

        tree = ast.parse((Path(__file__).parent / "api" / "public.py").read_text(encoding="utf-8"))
        listed = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
        own = [name for name in globals() if name.startswith("__")]
        return sorted({*ast.literal_eval(listed[0]), *_PUBLIC_MODULES, *own})


if "torch" in sys.modules:  # lazy_dynamo must be imported before the first optimizer is created, if possible
    import echelon.base.lazy_dynamo  # noqa: F401
