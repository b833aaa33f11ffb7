"""Libraries: what the package imports is declared, and what is declared is locked by version and hash."""

import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
#: The library of each module whose name differs from its library's.
LIBRARY = {"yaml": "pyyaml", "PIL": "pillow", "mlflow": "mlflow-skinny"}
#: Imported where torch has brought it: on a machine with a GPU.
OF_TORCH = {"triton"}


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def declared(*extras: str) -> dict[str, Requirement]:
    lines = project()["dependencies"] + [line for e in extras for line in project()["optional-dependencies"][e]]
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def locked(file: str) -> dict[str, list[str]]:
    """Return the versions of each library in a lock; fail on an entry without a hash."""
    versions: dict[str, list[str]] = {}
    entries = re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", (ROOT / "locks" / file).read_text(), flags=re.MULTILINE))
    for entry in entries:
        name, version = re.match(r"([\w.-]+)==([^\s;]+)", entry.strip()).groups()
        assert "--hash=sha256:" in entry, name
        versions.setdefault(canonicalize_name(name), []).append(version)
    return versions


def imported() -> set[str]:
    line = re.compile(r"^ *(?:import (\w+)(?:[. ,]|$)|from (\w+)[\w.]* import )", re.MULTILINE)
    found = [
        name for path in (ROOT / "echelon").rglob("*.py") for pair in line.findall(path.read_text()) for name in pair
    ]
    return set(found) - set(sys.stdlib_module_names) - {"echelon", ""}


def test_each_imported_library_is_declared():
    extras = [extra for extra in project()["optional-dependencies"] if extra != "dev"]
    known = set(declared(*extras))
    assert {m for m in imported() if LIBRARY.get(m, m) not in known} - OF_TORCH == set()


@pytest.mark.parametrize(
    ("file", "extras"),
    [
        ("core.txt", ()),
        ("dev.txt", ("images", "ray", "tensorboard", "text", "dev")),
        ("third-party.txt", ("wandb", "mlflow", "third-party")),
    ],
)
def test_lock_holds_what_is_declared_with_hashes(file, extras):
    versions = locked(file)
    wanted = {name: r for name, r in declared(*extras).items() if name not in {"torch", "echelon"}}
    assert {
        name for name, r in wanted.items() if not all(map(r.specifier.contains, versions.get(name, ["0"])))
    } == set()
    assert "torch" not in versions  # the machine decides which: constraints.txt


def test_locks_agree_with_each_other():
    core, dev = locked("core.txt"), locked("dev.txt")
    assert {name: dev.get(name) for name in core} == core
    third = locked("third-party.txt")  # installed over dev.txt
    assert {name: versions for name, versions in third.items() if name in dev and dev[name] != versions} == {}


def test_each_extra_is_in_a_lock():
    extras = project()["optional-dependencies"]
    all_locked = locked("dev.txt") | locked("third-party.txt")
    assert {name for extra in extras for name in declared(extra)} - {"echelon", "torch"} - set(all_locked) == set()


def test_locks_name_no_registry():
    text = "".join(path.read_text() for path in (ROOT / "locks").glob("*.txt"))
    assert not re.search(r"://|--(?:extra-)?index-url|--find-links", text)
