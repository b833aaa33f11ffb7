"""Modules that were documented under another name: the old name still imports the module, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Old name -> new name, both below ``echelon``. They are kept for one version.
MOVED = {
    "errors": "base.errors",
    "evaluate": "parallel.evaluate",
    "footprint": "tools.memory_profile",
    "lean": "parallel.low_memory",
    "lean.building": "parallel.low_memory.building",
    "plan.memory": "plan.saved_bytes",
    "planner.model": "planner.profiling",
    "planner.model.profile": "planner.profiling.profile",
    "ps": "parameter_server",
    "ps.hashing": "parameter_server.protocol.hashing",
    "ps.rules": "strategy.table_rules",
    "ps.serve": "parameter_server.server.process",
    "record": "observability.runlog",
    "record.read": "observability.runlog.run_reader",
    "report": "tools.report",
    "report.command": "cli.commands.report",
    "timeline": "observability.trace",
    "world": "distributed.world",
}


class MovedModules(MetaPathFinder, Loader):
    """Finds the modules of ``MOVED`` by their old names."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec that loads the module of the new name; None for every other name."""
        package, _, old = name.partition(".")
        return ModuleSpec(name, self, origin=MOVED[old]) if package == "echelon" and old in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name in the place of the old one."""
        name = module.__name__
        new = f"echelon.{MOVED[name.partition('.')[2]]}"
        warnings.warn(f"{name} is now {new}; the old name goes with the next version", FutureWarning, stacklevel=2)
        sys.modules[name] = importlib.import_module(new)


def install() -> None:
    """Let imports find the old names. They are asked for last, so that imports of other modules cost nothing."""
    sys.meta_path.append(MovedModules())
