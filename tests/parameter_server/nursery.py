"""Children that train a kept shard until they are killed: python nursery.py. One process imports, others are forked.

Reads lines ``DIRECTORY JOURNAL_LIMIT`` and answers each with the pid of a child; every number that the child writes to
DIRECTORY.acks is a push that was answered. An empty line reaps the last child.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
from kept_shard import PersistenceSettings, make_job, opened, push, received

#: A snapshot is due all the time.
JOB = make_job(mode="sync", trainers=2, keeping=PersistenceSettings(snapshot_every=0.002))


def train(directory, journal_limit):
    shard = opened(JOB, directory=directory, journal_limit=journal_limit)
    acks = os.open(f"{directory}.acks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while True:
        number = received(shard)
        push(shard, number)
        os.write(acks, b"%d\n" % number)


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as warm:  # kernels are loaded once, for all children
        shard = opened(JOB, directory=Path(warm) / "s")
        for number in range(3):
            push(shard, number)
        shard.persistence.snapshot()
        shard.close()
        opened(JOB, directory=Path(warm) / "s").close()
    for line in sys.stdin:
        if not line.strip():
            os.wait()
            print("gone", flush=True)
            continue
        directory, journal_limit = line.split()
        child = os.fork()
        if child == 0:
            train(Path(directory), int(journal_limit))
        print(child, flush=True)


if __name__ == "__main__":
    main()
