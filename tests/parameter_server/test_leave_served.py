"""Workers of parameter servers that are asked to end: each stops by itself, and worker 0 saves for all."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from serving import served
from torch import nn

import echelon
from echelon.base.environment import REQUEUE
from echelon.checkpoint import latest


def train(directory: str, mode: Any, first: float, later: float) -> tuple[int, int, bool]:
    """Until asked, worker 0 after ``first`` seconds and worker 1 ``later``: exit code, and the steps done.

    The last says whether a run that goes on began with what was saved."""
    world = echelon.init(seed=1)
    net = nn.Linear(4, 1)
    engine = echelon.distribute(
        net,
        loss=F.mse_loss,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
        strategy=echelon.Strategy(ps=echelon.ParameterServer(mode=mode)),
        checkpoint=echelon.Checkpoint(dir=directory),
        log=echelon.Log(console=False),
    )
    begun = engine.steps
    seconds = first if world.rank == 0 else later
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM)).start()
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    try:
        while True:
            engine.step(x, y)
            time.sleep(0.005)
    except SystemExit as end:
        return int(end.code or 0), engine.steps, begun > 0


def test_each_worker_leaves_by_itself_and_worker_0_saves_for_all(tmp_path: Path) -> None:
    """In sync mode, where workers wait for each other: who has left is waited for no more."""
    first = served(train, str(tmp_path), "sync", 0.2, 0.1)  # the one that saves is asked last
    assert [code for code, _, _ in first] == [REQUEUE] * 2
    saved = latest(tmp_path)
    assert saved is not None
    assert int(saved.name.removeprefix("step-")) == first[0][1]
    again = served(train, str(tmp_path), "sync", 0.1, 0.2)
    assert [code for code, _, _ in again] == [REQUEUE] * 2
    assert again[0][2]
    assert again[0][1] > first[0][1]
