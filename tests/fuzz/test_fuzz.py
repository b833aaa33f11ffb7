"""Parsers accept damaged and hostile input, or refuse it in one line: no other error, no hang, no memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzzing import faults
from targets import TARGETS, Target

#: Inputs of each parser; `make fuzz` goes on for as long as wished.
TRIED = 150


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_parser_accepts_its_sample(target: Target, tmp_path: Path) -> None:
    target.parse(target.sample, tmp_path)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_parser_accepts_or_refuses_in_one_line(target: Target, tmp_path: Path) -> None:
    assert list(faults(target, range(TRIED), tmp_path)) == []
