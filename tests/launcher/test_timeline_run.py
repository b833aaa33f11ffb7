"""``echelon run --timeline`` and ``echelon timeline`` as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import echelon, here, write

SCRIPT = """
import sys, torch, echelon
echelon.init()
model = torch.nn.Linear(4, 4)
engine = echelon.distribute(
    model, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
)
for batch in engine.loader((torch.ones(64, 4), torch.ones(64, 4)), global_batch=4):
    engine.step(*batch)
engine._run.say(f"given {sys.argv[1:]}")
"""


def test_bare_timeline_records_steps_after_warm_up_of_all_ranks(tmp_path: Path) -> None:
    write(tmp_path / "train.py", SCRIPT)
    ended = echelon("run", "--procs", 2, "--timeline", "train.py", "--timeline", "mine", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "given ['--timeline', 'mine']" in ended.out
    assert "timeline of steps 11 to 15: " in ended.out
    assert f"{tmp_path}/log/timeline/trace.json.gz" in ended.out
    shown = here("timeline", "log", "--json", cwd=tmp_path)
    figures = json.loads(shown.out)
    assert figures["steps"] == [11, 15]
    assert [row["rank"] for row in figures["ranks"]] == [0, 1]
    assert "sum of gradients" in here("timeline", "log", cwd=tmp_path).out


CRASH = """
import os, torch, echelon
echelon.init()
model = torch.nn.Linear(4, 4)
engine = echelon.distribute(
    model, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
)
for batch in engine.loader((torch.ones(64, 4), torch.ones(64, 4)), global_batch=4):
    if engine.steps == 5 and echelon.rank() == 1:
        {end}
    engine.step(*batch)
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("os.kill(os.getpid(), 9)", 137, None),
        ("raise ValueError('bad label')", 1, "ValueError: bad label"),
    ],
)
def test_run_that_ends_midway_leaves_what_it_had_recorded(
    end: str, code: int, said: str | None, tmp_path: Path
) -> None:
    write(tmp_path / "train.py", CRASH.format(end=end))
    ended = echelon("run", "--procs", 2, "--timeline", "2:12", "train.py", cwd=tmp_path)
    assert ended.code == code, ended.err
    shown = "cut short: steps 2 to 12 requested; all ranks completed step 5; rank 1 stopped first"
    assert f"echelon: timeline: {shown}" in ended.err
    assert shown in here("timeline", "log", cwd=tmp_path).out
    figures = json.loads(here("timeline", "log", "--json", cwd=tmp_path).out)
    assert figures["steps"] == [2, 5]
    assert figures["cut"]["because"].startswith("rank 1 of 2 (")
    assert figures["cut"]["ranks"][1]["said"] == said
    assert (tmp_path / "log" / "timeline" / "trace.json.gz").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("run", "--timeline", "9:2", "train.py"), "--timeline '9:2': steps count from 1, and the first comes"),
        (("run", "--timeline", "5..7", "train.py"), "--timeline '5..7' names no steps; write 5:10"),
        (("timeline", "."), "there is no timeline in '.'; record one by 'echelon run --timeline ...'"),
        (
            ("timeline", "nowhere"),
            "'nowhere' does not exist; name the log directory of a run (by default the newest in 'runs')",
        ),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], line: str, tmp_path: Path) -> None:
    write(tmp_path / "train.py", SCRIPT)
    ended = here(*words, cwd=tmp_path)
    assert ended.code == 2
    assert ended.err.startswith(f"echelon: {line}")
    assert ended.err.count("\n") == 1
