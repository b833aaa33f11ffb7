"""The picture of a step names functions that exist, in the order in which a step calls them."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from pathlib import Path

import echelon
from echelon.engine.engine import Engine

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "site"))
import charts
import pictures
import screenshots

ROOT = Path(__file__).parents[2]


def methods() -> set[str]:
    """Return ``Class.method`` of every method in the package."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "echelon").rglob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {f"{each.name}.{node.name}" for each in classes for node in each.body if isinstance(node, ast.FunctionDef)}


def test_pictures_are_those_that_the_script_draws() -> None:
    for name in ("staircase", "mesh", "step", "seam"):
        assert (pictures.OUT / f"{name}.svg").read_text() == getattr(pictures, name)(), "run docs/site/pictures.py"


def test_charts_are_those_of_their_figures() -> None:
    for name, draw in charts.CHARTS.items():
        assert (charts.OUT / f"{name}.svg").read_text() == draw(), f"{name}: run make pictures"


def test_screenshots_are_of_the_present_pages() -> None:
    """A page whose code has changed since looks different: ``make pictures`` takes a new one."""
    taken = json.loads(screenshots.INPUTS.read_text())
    assert set(taken) == set(screenshots.SCREENSHOTS)
    for name, shot in screenshots.SCREENSHOTS.items():
        assert (screenshots.OUT / f"{name}.webp").is_file()
        assert taken[name] == screenshots.hash_inputs(shot), f"{name}: run make pictures"


def test_pictures_are_small_and_shown() -> None:
    """All pictures together are less than a megabyte, and each is on a page."""
    found = [path for path in pictures.OUT.iterdir() if path.suffix != ".json"]
    assert sum(path.stat().st_size for path in found) < 1_000_000
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    assert [path.name for path in found if f"pictures/{path.name})" not in pages] == []


def test_picture_of_a_step_names_functions_that_exist() -> None:
    named = set(re.findall(r">([A-Z]\w+\.\w+)<", (pictures.OUT / "step.svg").read_text()))
    assert len(named) == sum(len(functions) for _, _, functions in pictures.STEP) > 15
    assert named <= methods()


def test_step_calls_the_lines_of_its_picture_in_order() -> None:
    source = inspect.getsource(Engine.step)
    lines = [functions[0].partition(".")[2] for _, _, functions in pictures.STEP]
    places = [source.index(f"self.{line}(") for line in lines]
    assert places == sorted(places)


def test_public_names_of_an_engine_are_those_of_its_page() -> None:
    page = (ROOT / "docs" / "engine.md").read_text()
    table = page[page.index("## All names of an engine") : page.index("`engine.world` says")]
    assert {name for name in dir(echelon.Engine) if not name.startswith("_")} == set(re.findall(r"`(\w+)`", table))
