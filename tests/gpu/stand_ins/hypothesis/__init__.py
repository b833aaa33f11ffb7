"""A stand-in where hypothesis is not installed: tests of given examples are skipped, those beside them run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hypothesis import strategies

__all__ = ["given", "settings", "strategies"]


def given(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return pytest.mark.skip(reason="hypothesis is not installed")


def settings(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda test: test
