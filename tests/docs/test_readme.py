"""The first page keeps its promises: its diff is two scripts that run, its commands print what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import run, script

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
#: A line of the console up to its loss: the times after it are those of the machine.
STEP = re.compile(r"(step \d+/\d+  loss )([\d.]+)")
#: A row of verify's table: the step and the losses of two processes and of one.
ROW = re.compile(r"│\s+(\d+) │\s+([\d.]+) │\s+([\d.]+) │")


def side_of_diff(sign: str) -> str:
    """Return one side of the first page's diff: lines with ``sign`` and those without one."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    lines = [line for line in diff.splitlines() if not line or line[0] in (sign, " ")]
    return "\n".join(line[1:] for line in lines) + "\n"


def shown_outputs() -> dict[str, list[str]]:
    """Return what the first page shows below each of its commands."""
    outputs: dict[str, list[str]] = {}
    for block in re.findall(r"^    \$ (.+(?:\n    .+)*)", README, re.MULTILINE):
        command, *lines = block.split("\n")
        outputs[command] = [line.removeprefix("    ") for line in lines]
    return outputs


def test_new_side_of_the_diff_is_the_example() -> None:
    assert side_of_diff("+") == (ROOT / "examples" / "train.py").read_text()


def test_old_side_of_the_diff_trains_with_ddp(tmp_path: Path) -> None:
    """The replaced script works under DDP, for as many steps of as many samples."""
    path = tmp_path / "ddp.py"
    path.write_text(side_of_diff("-") + "    print(f'{len(inputs)} {len(loader)} {loss:.4f}')\n")
    first, second = (out.split() for out in run(script, str(path), [], ranks=2))
    assert first[:2] == second[:2] == first[3:5] == ["16", "16"]
    assert float(first[5]) < 0.9


def test_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    shown = shown_outputs()
    assert [command.split()[-1] for command in shown] == ["step", "train.py", "3", "report"]
    os.symlink(ROOT / "examples", tmp_path / "examples")
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    # One process computes with as many threads as it has cores, a rank with one: losses agree whatever that is.
    environment = {name: value for name, value in os.environ.items() if name not in {"OMP_NUM_THREADS", "COLUMNS"}}
    for command, lines in shown.items():
        output = subprocess.run(
            ["sh", "-c", command],
            cwd=tmp_path,
            env=environment | {"PATH": os.pathsep.join(paths)},
            text=True,
            stdout=subprocess.PIPE,
            check=True,
            timeout=200,
        ).stdout
        compare(lines, [line.rstrip() for line in output.splitlines()])
    assert (tmp_path / "runs" / "train-1" / "report.html").stat().st_size > 10_000


def compare(shown: list[str], printed: list[str]) -> None:
    """Compare lines: losses to the digits shown, other text literally but for what depends on the machine."""
    assert len(shown) == len(printed), "\n".join(printed)
    for wanted, line in zip(shown, printed, strict=True):
        if found := STEP.match(wanted):
            mine = STEP.match(line)
            assert mine, line
            assert mine[1] == found[1]
            assert float(mine[2]) == pytest.approx(float(found[2]), abs=2e-4)
        elif row := ROW.match(wanted):
            mine = ROW.match(line)
            assert mine, line
            values, wanted_values = ([float(value) for value in each.groups()] for each in (mine, row))
            assert values == pytest.approx(wanted_values, rel=1e-5)
        elif wanted.startswith("same:"):
            assert line.partition(";")[0] == wanted.partition(";")[0]
        elif "┃" not in wanted and "━" not in wanted and "─" not in wanted:
            assert line == wanted
