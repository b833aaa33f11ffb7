"""Compiled kernels belong to exactly their sources, whatever the dates of the files say."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import echelon
from echelon.parameter_server.table.compiled import SOURCES

PACKAGE = Path(echelon.__file__).parent
KERNEL = """
from pathlib import Path
from echelon.base.kernel_cache import cached_jit
from constants import RATE
import constants

@cached_jit((Path(__file__), Path(constants.__file__)), nogil=True)
def scaled(value):
    return value * RATE

print(scaled(7), sum(scaled.stats.cache_hits.values()))
"""


def run(directory: Path) -> str:
    places = os.pathsep.join([str(directory), str(PACKAGE.parent)])
    env = {**os.environ, "PYTHONPATH": places, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, str(directory / "kernel.py")], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_changed_constant_of_another_file_is_compiled_anew(tmp_path: Path) -> None:
    """An installer that fixes dates, or a change in another module, gave numba's own cache a stale kernel."""
    (tmp_path / "kernel.py").write_text(KERNEL)
    outputs = []
    for rate in (2, 2, 3):
        (tmp_path / "constants.py").write_text(f"RATE = {rate}\n")
        for path in tmp_path.glob("*.py"):
            os.utime(path, (1, 1))
        outputs.append(run(tmp_path))
    assert outputs == ["14 0", "14 1", "21 0"]
    assert len(list((tmp_path / "__pycache__").glob("kernels-kernel-*"))) == 1


def test_sources_of_kernels_are_all_hashed() -> None:
    """Each module that defines a kernel, and each that it imports functions or constants from."""
    missing = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if "@kernel" not in text or path in (PACKAGE / "base" / "kernel_cache.py",):
            continue
        assert path in SOURCES, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("echelon.parameter_server"):
                file = PACKAGE.parent / ((node.module or "").replace(".", "/") + ".py")
                missing += [str(file)] if file.exists() and file not in SOURCES and "message" not in file.name else []
    assert missing == []


def test_no_module_uses_the_cache_of_numba_by_dates() -> None:
    texts = {str(path): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert [path for path, text in texts.items() if "njit(" in text and "cache=True" in text] == []
