"""Two processes over one state directory, sessions to choose from, and clocks that jump."""

from __future__ import annotations

import os
import socket

import pytest
from harness import context
from kept_shard import make_job, numbers_of, opened, push, received, state_of, trained

from echelon.base import directory_lock
from echelon.base.errors import CheckpointError
from echelon.parameter_server.persistence import find_job as finding
from echelon.parameter_server.persistence.find_job import next_epoch
from echelon.parameter_server.persistence.persistence import home_of
from echelon.parameter_server.persistence.restore import Manifest, SnapshotChainFile
from echelon.parameter_server.server.monotonic_time import MonotonicTime

JOB = make_job()


def hold(directory, held, enough):
    shard = opened(JOB, directory=directory)
    push(shard, 0)
    held.set()
    enough.wait()


def test_second_process_is_refused_until_the_first_ends(tmp_path, monkeypatch):
    held, enough = context.Event(), context.Event()
    first = context.Process(target=hold, args=(tmp_path, held, enough), daemon=True)
    first.start()
    assert held.wait(60)
    before = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.setattr(directory_lock, "PATIENCE", 0.2)
    line = f"process {first.pid} on host {socket.gethostname()} keeps the state of server 0 there; end it, or give this"
    with pytest.raises(AssertionError, match=line):
        opened(JOB, directory=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    first.kill()
    first.join()
    again = opened(JOB, directory=tmp_path)
    assert received(again) == 1
    again.close()


def test_epoch_fences_the_first_writer_without_locks(tmp_path, monkeypatch):
    """A host that counted as lost goes on, on a shared file system: it answers nothing and removes nothing."""
    monkeypatch.setattr(directory_lock, "claim", lambda *_: None)
    lost = opened(JOB, directory=tmp_path)
    for number in range(3):
        push(lost, number)
    successor = opened(JOB, directory=tmp_path)  # locks of one process are shared
    assert received(successor) == 3
    push(successor, 3)
    present = sorted(path.name for path in tmp_path.iterdir())
    for _ in range(2):
        with pytest.raises(
            AssertionError, match=r"server 0 of epoch 1 has lost .* to a later process of it \(epoch 2\)"
        ):
            push(lost, 3)
    with pytest.raises(CheckpointError, match="has lost"):
        lost.persistence.snapshot()
    assert sorted(path.name for path in tmp_path.iterdir()) == present
    push(successor, 4)
    successor.persistence.snapshot()
    lost.close()
    successor.close()
    again = opened(JOB, directory=tmp_path)
    assert state_of(again) == state_of(trained(5, JOB))
    again.close()


def test_first_writer_is_fenced_during_a_snapshot(tmp_path, monkeypatch):
    lost = opened(JOB, directory=tmp_path)
    push(lost, 0)
    whole = lost.persistence._publish

    def late(manifest):
        later = opened(JOB, directory=tmp_path)
        push(later, 1)
        later.persistence.snapshot()
        later.close()
        whole(manifest)

    monkeypatch.setattr(lost.persistence, "_publish", late)
    with pytest.raises(CheckpointError, match="has lost"):
        lost.persistence.snapshot()
    lost.close()
    again = opened(JOB, directory=tmp_path)
    assert numbers_of(again) == numbers_of(trained(2, JOB))
    again.close()


def test_newest_session_is_chosen_by_its_epoch_not_by_dates(tmp_path):
    empty = Manifest(1, 0, 1, False, (SnapshotChainFile(1, 0, 0, 0),))
    for epoch, session in ((1, "first"), (2, "second")):
        assert next_epoch(tmp_path, 0) == epoch
        home = home_of(tmp_path, session, 0)
        home.mkdir(parents=True)
        Manifest(**{**vars(empty), "epoch": epoch}).write(home)
    os.utime(home / "manifest.json", (0, 0))  # the clock was set back before the second session
    assert max(finding._homes(tmp_path, 0), key=finding._order) == home


def test_time_of_the_journal_does_not_jump(capfd):
    wall, clock = [1000.0], [0.0]
    time = MonotonicTime(lambda: wall[0], lambda: clock[0])
    wall[0], clock[0] = 1000.0 + 2 * 86400, 7.0
    assert time.now() == 1007
    wall[0] = 5.0
    assert time.now() == 1007
    cases = ((1500.0, 1500), (1000.0 + 2 * 86400, 1000 + 43200), (5.0, 1000))
    for wall[0], expected in cases:
        time.resume(1000, 86400.0)
        assert time.now() == expected
    assert capfd.readouterr().err.count("so that a clock that jumped expires no rows") == 2


def test_jump_of_the_clock_expires_no_row(tmp_path):
    job = make_job(expire_passes=None, expire_seconds=86400.0)
    wall = [1000.0]
    shard = opened(job, directory=tmp_path, wall=lambda: wall[0])
    push(shard, 0)
    rows = len(shard.tables["b"])
    wall[0] += 2 * 86400
    push(shard, 1)
    assert len(shard.tables["b"]) >= rows > 0
    shard.close()
    again = opened(job, directory=tmp_path, wall=lambda: wall[0])
    push(again, 2)
    assert len(again.tables["b"]) >= rows
    again.close()
