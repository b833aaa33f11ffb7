"""Other names of documented modules: ``echelon.errors``, and earlier names, which import with a warning."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
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


class MovedModules(MetaPathFinder, Loader):
    """Finds the modules of ``PUBLIC`` and ``MOVED`` by their other names."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec that loads the module of the new name; None for every other name."""
        package, _, old = name.partition(".")
        new = PUBLIC.get(old) or MOVED.get(old)
        return ModuleSpec(name, self, origin=new) if package == "echelon" and new is not None else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name into ``sys.modules`` under the old name."""
        name = module.__name__
        old = name.partition(".")[2]
        if old in MOVED:
            line = f"{name} is now echelon.{MOVED[old]}; the old name goes with the next version"
            warnings.warn(line, FutureWarning, stacklevel=2)
        sys.modules[name] = importlib.import_module("echelon." + (PUBLIC.get(old) or MOVED[old]))

    def get_code(self, name: str) -> CodeType | None:
        """Return the code of the module of the new name, for ``python -m`` with an old name."""
        old = name.partition(".")[2]
        spec = importlib.util.find_spec("echelon." + (PUBLIC.get(old) or MOVED[old]))
        assert spec is not None
        assert isinstance(spec.loader, InspectLoader)
        return spec.loader.get_code(spec.name)


def install() -> None:
    """Put the finder first: Python's own finder would load a file of a moved package once more, by its old name."""
    sys.meta_path.insert(0, MovedModules())
