"""Two processes and one directory: without file locks the second is refused; one that counts as lost is fenced."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import time

import pytest
import torch
from harness import LIMIT, context

from echelon.base import directory_lease, directory_lock
from echelon.base.directory_lease import DirectoryLease
from echelon.base.directory_lock import claim, lost_to, read_holder, release
from echelon.base.errors import CheckpointError
from echelon.checkpoint import Writer, latest
from echelon.checkpoint.directory_lock import CHECKPOINTS


def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")


def without_locks():
    fcntl.flock = no_locks
    directory_lease.RENEWAL, directory_lease.EXPIRY = 0.1, 2.0


@pytest.fixture
def _no_locks(monkeypatch):
    for owner, name in ((fcntl, "flock"), (directory_lease, "RENEWAL"), (directory_lease, "EXPIRY")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # so that they come back
    without_locks()
    yield
    directory_lock._release_all()


def hold(directory, begun):
    """Save until a save is refused, and leave the reason."""
    torch.set_num_threads(1)
    without_locks()
    assert claim(directory, CHECKPOINTS, False, print) is None
    writer, step = Writer(directory, asynchronous=False), 0
    try:
        while True:
            writer.save(step := step + 1, {"x": torch.zeros(3)}, {"by": "first"})
            begun.set()
            time.sleep(0.05)
    except CheckpointError as error:
        (directory / "reason.part").write_text(str(error))
        (directory / "reason.part").rename(directory / "reason")


@pytest.fixture
def holder(tmp_path):
    begun = context.Event()
    process = context.Process(target=hold, args=(tmp_path, begun), daemon=True)
    process.start()
    assert begun.wait(LIMIT)
    yield process
    process.kill()
    process.join()


def claimed(directory, **more):
    said: list[str] = []
    return claim(directory, CHECKPOINTS, more.pop("restarted", False), said.append, **more), said


@pytest.mark.usefixtures("_no_locks")
def test_second_process_without_locks_is_refused_by_name(tmp_path, holder):
    refused, (line,) = claimed(tmp_path, patience=0.0)
    assert f"process {holder.pid} on host {socket.gethostname()} writes checkpoints there" in refused
    assert "does not support file locks (No locks available); a lease in .writer keeps other jobs out" in line
    assert lost_to(tmp_path, CHECKPOINTS) is None
    assert not (tmp_path / "reason").exists()
    holder.kill()
    holder.join()
    assert claimed(tmp_path, patience=30.0)[0] is None  # it is renewed no more
    release(tmp_path, CHECKPOINTS)
    assert not (tmp_path / CHECKPOINTS.file).exists()


@pytest.mark.usefixtures("_no_locks")
def test_first_process_counted_as_lost_is_fenced(tmp_path, holder):
    os.kill(holder.pid, signal.SIGSTOP)
    assert claimed(tmp_path, patience=30.0)[0] is None
    Writer(tmp_path, asynchronous=False).save(1000, {"x": torch.ones(3)}, {"by": "second"})
    before = sorted(path.name for path in tmp_path.glob("step-*"))
    os.kill(holder.pid, signal.SIGCONT)
    until = time.monotonic() + LIMIT
    while not (reason := tmp_path / "reason").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert (
        f"process {os.getpid()} on host {socket.gethostname()} has taken over from this process" in reason.read_text()
    )
    after = sorted(path.name for path in tmp_path.glob("step-*"))
    assert len(set(after) - set(before)) <= 1  # a save that was past its last look when it was stopped
    assert latest(tmp_path).name == "step-00001000"
    assert lost_to(tmp_path, CHECKPOINTS) is None


@pytest.mark.usefixtures("_no_locks")
def test_one_of_two_that_find_a_lease_free_takes_it(tmp_path, monkeypatch):
    one, other = (DirectoryLease(tmp_path / "lease", "here", pid) for pid in (1, 2))
    assert not one.is_taken()
    assert not other.is_taken()
    monkeypatch.setattr(directory_lease, "_SETTLING", 0.0)
    monkeypatch.setattr(one, "is_lost", lambda: other._write() or DirectoryLease.is_lost(one))  # it writes in between
    assert not one.take()
    assert other.take()
    other.release()


def test_process_of_a_lost_host_with_the_lock_is_fenced(tmp_path, monkeypatch):
    """A restarted job goes on where its own process on a lost host still has the lock: that one saves no more."""
    lease = DirectoryLease(tmp_path / CHECKPOINTS.file, "other-host", 7)
    handle = directory_lock._locked(tmp_path, CHECKPOINTS, lease)
    assert handle is not None
    refused, (line,) = claimed(tmp_path, restarted=True, patience=0.0)
    assert refused is None
    assert "process 7 on host other-host, of an earlier round of this job" in line
    assert lost_to(tmp_path, CHECKPOINTS) is None
    assert lease.is_lost()
    assert read_holder(tmp_path, CHECKPOINTS).pid == os.getpid()
    release(tmp_path, CHECKPOINTS)
    os.close(handle)
