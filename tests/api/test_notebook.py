"""``launch(fn, procs=2)``: the numbers of one process, and what becomes of failures; from a notebook's kernel too."""

from __future__ import annotations

import gc
import os
import signal
import struct
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import LIMIT
from torch import Tensor, nn

import echelon
from echelon import launch
from echelon.api.launch import LaunchError, _LaunchedRank, _take
from echelon.base import environment
from echelon.base.errors import UsageError


def training(x: Tensor, y: Tensor) -> tuple[int, list[float], Tensor]:
    echelon.init(seed=5)
    model = nn.Linear(6, 3)
    engine = echelon.distribute(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3),
        log=echelon.Log(console=False),
    )
    loader = engine.loader((x, y), global_batch=12, shuffle=False)
    losses = [float(engine.step(*batch)) for batch in loader]
    return echelon.world_size(), losses, model.weight.detach()


def test_ranks_give_the_numbers_of_one_process() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(36, 6), torch.randint(3, (36,))
    (_, expected, weight), *_ = launch(training, x, y, procs=1)
    results = launch(lambda: training(x, y), procs=3)  # not importable by name, as a notebook's functions are not
    assert [ranks for ranks, _, _ in results] == [3, 3, 3]
    for _, losses, mine in results:
        assert losses == pytest.approx(expected, abs=1e-6)
        torch.testing.assert_close(mine, weight, rtol=0, atol=1e-6)


def test_results_come_in_rank_order_and_only_rank_0_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    long = "█" * 50_000  # more than one read, which ends within a letter

    def speak(word: str, times: int) -> int:
        print(f"{word} from {echelon.rank()} {long}")
        return times * echelon.rank()

    assert launch(speak, "hello", procs=3, times=7) == [0, 7, 14]
    assert capsys.readouterr().out == f"hello from 0 {long}\n"


class Stubborn:
    """Goes out, and does not come in."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_result_that_does_not_arrive_is_one_line() -> None:
    with pytest.raises(LaunchError, match="rank 0 of 1 failed: its result cannot be unpickled here"):
        launch(Stubborn, procs=1)
    reading, telling = Pipe(duplex=False)
    os.write(telling.fileno(), struct.pack("!i", 100) + b"half a message")
    telling.close()
    output, printing = Pipe(duplex=False)
    rank = _LaunchedRank(0, os.posix_spawn("/bin/sh", ["sh", "-c", "exit 3"], {}), reading, output)
    assert not _take(rank, reading)
    assert rank.ended is not None
    assert rank.ended.error == "it ended with exit code 3"
    for end in (reading, output, printing):
        end.close()


def fails(how: str) -> None:
    echelon.init()
    echelon.barrier()
    if echelon.rank() == 1:
        print("about to go")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise {"raised": KeyError("the missing one"), "mistaken": UsageError("do that instead")}[how]
    echelon.barrier()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raised", "KeyError: 'the missing one'"),
        ("mistaken", "rank 1 of 2 failed: do that instead"),
        ("killed", "killed by SIGKILL"),
    ],
)
def test_the_failing_rank_is_named_with_what_it_said(how: str, said: str) -> None:
    with pytest.raises(LaunchError) as error:
        launch(fails, how, procs=2)
    assert str(error.value).startswith("rank 1 of 2 failed: ")
    assert said in str(error.value)
    assert str(error.value).endswith("its output:\nabout to go")


def test_no_process_outlives_an_interrupt(tmp_path: Path) -> None:
    def wait_for_ever() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(1000)

    ended = threading.Event()

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2 and not ended.wait(0.01):
            pass
        if not ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored where tests run beside others
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(wait_for_ever, procs=2)
    finally:
        ended.set()
        interrupting.join()
        signal.signal(signal.SIGINT, before)
    for pid in [int(path.name) for path in tmp_path.iterdir()]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("procs", [0, -1, "2", 2.0, True])
def test_a_number_of_processes_that_is_none_is_one_line(procs: Any) -> None:
    with pytest.raises(UsageError, match=r"launch\(procs=.*\): give a whole number, 1 or more"):
        launch(print, procs=procs)


def test_mistakes_are_one_line() -> None:
    with pytest.raises(UsageError, match=r"launch\(5\): give a function, and its arguments after it"):
        launch(5, procs=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"fails\(how.*\).* does not take these arguments: missing a"):
        launch(fails, procs=1)
    with pytest.raises(LaunchError, match=r"it returned function, which cannot be sent back .*; return numbers, dicts"):
        launch(lambda: lambda: None, procs=1)


def test_a_rank_of_a_job_launches_no_other() -> None:
    with pytest.raises(LaunchError, match=r"launch\(\) was called on a rank of a job"):
        launch(lambda: launch(lambda: 1, procs=2), procs=2)


def test_ranks_know_who_started_them_and_may_leave() -> None:
    assert launch(lambda: environment.detect_rank_info().launcher, procs=2) == ["echelon.launch"] * 2
    assert launch(sys.exit, procs=1) == [None]


def test_a_traceback_begins_with_the_users_own_code() -> None:
    def divide() -> float:
        return 1 / 0

    with pytest.raises(echelon.LaunchError) as caught:
        launch(divide, procs=1)
    assert "in divide" in str(caught.value)
    assert "notebook.py" not in str(caught.value).replace("test_notebook.py", "")


def test_ranks_do_not_collect_the_callers_garbage() -> None:
    """A process group's destructor waits for threads, and those of the caller do not exist in a fork."""
    is_forked = False

    def collect() -> None:
        if is_forked:
            gc.collect()

    os.register_at_fork(after_in_child=collect)  # at the worst moment; nothing takes it back, hence the flag
    store = torch.distributed.HashStore()
    cycle: list[Any] = [torch.distributed.ProcessGroupGloo(store, 0, 1, timedelta(seconds=10))]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        is_forked = True
        assert launch(lambda: 7, procs=2) == [7, 7]
        assert gc.get_freeze_count() == 0
    finally:
        is_forked = False
        gc.enable()


def test_a_rank_that_crashes_shows_its_stack(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match="killed by SIGSEGV"):
        launch(lambda: os.kill(os.getpid(), signal.SIGSEGV), procs=1)
    assert "Fatal Python error: Segmentation fault" in capsys.readouterr().out


CELLS = [
    "import echelon, torch\nscale = 10\ntorch.ones(500, 500) @ torch.ones(500, 500);",
    """
def work(extra):
    echelon.init()
    total = torch.tensor([float(echelon.rank() + 1)])
    torch.distributed.all_reduce(total)
    print("rank", echelon.rank(), "has", total.item())
    return scale * total.item() + extra

echelon.launch(work, 0.5, procs=2)
""",
    "echelon.launch(lambda: 1 / (1 - echelon.rank()), procs=2)",
    "scale + 1",
]


def test_in_the_kernel_of_a_notebook() -> None:
    """Functions of cells, what they close over, rank 0's output, an error, and a kernel that lives on."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(startup_timeout=LIMIT)
    heard: list[tuple[str, Any]] = []
    try:
        for cell in CELLS:
            client.execute_interactive(
                cell, timeout=LIMIT, output_hook=lambda message: heard.append((message["msg_type"], message["content"]))
            )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    printed = "".join(content["text"] for kind, content in heard if kind == "stream")
    results = [content["data"]["text/plain"] for kind, content in heard if kind == "execute_result"]
    errors = [content["evalue"] for kind, content in heard if kind == "error"]
    assert printed == "rank 0 has 3.0\n"
    assert results == ["[30.5, 30.5]", "11"]
    assert len(errors) == 1
    assert errors[0].startswith("rank 1 of 2 failed: Traceback")
    assert errors[0].endswith("ZeroDivisionError: division by zero")
