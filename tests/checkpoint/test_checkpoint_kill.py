"""kill -9 at any moment of a save leaves a checkpoint that is complete: the last one, or the one before it.

``ECHELON_KILLS=50 pytest tests/checkpoint/test_checkpoint_kill.py`` kills more often.
"""

import multiprocessing
import os
import random
import signal
import threading
import time

import pytest
import torch
from harness import LIMIT, Died, run_raw

import echelon
from echelon.checkpoint import CheckpointError, Stored, Writer, latest, verify

_context = multiprocessing.get_context("forkserver")
SHAPES = [(64, 64), (1000,), (), (0, 3)]
KILLS = int(os.environ.get("ECHELON_KILLS", "20"))


def state(step, ranks=1):
    """Tensors in which every element tells the step it belongs to."""
    shared = {f"model.{n}": torch.full(shape, step, dtype=torch.float64) for n, shape in enumerate(SHAPES)}
    return shared | {f"rng.{rank}": torch.full((33,), step + rank) for rank in range(ranks)}


def save_without_end(directory, begun):
    """Go on from where the last one was killed, each step saved twice so that replacing is interrupted too."""
    torch.set_num_threads(1)
    world = echelon.init()
    kept = Writer(directory, keep=2, rank=world.rank, world_size=world.size, group=world.control)
    found = latest(directory)
    step = Stored(found).step if found else 0
    while True:
        step += 1
        mine = {n: t for n, t in state(step, world.size).items() if not n.startswith("rng") or n == f"rng.{world.rank}"}
        for asynchronous in (True, False):
            kept.save(step, mine, {"step": step}, wait=not asynchronous)
        begun.set()


def assert_whole(directory, ranks=1):
    """The newest checkpoint is intact and of one step throughout; so is every other that has a final name."""
    found = latest(directory)
    assert found is not None
    stored = Stored(found)
    verify(found)
    assert stored.facts == {"step": stored.step}
    for name, value in state(stored.step, ranks).items():
        assert torch.equal(stored.read(name), value), name
    for path in directory.glob("step-*"):
        verify(path)
    return stored.step


def test_repeatedly_killed_process_keeps_complete_checkpoints(tmp_path):
    """A process that is killed again and again loses no complete checkpoint."""
    chance, step, states = random.Random(0), 0, set()
    for _ in range(KILLS):
        begun = _context.Event()
        process = _context.Process(target=save_without_end, args=(tmp_path, begun), daemon=True)
        process.start()
        assert begun.wait(LIMIT)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        now = assert_whole(tmp_path)
        assert now >= step
        step = now
        states |= {path.name.rpartition(".")[2] for path in tmp_path.glob(".*")}
    assert step >= KILLS
    assert "writing" in states  # the kills did fall into the middle of saves


def save_until_killed(directory, delays):
    """Ranks that kill themselves so long after their first checkpoint; one that is told to live says what it hears."""
    delay, begun = delays[echelon.init().rank], threading.Event()

    def kill():
        begun.wait()
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    if delay is not None:
        threading.Thread(target=kill, daemon=True).start()
    try:
        save_without_end(directory, begun)
    except CheckpointError as error:
        return str(error)


def test_two_ranks_killed_lose_no_complete_checkpoint(tmp_path):
    chance, step = random.Random(1), 0
    for _ in range(8):
        delays = [chance.uniform(0, 0.1), chance.uniform(0, 0.1)]
        ends = run_raw(save_until_killed, tmp_path, delays, ranks=2)
        assert any(end == Died(-signal.SIGKILL) for end in ends)
        now = assert_whole(tmp_path, ranks=2)
        assert now > step
        step = now


@pytest.mark.parametrize("killed", [0, 1])
def test_the_rank_that_lives_hears_of_the_one_that_was_killed(tmp_path, killed):
    delays = [None, None]
    delays[killed] = 0.05
    ends = run_raw(save_until_killed, tmp_path, delays, ranks=2)
    assert ends[killed] == Died(-signal.SIGKILL)
    assert f"rank {1 - killed} lost contact with another rank" in ends[1 - killed]
    assert "\n" not in ends[1 - killed]
    assert_whole(tmp_path, ranks=2)
