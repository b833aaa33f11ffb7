"""Every Python block in README and docs is a script of its own, and runs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from harness import run

sys.path.insert(0, str(Path(__file__).parent / "ps"))
from serving import served

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [
        (f"{page.name}:{page.read_text()[: match.start()].count(chr(10)) + 1}", match[1])
        for page in pages
        for match in BLOCK.finditer(page.read_text())
    ]


def execute(name: str, source: str, directory: str) -> None:
    os.chdir(directory)
    exec(compile(source, name, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name,source", blocks(), ids=[name for name, _ in blocks()])  # noqa: PT006
@pytest.mark.parametrize("ranks", [1, 2])
def test_block_runs(name: str, source: str, ranks: int, tmp_path: Path) -> None:
    if ranks == 1 and not name.startswith("README") and "distribute(" in source:
        return  # what two can do, one can: the first page's blocks show it
    if ranks > 1 and "SparseEmbedding" in source:
        served(execute, name, source, str(tmp_path), servers=1, workers=ranks)
    else:
        run(execute, name, source, str(tmp_path), ranks=ranks)


def test_there_are_blocks() -> None:
    assert len(blocks()) >= 5
