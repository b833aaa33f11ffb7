"""Every Python block in docs is a script of its own, and runs."""

from __future__ import annotations

import atexit
import os
import re
import sys
from pathlib import Path

import pytest
from harness import run
from typer.main import get_command

from echelon.base.environment import PADDLE_HOSTS
from echelon.cli import app

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "site"))
import messages
from serving import served

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    pages = sorted((ROOT / "docs").glob("*.md"))
    return [
        (f"{page.name}:{page.read_text()[: match.start()].count(chr(10)) + 1}", match[1])
        for page in pages
        for match in BLOCK.finditer(page.read_text())
    ]


def execute(name: str, source: str, directory: str) -> None:
    os.chdir(directory)
    exec(compile(source, name, "exec"), {"__name__": "__main__"})
    atexit._run_exitfuncs()  # as at the end of a script, else the workers of its loaders stay behind


def cases() -> list[tuple[int, str, str]]:
    """Every block that trains on two ranks, those of the first page alone, too; others, and those that start ranks
    themselves, alone."""
    found = blocks()
    trains = [one for one in found if "distribute(" in one[1] and "echelon.launch(" not in one[1]]
    alone = [one for one in found if one[0].startswith("index") or one not in trains]
    return [(1, *one) for one in alone] + [(2, *one) for one in trains]


@pytest.mark.parametrize(("ranks", "name", "source"), cases(), ids=[f"{name}-{ranks}" for ranks, name, _ in cases()])
def test_block_runs(ranks: int, name: str, source: str, tmp_path: Path) -> None:
    if ranks > 1 and "SparseEmbedding" in source:
        served(execute, name, source, str(tmp_path), servers=1, workers=ranks)
    else:
        run(execute, name, source, str(tmp_path), ranks=ranks)


def test_there_are_blocks() -> None:
    assert len(blocks()) >= 5


def test_run_options_documented_with_their_variables() -> None:
    """Every option of run is on its page, with the environment variables that it reads."""
    page = (ROOT / "docs" / "launch.md").read_text()
    options = {option: each for each in get_command(app).commands["run"].params for option in each.opts}  # type: ignore[attr-defined]
    assert [name for name in options if name.startswith("-") and not re.search(f"`{name}(?![a-z-])", page)] == []
    for variable in PADDLE_HOSTS:
        assert variable in str(options["--nnodes"].show_default)
        assert variable in page


def test_the_list_of_messages_has_those_that_functions_make() -> None:
    files = (
        "base/errors.py",
        "checkpoint/os_errors.py",
        "checkpoint/save.py",
        "parallel/pipeline/stage_runner.py",
        "parameter_server/server/shard.py",
    )
    lines = messages.listed(messages.PACKAGE / file for file in files).splitlines()
    assert "- *Damaged*: cannot read {path}: {...}; {advice}" in lines
    assert any(line.startswith("- *CheckpointError*: cannot write {path}: rank 0 created it, but") for line in lines)
    assert "- *PeerLost*: server {...} is shutting down" in lines  # one of two texts
    assert any(line.startswith("- *UsageError*: {what} needs a value that it did not need when") for line in lines)
    assert not any(line.startswith("- *_") for line in lines)  # functions that make errors are no classes


def test_quickstart_shows_the_lines_of_its_example() -> None:
    page, source = (ROOT / "docs" / "quickstart.md").read_text(), (ROOT / "examples" / "llama.py").read_text()
    shown = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(shown) == 2
    assert all(block in source for block in shown)
