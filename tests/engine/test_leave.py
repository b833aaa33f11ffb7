"""Asked to end, all ranks save after the same step and exit with 75; resumed, they end like an undisturbed run."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Died, run, run_raw
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from zoo import QUIET

import echelon
from echelon import Checkpoint, LocalSgd, Strategy
from echelon.base.environment import LEAVE_MARK, REQUEUE
from echelon.checkpoint import latest
from echelon.distributed import rank_main
from echelon.engine import preemption


def data() -> TensorDataset:
    g = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(70, 5, generator=g), torch.randint(3, (70,), generator=g))


def build(directory: str, staged: bool = False, k_steps: int | None = None, log: Any = QUIET) -> tuple[Any, Any]:
    echelon.init(seed=2)
    net = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3))
    if staged:
        marks = {"0": echelon.stage(0), "3": echelon.stage(1), "": echelon.pipeline(micro_batches=2)}
        echelon.annotate(net, marks)
    engine = echelon.distribute(
        net,
        loss=F.cross_entropy,
        optimizer=torch.optim.AdamW(net.parameters(), lr=0.01),
        strategy=Strategy(localsgd=LocalSgd(k_steps=k_steps)) if k_steps else Strategy(),
        checkpoint=Checkpoint(dir=directory),
        log=log,
    )
    return engine, engine.loader(data(), batch_size=4)


def train(directory: str, until: int, **options: Any) -> tuple[int, dict[str, Tensor]]:
    """From where the checkpoints in ``directory`` are, to step ``until``: where it began, and the weights."""
    engine, loader = build(directory, **options)
    begun = engine.steps
    for _ in loader.epochs(10_000):
        for x, y in loader:
            engine.step(x, y)
            if engine.steps == until:
                return begun, engine.whole_state()
    raise AssertionError("unreachable")


def be_asked(directory: str, asked: int, number: int, after: float, console: bool = False, **options: Any) -> None:
    """Train without end, as a process that exits like any other. In full swing, rank ``asked`` gets the signal."""
    preemption.INTERVAL = 0.05
    os.environ[LEAVE_MARK] = directory
    log = echelon.Log(console=True, every=10_000) if console else QUIET
    engine, loader = build(directory, log=log, **options)
    signalling = threading.Timer(after, os.kill, (os.getpid(), number))
    try:
        for _ in loader.epochs(10_000):
            for x, y in loader:
                engine.step(x, y)
                time.sleep(0.002 * (1 + echelon.rank()))
                if engine.steps == 3 and echelon.rank() == asked:
                    signalling.start()
    except SystemExit as end:
        Path(directory, f"left-{echelon.rank()}").write_text(str(engine.steps))
        atexit._run_exitfuncs()
        os._exit(int(end.code or 0))


def left(directory: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(directory.glob("left-*"))]


@pytest.mark.parametrize(
    ("ranks", "asked", "number", "options"),
    [
        (3, 1, signal.SIGTERM, {}),
        (2, 1, signal.SIGUSR1, {"staged": True}),
        (1, 0, signal.SIGUSR1, {}),
    ],
    ids=["three replicas", "pipeline", "one process"],
)
def test_signal_stops_all_at_one_step_and_resume_is_identical(
    tmp_path: Path, ranks: int, asked: int, number: int, options: dict[str, Any]
) -> None:
    """All ranks stop after the same step, and the resumed run equals an uninterrupted one."""
    after = 0.05 + 0.15 * torch.rand(1).item()
    ends = run_raw(be_asked, str(tmp_path), asked, int(number), after, ranks=ranks, **options)
    assert ends == [Died(REQUEUE)] * ranks
    assert sorted(mark.name for mark in tmp_path.glob("rank-*")) == [f"rank-{rank}" for rank in range(ranks)]
    steps = left(tmp_path)
    assert steps == [steps[0]] * ranks
    saved = latest(tmp_path)
    assert saved is not None
    assert json.loads((saved / "index.json").read_text())["step"] == steps[0]
    until = steps[0] + 7
    resumed = run(train, str(tmp_path), until, ranks=ranks, **options)
    undisturbed = run(train, str(tmp_path / "other"), until, ranks=ranks, **options)
    for (begun, got), (_, wanted) in zip(resumed, undisturbed, strict=True):
        assert begun == steps[0]
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_ranks_that_step_alone_leave_where_they_meet(tmp_path: Path) -> None:
    ends = run_raw(be_asked, str(tmp_path), 1, int(signal.SIGTERM), 0.1, ranks=2, k_steps=6)
    assert ends == [Died(REQUEUE)] * 2
    steps = left(tmp_path)
    assert steps[0] == steps[1]
    assert steps[0] % 6 == 0


def say_goodbye(directory: str) -> None:
    with open(Path(directory, "console"), "w") as file, contextlib.redirect_stdout(file):
        be_asked(directory, 0, int(signal.SIGTERM), 0.05, console=True)


def test_signal_prints_line_with_saved_step_and_exit_code(tmp_path: Path) -> None:
    """One line says what was saved and what the exit code means."""
    assert run_raw(say_goodbye, str(tmp_path), ranks=1) == [Died(REQUEUE)]
    *_, last = (tmp_path / "console").read_text().splitlines()
    step = left(tmp_path)[0]
    assert last == (f"echelon: preempted by SIGTERM: saved step {step} in {tmp_path}; exit code 75 requests a restart")


def nobody_asks(directory: str) -> tuple[int, bool, bool, bool]:
    """Return how often steps read the store; whether handlers and mark existed, and whether close removed both."""
    os.environ[LEAVE_MARK] = directory
    before = [signal.getsignal(number) for number in preemption.ASKING]
    engine, loader = build(directory)
    mark = Path(directory, f"rank-{echelon.rank()}")
    there = mark.exists() and all(signal.getsignal(n) != old for n, old in zip(preemption.ASKING, before, strict=True))
    looks = 0
    main = threading.current_thread()

    def counted(frame: Any, event: str, callee: Any) -> None:
        nonlocal looks
        in_main = threading.current_thread() is main
        looks += (
            in_main
            and event == "call"
            and frame.f_code.co_filename == preemption.__file__
            and "due" not in str(frame.f_code.co_name)
        )

    sys.setprofile(counted)
    for x, y in loader:
        engine.step(x, y)
    sys.setprofile(None)
    engine.close()
    restored = [signal.getsignal(number) for number in preemption.ASKING] == before
    return looks, there, restored, mark.exists()


def test_steps_skip_store_without_signal_close_restores_handlers(tmp_path: Path) -> None:
    """Steps look into the store only after a signal, and close() restores the signal handlers."""
    assert run(nobody_asks, str(tmp_path), ranks=2) == [(0, True, True, False)] * 2


@pytest.mark.parametrize(("code", "recorded"), [(REQUEUE, False), (3, True)])
def test_a_rank_that_left_is_no_failure_in_the_record(tmp_path: Path, code: int, recorded: bool) -> None:
    script, record = tmp_path / "script.py", tmp_path / "record.json"
    script.write_text(f"raise SystemExit({code})")
    env = {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_ERROR_FILE": str(record)}
    command = [sys.executable, rank_main.__file__, str(os.getpid()), str(tmp_path), "script", str(script)]
    assert subprocess.run(command, env=env, check=False).returncode == code
    assert record.exists() == recorded
