"""A server whose ``apply`` fails with anything ends the job by name, and is never taken for its journal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting_server import free_endpoint
from harness import Raised, context, free_port, run_raw
from kept_shard import make_job, numbers_of, opened, push, trained
from serving import RANKS
from serving_process import ServerProcess
from test_net_serve import argv

import echelon
from echelon.base.errors import EchelonError
from echelon.parameter_server.persistence.journal import JournalSegment
from echelon.parameter_server.server.store import ServerStore

STEPS = 6


class FailingServer(ServerProcess):
    """A whole server process whose ``method`` of Store fails at its third call; None: nothing is made to fail."""

    def __init__(self, command: list[str], log: Path, method: str | None, kind: type[BaseException]) -> None:
        self.log = log
        self._process = context.Process(target=_failing, args=(command, log, method, kind), daemon=True)
        self._process.start()


def _failing(command: list[str], log: Path, method: str | None, kind: type[BaseException]) -> None:
    from echelon.parameter_server.server.process import main

    with log.open("a") as file:
        os.dup2(file.fileno(), 2)
    os.environ["ECHELON_PS_TOKEN"] = "between-us-alone"
    if method is not None:
        fail_at_third(method, kind)
    sys.exit(main(command))


def fail_at_third(method: str, kind: type[BaseException]) -> None:
    whole, calls = getattr(ServerStore, method), [0]

    def failing(self: ServerStore, *args: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise kind("no room")
        whole(self, *args)

    setattr(ServerStore, method, failing)


def work(endpoint: str, mode: str, spoils: bool) -> int:
    """A worker; ``spoils``: after two steps it gives the servers' Adam settings that no Adam takes."""
    worker = os.environ["RANK"]
    for name in RANKS:
        del os.environ[name]
    os.environ |= {
        "PADDLE_PSERVERS_IP_PORT_LIST": endpoint,
        "MASTER_PORT": str(free_port()),
        "ECHELON_PS_TOKEN": "between-us-alone",
        "TRAINING_ROLE": "TRAINER",
        "PADDLE_TRAINER_ID": worker,
        "PADDLE_TRAINERS_NUM": "2",
    }
    echelon.init(seed=0)
    model = torch.nn.Linear(4, 1)
    kind = torch.optim.SGD if mode == "geo" else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=0.1)
    settings = {"k_steps": 1} if mode == "geo" else {}
    engine = echelon.distribute(
        model,
        loss=F.mse_loss,
        optimizer=optimizer,
        strategy=echelon.Strategy(ps=echelon.ParameterServer(mode=mode, **settings)),
        log=echelon.Log(console=False),
    )
    for step in range(STEPS):
        if spoils and step == 2:
            optimizer.param_groups[0]["betas"] = (0.9,)
        engine.step(torch.randn(4, 4), torch.randn(4, 1))
    engine.synchronize()
    return engine.steps


@pytest.mark.parametrize(
    ("mode", "method", "kind"),
    [
        ("sync", None, ValueError),  # from torch itself, with what a worker sent
        ("sync", "update_dense", MemoryError),
        ("async", "update_dense", RuntimeError),
        ("geo", "add_dense", MemoryError),
    ],
)
def test_job_whose_server_fails_to_apply_ends_by_name(tmp_path, mode, method, kind):
    endpoint = free_endpoint()
    server = FailingServer(argv([endpoint], 0, tmp_path / "state", 2), tmp_path / "log", method, kind)
    try:
        ends = run_raw(work, endpoint, mode, method is None, ranks=2, timeout=60)
    finally:
        server.kill()
    assert all(isinstance(end, Raised) for end in ends), ends
    for end in ends:
        assert f"server 0 failed with {kind.__name__}" in end.line, end.trace
        assert "while it applied push " in end.line
        assert "\n" not in end.line


@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_state_that_differs_from_its_journal_is_marked(tmp_path, monkeypatch, mode):
    """After a failure nothing is answered or kept; a restart replays what the journal has, the failed change too."""
    job = make_job(mode=mode)
    shard = opened(job, directory=tmp_path)
    method = "add_dense" if mode == "geo" else "update_dense"
    whole = getattr(ServerStore, method)
    fail_at_third(method, MemoryError)
    try:
        for number in range(3):
            if number < 2:
                push(shard, number)
            else:
                with pytest.raises(AssertionError, match=r"server 0 failed with MemoryError: no room .* push 2"):
                    push(shard, number)
    finally:
        monkeypatch.setattr(ServerStore, method, whole)
    for number in (2, 3):  # the same again is no duplicate, the next is not taken
        with pytest.raises(AssertionError, match="server 0 failed with MemoryError"):
            push(shard, number)
    persistence = shard.persistence
    for keep in (persistence.snapshot, lambda: persistence.save(tmp_path / "saved", 3)):
        with pytest.raises(EchelonError, match="has stopped saving its state: server 0 failed with MemoryError"):
            keep()
    shard.close()
    again = opened(job, directory=tmp_path)
    assert not again.broken
    assert numbers_of(again) == numbers_of(trained(3, job))
    push(again, 3)
    again.close()


def test_segment_that_cannot_be_cut_takes_no_more_records(tmp_path, monkeypatch):
    """A full disk in the middle of a record, and no way to cut it off."""
    from echelon.parameter_server.persistence import journal

    segment = JournalSegment(tmp_path, 1)
    segment.append([b"whole"])

    def torn(handle: int, buffers: list[Any]) -> int:
        os.write(handle, b"to")
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "write_all", torn)
        patch.setattr(journal.os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(EchelonError, match="Input/output error"):
            segment.append([b"torn"])
    with pytest.raises(EchelonError, match="ends in a torn record"):
        segment.append([b"lost"])
    segment.close()
    assert segment.path.read_bytes() == b"wholeto"
