"""Every recipe is true: its commands run as they stand on the page, and end with the numbers that stand there.

A page's blocks marked ``sh`` are run, in order, in one directory; those marked ``text`` show what was printed, or what
needs other machines. The first command of two pages goes through the real launcher. The others run the same words
on ranks of the harness, which start ten times as fast.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command
import pytest
from harness import run
from serving import served
from training import train_here

from echelon.cli.launcher_options import launcher_options
from echelon.zoo.train.train_arguments import TrainArguments, sort_words

RECIPES = Path(__file__).parent.parent.parent / "docs" / "recipes"
PAGES = sorted(page for page in RECIPES.glob("*.md") if page.name != "README.md")
FENCE = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BOUND = re.compile(r"`(\w+)` (below|above) (\d+\.\d+)")

#: with servers; that replicas are launched alike is seen by the tests of learning
LAUNCHED = ("parameter_server",)


@dataclass(frozen=True)
class Block:
    """A block of commands, and what the page says of it.

    expected: of the last line, what the page shows
    same:     the page says that it gives the same numbers as its first command
    """

    commands: list[list[str]]
    expected: dict[str, Any]
    same: bool

    @property
    def words(self) -> list[str]:
        return self.commands[-1]


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    fences = list(FENCE.finditer(text))
    found, before = [], 0
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        if fence[1] == "sh":
            said = text[before : fence.start()]
            found.append(Block(_commands(fence[2]), _last_line(following), "same numbers" in said))
        before = fence.end()
    return found


def _commands(source: str) -> list[list[str]]:
    lines = source.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("echelon ")]


def _last_line(fence: re.Match[str] | None) -> dict[str, Any]:
    """The JSON object that the next block ends with, if it shows output."""
    last = fence[2].splitlines()[-1] if fence and fence[1] == "text" else ""
    return dict(json.loads(last)) if last.startswith("{") else {}


# ---- running ----


def launch(words: list[str], cwd: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "warm", True)  # three processes with torch
        ended = command.echelon(*words, cwd=cwd, OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.err
    return ended.out


def on_ranks(words: list[str], cwd: Path) -> str:
    """Launch on the ranks of the harness."""
    if words[0] != "train":
        return str(run(_call, words, str(cwd), ranks=1)[0])
    asked = sort_words(words[1:], launcher_options())
    rest = asked.again()
    if "servers" in asked.launch:
        servers, workers = int(asked.launch["servers"]), int(asked.launch["workers"])
        return str(served(train_here, rest, str(cwd), servers=servers, workers=workers)[0])
    plan = str(cwd / str(asked.launch["plan"])) if "plan" in asked.launch else None
    return str(run(train_here, rest, str(cwd), plan, ranks=_ranks(asked, plan))[0])


def _ranks(asked: TrainArguments, plan: str | None) -> int:
    if plan is None:
        return int(asked.launch.get("procs", 1))
    from echelon.plan.saved_plan import SavedPlan

    return SavedPlan.load(plan).draft.ranks


def _call(words: list[str], cwd: str) -> str:
    """A command that starts no processes."""
    from echelon import cli

    os.chdir(cwd)
    sys.argv = ["echelon", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        cli.main()
    return out.getvalue()


# ---- judging ----


#: Builds of torch differ in the last bits. So does 16-bit arithmetic between kinds of processors, by more where losses
#: are of single batches: those stand on no page.
TOLERANCE = 2e-3


def check(block: Block, result: dict[str, Any], page: Path) -> None:
    for name, value in block.expected.items():
        if not isinstance(value, float):
            assert result[name] == value, name
        elif "async" in block.words:
            assert _bounds(page)[name](result[name]), (name, result[name])
        else:
            assert result[name] == pytest.approx(value, rel=TOLERANCE, abs=2e-3), name


def _bounds(page: Path) -> dict[str, Any]:
    """Check the page's promises about runs that are never the same twice."""
    return {
        name: lambda value, side=side, limit=float(limit): (value < limit) == (side == "below")
        for name, side, limit in BOUND.findall(page.read_text())
    }


def shown_numbers(block: Block, result: dict[str, Any]) -> dict[str, float]:
    return {name: result[name] for name, value in block.expected.items() if isinstance(value, float)}


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    yield
    command.stop_all()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_page_says_what_its_commands_print(page: Path, tmp_path: Path) -> None:
    first: dict[str, Any] = {}
    for number, block in enumerate(blocks(page)):
        start = launch if number == 0 and page.stem in LAUNCHED else on_ranks
        printed = [start(words, tmp_path) for words in block.commands][-1]
        if block.words[0] != "train":
            continue
        result = json.loads(printed.splitlines()[-1])
        assert block.expected, f"{page.name} does not show what this prints: {' '.join(block.words)}"
        check(block, result, page)
        first = first or result
        if block.same:
            assert shown_numbers(block, result) == pytest.approx(shown_numbers(block, first), rel=2e-4)


def test_every_page_is_in_the_index_and_has_commands() -> None:
    index = (RECIPES / "README.md").read_text()
    assert re.findall(r"\]\((\w+\.md)\)", index) == list(dict.fromkeys(re.findall(r"\]\((\w+\.md)\)", index)))
    assert set(re.findall(r"\]\((\w+\.md)\)", index)) == {page.name for page in PAGES}
    assert all(blocks(page) for page in PAGES)
