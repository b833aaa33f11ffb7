"""Imports between packages point down, from a level to a lower one."""

from __future__ import annotations

import pytest
from exceptions import UPWARD
from imports import PACKAGE, Import, all_imports
from levels import LEVELS

LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return all_imports()


@pytest.fixture(scope="module")
def upward(imports: list[Import]) -> list[Import]:
    """Imports that point up, or sideways to another package of the same level."""
    pairs = [(each, *each.packages) for each in imports]
    return [each for each, source, target in pairs if source != target and LEVEL[target] >= LEVEL[source]]


def test_imports_of_every_kind_are_seen(imports: list[Import]) -> None:
    assert {each.kind for each in imports} == {"import", "lazy", "type"}


def test_every_package_has_a_level() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert packages == set(LEVEL)


def test_no_module_lies_loose() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_imports_at_load_time_point_down(upward: list[Import]) -> None:
    assert [each for each in upward if each.kind == "import"] == []


def test_upward_imports_are_listed_with_a_reason(upward: list[Import]) -> None:
    """Lazy and type-only ones may point up where a reason is given; a reason without an import is out of date."""
    found = {(each.source.removeprefix("echelon."), each.packages[1]) for each in upward if each.kind != "import"}
    assert found == set(UPWARD)
    assert len(UPWARD) <= 12
    assert all(UPWARD.values())
