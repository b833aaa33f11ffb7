"""Whom to blame, and in which words."""

import json

import pytest

from echelon.base.errors import PeerLost
from echelon.distributed.rank_main import caused_by_peer
from echelon.launcher.failure import Failure, first_cause


def failure(rank, *, exit_code=1, time=0.0, **more):
    return Failure(rank=rank, world_size=4, host="h", pid=9, exit_code=exit_code, time=time, **more)


def test_who_only_followed_is_never_blamed_before_the_cause():
    followed = failure(0, time=1.0, kind="RuntimeError", secondary=True)
    raised = failure(1, time=3.0, kind="ValueError")
    later = failure(2, time=4.0, kind="ValueError")
    killed = failure(3, time=5.0, exit_code=-9)
    assert first_cause([followed, later, raised]) is raised
    assert first_cause([followed, raised, killed]) is killed
    assert first_cause([followed]) is followed


def test_an_abort_counts_by_its_time_for_it_may_be_a_watchdogs():
    raised, aborted = failure(1, time=3.0, kind="ValueError"), failure(2, time=4.0, exit_code=-6)
    assert first_cause([aborted, raised]) is raised


@pytest.mark.parametrize(
    ("end", "words", "status"),
    [
        (failure(1, exit_code=-9), "rank 1 of 4 (host h, pid 9) was killed by SIGKILL", 137),
        (failure(1, exit_code=3), "rank 1 of 4 (host h, pid 9) failed with exit code 3", 3),
        (failure(1, kind="ValueError", message="a\n b"), "rank 1 of 4 (host h, pid 9) raised ValueError: a b", 1),
        (failure(1, kind="KeyError"), "rank 1 of 4 (host h, pid 9) raised KeyError", 1),
        (failure(-1, exit_code=-15, message="was stopped by SIGTERM"), "host h was stopped by SIGTERM", 143),
    ],
)
def test_a_failure_is_told_in_one_line(end, words, status):
    assert (end.line, end.status) == (words, status)


def test_a_failure_survives_the_way_between_hosts():
    end = failure(2, kind="ValueError", message="ü", traceback="Traceback ...", log="/x", secondary=True)
    assert Failure.from_json(end.to_json()) == end


@pytest.mark.parametrize("text", ["", "[]", "{}", '"x"', "null", '{"rank": 1}'])
def test_anything_else_from_the_network_is_refused(text):
    with pytest.raises(ValueError, match=r".*"):
        Failure.from_json(text)


def test_a_record_with_a_wrong_type_is_refused():
    record = json.loads(failure(1).to_json()) | {"rank": "1"}
    with pytest.raises(ValueError, match="not the record of a failure"):
        Failure.from_json(json.dumps(record))


def wrapped(cause):
    try:
        try:
            raise cause
        except RuntimeError as error:
            raise ValueError("while saving") from error
    except ValueError as error:
        return error


def test_a_lost_peer_is_recognised_through_what_wraps_it():
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5783.")
    assert caused_by_peer(gloo)
    assert caused_by_peer(wrapped(gloo))
    assert caused_by_peer(PeerLost("rank 1 is gone"))
    assert not caused_by_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not caused_by_peer(wrapped(RuntimeError("out of memory")))
