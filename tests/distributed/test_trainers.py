"""Trainers announced by endpoints: their places, contradictions, and trainers that do not come."""

from __future__ import annotations

import contextlib
import io
import os
import socket
from typing import Any

import pytest
from harness import RANKS, free_port, run

import echelon
from echelon.base.environment import ALONE, RankInfo
from echelon.base.errors import EchelonError, UsageError
from echelon.distributed import world as worlds
from echelon.distributed.endpoint_trainers import trainer_rank_info, with_master_endpoint
from echelon.distributed.ps_role import find_role

LIST = "10.0.0.1:6170,10.0.0.1:6171,10.0.0.2:6170"
HERE = {"PADDLE_TRAINER_ID": "2", "PADDLE_TRAINERS_NUM": "3", "PADDLE_TRAINER_ENDPOINTS": LIST}
OWN = {"PADDLE_CURRENT_ENDPOINT": "10.0.0.2:6170"}


def test_trainer_place_counts_hosts_and_devices() -> None:
    places = [trainer_rank_info({}, trainers=LIST, trainer_id=rank) for rank in range(3)]
    assert [place.rank for place in places] == [0, 1, 2]
    assert [(p.local_rank, p.local_world_size, p.node_rank) for p in places] == [(0, 2, 0), (1, 2, 0), (0, 1, 1)]
    assert {(p.world_size, p.master_addr, p.master_port, p.one_host) for p in places} == {(3, "10.0.0.1", 6170, False)}
    assert places[2].endpoints == tuple(LIST.split(","))


def test_trainer_place_by_environment_is_that_by_arguments() -> None:
    asked = trainer_rank_info({}, trainers=LIST, trainer_id="2", current_endpoint="10.0.0.2:6170")
    assert trainer_rank_info(HERE | OWN) == asked == trainer_rank_info(HERE)
    assert trainer_rank_info({"PADDLE_TRAINER_ENDPOINTS": LIST} | OWN) == asked  # its number is its endpoint's place
    assert trainer_rank_info(HERE | {"PADDLE_TRAINER_ID": "0"}, trainer_id=2) == asked  # an argument wins
    assert trainer_rank_info({"PADDLE_TRAINERS_NUM": "7"}, trainers=LIST.split(","), trainer_id=2) == asked


def test_trainer_place_on_one_host_meets_on_loopback() -> None:
    for one in ("10.0.0.1:1,10.0.0.1:2", "localhost:1,127.0.0.1:2", "[::1]:1,localhost:2"):
        place = trainer_rank_info({}, trainers=one, trainer_id=1)
        assert (place.local_rank, place.local_world_size, place.one_host) == (1, 2, True)
        assert (place.master_addr, place.master_port) == ("127.0.0.1", 1)


def test_trainer_place_alone_where_one_or_none_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    one = {"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "1", "TRAINING_ROLE": "TRAINER"}
    for env in ({}, one, one | {"PADDLE_TRAINER_ENDPOINTS": "h:1"}, {"PADDLE_TRAINER_ENDPOINTS": ""}):
        assert trainer_rank_info(env) == ALONE
    for surrounding in ("ECHELON_LOG_DIR", "ECHELON_PLAN_ONLY", "ECHELON_VERIFY"):
        assert trainer_rank_info(HERE | {surrounding: "x"}) == ALONE
    assert capsys.readouterr().err == ""
    assert trainer_rank_info({"PADDLE_NUM_TRAINERS": "2"}) == ALONE
    assert "PADDLE_NUM_TRAINERS is 2, but this process was started without 'echelon run'" in capsys.readouterr().err


SERVERS = "set PADDLE_PSERVERS_IP_PORT_LIST (pservers=) for parameter servers, PADDLE_TRAINER_ENDPOINTS"
REMEDY = f"but neither servers nor endpoints; {SERVERS}"
FIRST = {"trainers": LIST, "trainer_id": 0}
WRONG: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({}, {"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ID": "1"}, "PADDLE_TRAINERS_NUM announces 2 trainers, " + REMEDY),
    ({"trainers": 2, "trainer_id": 1}, {}, "trainers announces 2 trainers, " + REMEDY),
    ({}, {"PADDLE_TRAINERS_NUM": "0"}, "PADDLE_TRAINERS_NUM is 0; a job has 1 trainer or more"),
    ({}, {"PADDLE_TRAINERS_NUM": "two"}, "PADDLE_TRAINERS_NUM must be a whole number, but it is 'two'"),
    ({}, {"PADDLE_TRAINER_ID": "1"}, "PADDLE_TRAINER_ID is 1, but no other trainers were announced; " + SERVERS),
    ({"current_endpoint": "h:1"}, {}, "current_endpoint is h:1, but no list of trainers or servers was given"),
    ({"trainers": LIST}, {}, "which of the 3 trainers is this? give each its own trainer_id from 0 to 2"),
    ({"trainers": LIST, "trainer_id": 3}, {}, "trainer_id is 3, but 3 trainers are listed"),
    ({"trainers": LIST, "trainer_id": "first"}, {}, "trainer_id is 'first', which is no whole number"),
    (FIRST | {"current_endpoint": "10.0.0.1:6171"}, {}, "trainer_id is 0, but the endpoint 10.0.0.1:6171 is trainer 1"),
    ({"current_endpoint": "10.0.0.1:6170"}, HERE, "PADDLE_TRAINER_ID is 2, but the endpoint 10.0.0.1:6170 is"),
    ({}, HERE | {"PADDLE_CURRENT_ENDPOINT": "h:1"}, "(or PADDLE_CURRENT_ENDPOINT) is h:1, which is not among"),
    ({}, HERE | {"PADDLE_TRAINERS_NUM": "2"}, "PADDLE_TRAINERS_NUM is 2, but PADDLE_TRAINER_ENDPOINTS lists 3"),
    ({"trainers": 4}, HERE, "trainers is 4, but PADDLE_TRAINER_ENDPOINTS lists 3"),
    ({"trainers": "h:1,h:1"}, {}, "h:1 is listed twice among the trainers; list each trainer once"),
    ({"trainers": "h:1,h"}, {}, "'h' is no endpoint; write HOST:PORT"),
    ({"trainers": "h:1,h:0"}, {}, "h:0 among the trainers has no port"),
    ({"trainers": "two"}, {}, "trainers is 'two', no number and no endpoints; write 2, or 'HOST:PORT,HOST:PORT'"),
    ({"trainers": True}, {}, "trainers is True, no number and no endpoints"),
    ({"trainers": 2.5}, {}, "trainers is 2.5, no number and no endpoints"),
    ({"trainers": [1, 2]}, {}, "[1, 2] is no list of trainers; write 'HOST:PORT,HOST:PORT'"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "env", "line"), WRONG, ids=lambda value: str(value)[:30])
def test_trainer_contradiction_is_one_line(arguments: dict[str, Any], env: dict[str, str], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        trainer_rank_info(env, **arguments)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_servers_take_trainers_as_text_and_as_endpoints() -> None:
    assert find_role({}, pservers="h:1", trainers="2", trainer_id="1").workers == 2
    listed = find_role({}, pservers="h:1", trainers=LIST, trainer_id=2)
    assert (listed.role, listed.workers, listed.index) == ("worker", 3, 2)
    assert find_role({"PADDLE_TRAINER_ENDPOINTS": LIST}, pservers="h:1", trainer_id=0).workers == 3
    for wrong, line in (({"trainers": "two"}, "trainers is 'two'"), ({"pservers": 2}, "2 is no list of servers")):
        with pytest.raises(UsageError, match=line):
            find_role({}, **{"pservers": "h:1", "trainers": 2, "trainer_id": 0} | wrong)


def test_bound_workers_of_servers_meet_at_the_first_trainer() -> None:
    worker = RankInfo(2, 3, 0, 1, 0, "", 0, "parameter servers")
    met = with_master_endpoint(worker, {}, LIST)
    assert (met.rank, met.master_addr, met.master_port, met.launcher) == (2, "10.0.0.1", 6170, "parameter servers")
    assert with_master_endpoint(worker, HERE, 3) == met
    assert with_master_endpoint(worker, {}, 3) == worker
    launched = RankInfo(2, 3, 0, 1, 0, "first", 9, "echelon run")
    assert with_master_endpoint(launched, HERE, LIST) == launched


# ---- real processes that do not all come ----


def trainer(jobs: list[dict[str, Any]]) -> tuple[str, str, str]:
    """Start one trainer; its standard error, the error that ended it, and its number of processes."""
    asked = jobs[int(os.environ["RANK"])]
    for name in RANKS:
        del os.environ[name]
    os.environ["ECHELON_WAIT_NOTICE"] = "0.7"
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            size = echelon.init(**asked["arguments"]).size
            end = ""
            worlds.shutdown()
        except EchelonError as error:
            size, end = 0, f"{type(error).__name__}: {error}"
    return said.getvalue(), end, str(size)


def test_missing_trainers_are_named_early_and_at_the_end() -> None:
    """Four jobs at once: one trainer of three missing, a foreign program in rank 0's place, lists that differ, and two
    trainers that come."""
    absent, foreign, differ, good = ([f"127.0.0.1:{free_port()}" for _ in range(3)] for _ in range(4))

    def job(endpoints: list[str], index: int, timeout: float = 2.0) -> dict[str, Any]:
        return {"arguments": {"trainers": ",".join(endpoints), "trainer_id": index, "timeout": timeout}}

    jobs = [job(absent, 0), job(absent, 1, timeout=30.0), job(foreign, 1), job(differ, 0), job(differ[:2], 1)]
    jobs += [job(good[:2], 0, timeout=30.0), job(good[:2], 1, timeout=30.0)]
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        silent.bind(("127.0.0.1", int(foreign[0].rpartition(":")[2])))
        silent.listen()
        ends = run(trainer, jobs, ranks=len(jobs))

    said, end, _ = ends[0]
    line = said.splitlines()[-1]
    assert line.startswith("echelon: join: rank 0 has waited ")
    assert (
        f"rank 2 ({absent[2]}) of 3 to call echelon.init(); it gives up after 2 s; start the missing processes" in line
    )
    assert end.startswith("PeerLost: rank 0 has waited 2 s, but of 3 processes these have not joined: ")
    assert f"rank 2 ({absent[2]}); look at their logs, or start them" in end
    said, end, _ = ends[1]
    assert f"rank 2 ({absent[2]}) of 3 to call echelon.init(); it gives up after 30 s" in said
    assert end.startswith(f"PeerLost: rank 1: rank 0 has exited before these joined: rank 2 ({absent[2]})")

    said, end, _ = ends[2]
    assert f"for rank 0 at {foreign[0]}, where a program listens that has not answered" in said
    assert end.startswith(f"PeerLost: rank 1 could not join rank 0 at {foreign[0]}: the program that listens there")
    assert end.endswith("choose another first endpoint of the trainers on all ranks")

    lists = [end for _, end, _ in ends[3:5] if end.startswith("MismatchError")]
    assert len(lists) == 1
    assert f"{','.join(differ)}" in lists[0]
    assert lists[0].endswith("give every trainer the same list, in the same order")
    assert [end[1:] for end in ends[5:]] == [("", "2"), ("", "2")]


def launched(trainers: str) -> tuple[str, int]:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        echelon.init(trainers=trainers, trainer_id=0)
    return said.getvalue(), echelon.rank()


def test_launched_ranks_keep_their_places_beside_endpoints() -> None:
    line = "echelon: join: trainers announces 3 processes, but torchrun has started 2; the launcher's number is used\n"
    assert run(launched, LIST) == [(line, 0), ("", 1)]
