"""Names of strategies, each of which stands for nothing."""

from __future__ import annotations

from typing import Any


class Nothing:
    """An object that may be called and asked for any attribute, and remains itself."""

    def __call__(self, *_: Any, **__: Any) -> Nothing:
        return self

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


def __getattr__(name: str) -> Nothing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing()
