"""Strategies for NumPy."""

from __future__ import annotations

from hypothesis.strategies import Nothing


def __getattr__(name: str) -> Nothing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing()
