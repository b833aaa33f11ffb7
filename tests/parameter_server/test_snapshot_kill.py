"""kill -9 at any moment: the shard comes back with every answered push, and at most the one that was under way."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kept_shard import make_job, new_pass, opened, push, received, state_of, trained

from echelon.parameter_server.persistence.restore import Manifest

ROUNDS = 24


@pytest.fixture
def nursery():
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("nursery.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


def tell(nursery, line):
    nursery.stdin.write(f"{line}\n")
    nursery.stdin.flush()
    return nursery.stdout.readline().strip()


def acknowledged(directory):
    """Return the number of answered pushes, over all children."""
    acks = Path(f"{directory}.acks")
    return acks.read_bytes().count(b"\n") if acks.exists() else 0


def snapshots(directory):
    """Return the number of pushes taken, over all children."""
    return Manifest.read(directory).number if (directory / "manifest.json").exists() else 0


def killed(nursery, directory, seconds, journal_limit, turn):
    """Train for so long after the child's first answered push, and in every other turn its first snapshot; kill it."""
    before, taken = acknowledged(directory), snapshots(directory)
    child = int(tell(nursery, f"{directory} {journal_limit}"))
    while acknowledged(directory) == before or (turn % 2 and snapshots(directory) == taken):
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert tell(nursery, "") == "gone"


def catch_up(straight, again):
    """Send ``straight`` all that ``again`` has received."""
    while received(straight) < received(again):
        push(straight, received(straight))
    for worker, membership in again.members.memberships.items():
        if membership.passes > straight.members.memberships[worker].passes:  # killed before the push that followed
            new_pass(straight, worker, membership.passes)


def test_kills_lose_no_answered_push(tmp_path, nursery):
    chance, directory = random.Random(0), tmp_path / "server-0"
    job = make_job(mode="sync", trainers=2)
    straight = trained(0, job)
    for turn in range(ROUNDS):
        before = acknowledged(directory)
        start = received(straight)
        killed(nursery, directory, chance.uniform(0, 0.2), chance.choice([1, 20_000, 2**30]), turn)
        again = opened(job, directory=directory)
        again.close()
        answered = start + acknowledged(directory) - before
        assert answered <= received(again) <= answered + 1, turn
        catch_up(straight, again)
        assert state_of(again) == state_of(straight), turn
    assert received(straight) > ROUNDS
    assert snapshots(directory) >= ROUNDS / 2  # they were taken while pushes came
