"""One job at a time writes into a checkpoint directory: real processes, killed, forked, on several ranks."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import time

import pytest
import torch
from harness import LIMIT, Raised, context, run, run_raw
from torch import nn

import echelon
from echelon.checkpoint import CheckpointError, Stored, Writer, export, latest, verify
from echelon.checkpoint import directory as layout
from echelon.checkpoint.directory_lock import CHECKPOINTS


def made(directory, **settings):
    echelon.init(seed=0)
    model = nn.Linear(3, 1)
    return echelon.distribute(
        model,
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        checkpoint=echelon.Checkpoint(dir=str(directory), **settings),
        log=echelon.Log(console=False),
    )


def batch():
    return torch.ones(2, 3), torch.ones(2, 1)


def train(directory, steps, **settings):
    engine = made(directory, **settings)
    begun = engine.steps
    while engine.steps < begun + steps:
        engine.step(*batch())
    engine.close()
    return begun


def hold(directory, begun, forks):
    """Save every step, for ever; ``forks``: with a child that outlives it, as a loader's worker may for a while."""
    torch.set_num_threads(1)
    engine = made(directory, every=1, keep=2)
    engine.step(*batch())
    if forks and os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    while True:
        engine.step(*batch())
        engine.save(wait=True)
        begun.set()
        time.sleep(0.05)


@pytest.fixture
def holder(tmp_path):
    """A running job; killed at the end."""
    begun = context.Event()
    process = context.Process(target=hold, args=(tmp_path, begun, True), daemon=True)
    process.start()
    assert begun.wait(LIMIT)
    yield process
    process.kill()
    process.join()


def assert_refused(ends, pid):
    for end in ends:
        assert isinstance(end, Raised), end
        assert end.kind == "CheckpointError"
        assert f"process {pid} on host {socket.gethostname()} writes checkpoints there" in end.line, end.trace
        assert "\n" not in end.line


def read_only(directory):
    """Readers of a directory that do not write to it: resume, evaluate, export."""
    engine = made(directory, every=1)
    found = engine.evaluate(batch(), batch_size=2)["loss"]
    return engine.steps, found


def test_second_job_is_refused_and_the_first_goes_on(tmp_path, holder):
    """Refused where it would save by itself, and where it is told to; both ranks say the same. Readers are not."""
    assert_refused(run_raw(train, tmp_path, 2, ranks=2, every=1), holder.pid)
    assert_refused(run_raw(save_once, tmp_path, ranks=1), holder.pid)
    ((steps, loss),) = run(read_only, tmp_path, ranks=1)
    assert steps > 0
    assert loss >= 0
    assert holder.is_alive()
    before = Stored(latest(tmp_path)).step
    until = time.monotonic() + 20
    while Stored(latest(tmp_path)).step <= before and time.monotonic() < until:
        time.sleep(0.05)
    assert Stored(latest(tmp_path)).step > before
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    export(tmp_path, tmp_path / "weights.safetensors")
    newest = Stored(latest(tmp_path)).step
    (begun,) = run(train, tmp_path, 2, ranks=1, every=1)  # its child still lives, and holds nothing
    assert begun == newest
    assert Stored(latest(tmp_path)).step == newest + 2
    assert not (tmp_path / CHECKPOINTS.file).exists()


def resume_late(directory):
    """Return the step that this rank goes on from; rank 1 finds a newer checkpoint than rank 0 did."""
    rank = int(os.environ["RANK"])
    if rank == 1:
        listed = layout.complete
        layout.complete = lambda where: {**listed(where), 9: where / "step-9"}
    return made(directory, every=1).steps


def test_ranks_resume_from_what_rank_0_lists(tmp_path):
    run(train, tmp_path, 2, ranks=1, every=1)
    assert run(resume_late, tmp_path, ranks=2) == [2, 2]


def save_once(directory):
    made(directory, resume=False).save()


def test_engines_of_one_process_share_a_claim(tmp_path):
    assert run(several, tmp_path, ranks=1) == [[True, True, False]]


def several(directory):
    """Made again in a notebook, say, without closing the first."""
    first, second = made(directory, every=1, keep=2), made(directory, every=1, keep=2)
    for _ in range(20):  # both save the same steps, in the background
        for engine in (first, second):
            engine.step(*batch())
    there = [(directory / CHECKPOINTS.file).exists()]
    first.close()
    there.append((directory / CHECKPOINTS.file).exists())
    second.close()
    return [*there, (directory / CHECKPOINTS.file).exists()]


def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")


def without_locks(directory, steps):
    fcntl.flock = no_locks
    said = []
    engine = made(directory, every=1)
    engine._run.checkpoints.locks._say = said.append
    for _ in range(steps):
        engine.step(*batch())
    engine.close()
    return said


def test_file_system_without_locks_is_said_and_used(tmp_path):
    ((line,),) = run(without_locks, tmp_path, 2, ranks=1)
    assert "does not support file locks (No locks available); a lease in .writer keeps other jobs out" in line
    verify(latest(tmp_path))


def save_for(directory, seconds, number):
    """Saves of the same steps as another job's; what fails is tried again."""
    torch.set_num_threads(1)
    writer, step, failed = Writer(directory, keep=3, asynchronous=False), 0, 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        step += 1
        try:
            writer.save(step % 7, {"x": torch.full((20_000,), float(number))}, {"number": number})
        except CheckpointError:
            failed += 1
    return failed


def test_published_checkpoint_complete_without_writer_exclusion(tmp_path):
    """Without file locks, two writers sweep, replace and prune each other's checkpoints."""
    jobs = [context.Process(target=save_for, args=(tmp_path, 4.0, number), daemon=True) for number in (1, 2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(LIMIT)
        assert job.exitcode == 0
    found = list(tmp_path.glob("step-*"))
    assert found
    for path in found:
        verify(path)
        stored = Stored(path)
        assert stored.read("x").unique().tolist() == [stored.facts["number"]]
