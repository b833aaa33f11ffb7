"""Joining a job, under each launcher's variables."""

from harness import run

import echelon
from echelon.environment import ALONE, find_place


def who_am_i():
    echelon.init()
    echelon.barrier()
    return echelon.rank(), echelon.world_size(), echelon.worker_index(), echelon.is_first_worker()


def test_ranks_find_each_other():
    assert run(who_am_i, ranks=3) == [(0, 3, 0, True), (1, 3, 1, False), (2, 3, 2, False)]


def test_without_a_launcher_one_process_is_the_job():
    assert run(who_am_i, ranks=1) == [(0, 1, 0, True)]
    assert find_place({}) == ALONE
