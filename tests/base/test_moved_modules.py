"""Documented modules are found by their earlier names, with a warning; ``echelon.errors`` is a public name."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings

import pytest

import echelon
from echelon.base.moved_modules import MOVED, PUBLIC


@pytest.mark.parametrize("old", sorted(MOVED))
def test_earlier_name_imports_the_module_with_a_warning(old: str) -> None:
    sys.modules.pop(f"echelon.{old}", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = importlib.import_module(f"echelon.{old}")
    assert found is importlib.import_module(f"echelon.{MOVED[old]}")
    line = f"echelon.{old} is now echelon.{MOVED[old]}; the next version removes the old name"
    assert line in [str(warning.message) for warning in caught if warning.category is FutureWarning]


def test_public_names_import_without_a_warning() -> None:
    for name, module in PUBLIC.items():
        assert importlib.import_module(f"echelon.{name}") is importlib.import_module(f"echelon.{module}")
        assert name in dir(echelon)


def test_names_of_the_planner_warn_where_the_plan_had_them() -> None:
    from echelon import plan, planner

    with pytest.warns(FutureWarning, match="echelon.plan.Cluster is now echelon.planner.Cluster"):
        assert plan.Cluster is planner.Cluster


def test_earlier_name_of_a_program_runs() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "echelon.ps.serve", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "One parameter server of a job." in ended.stdout


def test_unknown_module_is_an_import_error() -> None:
    program = "import echelon.nothing"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "No module named 'echelon.nothing'" in ended.stderr
