"""kill -9 in the middle of a stream that grows meanwhile: in the end each record was trained on once, in one order."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import echelon

TRAIN = """
import os, pathlib, signal, sys
import torch, torch.nn.functional as F
import echelon

served, root = sys.argv[1] == "served", pathlib.Path("log")
world = echelon.init(seed=3)
net = torch.nn.Linear(1, 1)
restarts = int(os.environ.get("ECHELON_RESTARTS") or 0) + int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)

def parse(line):
    return torch.tensor([float(line)]), torch.tensor(0.0)

def add(number):
    home = root / f"hour{number}"
    home.mkdir(exist_ok=True)
    (home / "part-0.csv").write_text("".join(f"{number * 10 + n}\\n" for n in range(10)))
    (home / "_SUCCESS").touch()

engine = echelon.distribute(
    net,
    loss=lambda output, target: F.mse_loss(output[:, 0] / 100, target),
    optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
    strategy=echelon.Strategy(**({"ps": "sync"} if served else {})),
    checkpoint=None if served else echelon.Checkpoint(dir="ckpt", every=2, keep=2),
)
stream = echelon.data.PartitionStream(root, files="part-*", parse=parse, poll_seconds=0.05)
for x, y in engine.loader(stream, global_batch=4, shuffle=True, shuffle_buffer=8, uneven="join"):
    if world.rank == 1 and engine.steps == 3 and not restarts:
        os.kill(os.getpid(), signal.SIGKILL)
    step = engine.steps
    engine.step(x, y)
    with open(f"seen-{world.rank}", "a") as file:
        file.write(f"{step} " + " ".join(str(int(value)) for value in x[:, 0]) + "\\n")
    if world.rank == 0 and step in (1, 2, 4):  # hours 0 and 1 are there from the beginning
        add({1: 2, 2: 3, 4: 4}[step])
        if step == 4:
            (root / "_STOP").touch()
engine.close()
"""


@pytest.mark.parametrize("kind", ["collective", "served"])
def test_records_of_a_stream_survive_a_kill(kind: str, tmp_path: Path, warm: None) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    for number in range(2):
        home = tmp_path / "log" / f"hour{number}"
        home.mkdir(parents=True)
        (home / "part-0.csv").write_text("".join(f"{number * 10 + n}\n" for n in range(10)))
        (home / "_SUCCESS").touch()
    ranks = ("--procs", 2) if kind == "collective" else ("--servers", 1, "--workers", 2)
    words = ("run", *ranks, "--max-restarts", 2, "--log-dir", "logs", "train.py", kind)
    ended = echelon(*words, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.err
    assert "restart" in ended.err
    rows = [dict(map(_row, (tmp_path / f"seen-{rank}").read_text().splitlines())) for rank in range(2)]
    steps = [[number for rank in rows for number in rank.get(step, [])] for step in sorted(rows[0])]
    assert sorted(number for step in steps for number in step) == list(range(50)), ended.err
    windows = [number for step in steps for number in step]
    assert all(sorted(windows[at : at + 8]) == list(range(at, min(at + 8, 50))) for at in range(0, 50, 8))


def _row(line: str) -> tuple[int, list[int]]:
    """Return what a rank saw in a step; of a repeated step, the last line counts."""
    step, *numbers = map(int, line.split())
    return step, numbers
