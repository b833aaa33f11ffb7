"""The pages about the design name files, packages and classes that exist."""

from __future__ import annotations

import re

import pytest
from imports import PACKAGE

PAGE = (PACKAGE.parent / "docs" / "design.md").read_text(encoding="utf-8")


def test_design_page_lists_every_package() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    tree = PAGE[PAGE.index("    level  echelon/") : PAGE.index("**How to add**")]
    assert {name for name in re.findall(r"([a-z_]+)/", tree) if (PACKAGE / name / "__init__.py").exists()} >= packages


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", PAGE))))
def test_design_page_names_files_that_exist(path: str) -> None:
    assert (PACKAGE / path).exists() or (PACKAGE.parent / path).exists()


def test_design_page_names_classes_that_exist() -> None:
    way = PAGE[PAGE.index("**The way of a batch**") : PAGE.index("## Decisions")]
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    classes = {name for source in sources for name in re.findall(r"^ *class (\w+)", source, re.MULTILINE)}
    named = {name.partition(".")[0] for name in re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", way)}
    assert len(named) >= 7
    assert named <= classes
