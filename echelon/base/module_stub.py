"""ModuleStub: a stand-in for a module that takes long to import, while only a few of its functions are needed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any


class ModuleStub(ModuleType):
    """A module in ``sys.modules`` in place of one that has not been imported; other names than its own import that one.

    name: full name of the module that it stands in for
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        parent, _, self._last = name.rpartition(".")
        self._parent = importlib.import_module(parent) if parent else None

    @staticmethod
    def can_stand_for(name: str) -> bool:
        """Return True if the module has not been imported, and could be."""
        return name not in sys.modules and importlib.util.find_spec(name) is not None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.real(), name)

    @property
    def stands(self) -> bool:
        """True while imports find the stand-in."""
        return sys.modules.get(self.__name__) is self

    def real(self) -> ModuleType:
        """Return the module itself, which is imported now at the latest."""
        self.leave()
        return importlib.import_module(self.__name__)

    def enter(self) -> None:
        sys.modules[self.__name__] = self
        if self._parent is not None:
            setattr(self._parent, self._last, self)

    def leave(self) -> None:
        """Remove the stand-in, if it is there."""
        if self.stands:
            del sys.modules[self.__name__]
            if self._parent is not None:
                delattr(self._parent, self._last)
