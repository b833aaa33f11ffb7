"""Other names of documented modules: ``echelon.errors``, and earlier names, which import with a warning."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

#: Public name -> module, both below ``echelon``.
PUBLIC = {"errors": "base.errors"}
#: Old name -> new name, both below ``echelon``. Old names work for one version.
MOVED = {
    "evaluate": "parallel.evaluate",
    "footprint": "tools.memory_profile",
    "lean": "parallel.low_memory",
    "lean.building": "parallel.low_memory.building",
    "plan.memory": "plan.saved_bytes",
    "planner.model": "planner.profiling",
    "planner.model.profile": "planner.profiling.profile",
    "ps": "parameter_server",
    "ps.hashing": "parameter_server.protocol.hashing",
    "ps.rules": "strategy.sparse_update_rules",
    "ps.serve": "parameter_server.server.process",
    "record": "observability.runlog",
    "report": "tools.report",
    "report.command": "cli.commands.report",
    "timeline": "observability.trace",
    "world": "distributed.world",
}


class MovedModules:
    """Finder and loader of the modules of ``PUBLIC`` and ``MOVED`` by their other names.

    It does not inherit from ``importlib.abc``, whose import takes 8 ms in every process.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec that loads the module of the new name; None for every other name."""
        package, _, old = name.partition(".")
        new = PUBLIC.get(old) or MOVED.get(old)
        if package != "echelon" or new is None:
            return None
        return ModuleSpec(name, self, origin=new)  # type: ignore[arg-type]  # it has all methods of a Loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave the creation of the module to Python."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name into ``sys.modules`` under the old name."""
        name = module.__name__
        old = name.partition(".")[2]
        if old in MOVED:
            line = f"{name} is now echelon.{MOVED[old]}; the next version removes the old name"
            warnings.warn(line, FutureWarning, stacklevel=2)
        sys.modules[name] = importlib.import_module("echelon." + (PUBLIC.get(old) or MOVED[old]))

    def get_code(self, name: str) -> CodeType | None:
        """Return the code of the module of the new name, for ``python -m`` with an old name."""
        from importlib.abc import InspectLoader

        old = name.partition(".")[2]
        spec = importlib.util.find_spec("echelon." + (PUBLIC.get(old) or MOVED[old]))
        assert spec is not None
        assert isinstance(spec.loader, InspectLoader)
        return spec.loader.get_code(spec.name)


def install() -> None:
    """Put the finder first: Python's own finder would load a file of a moved package once more, by its old name."""
    sys.meta_path.insert(0, MovedModules())
