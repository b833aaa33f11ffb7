"""The role that a process finds from arguments or the environment, and the error for a contradiction."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import run

import echelon
from echelon.base.environment import LOOPBACK, worker_rank_info
from echelon.base.errors import UsageError
from echelon.distributed import world as worlds
from echelon.distributed.ps_role import ALONE, Role, find_role
from echelon.launcher.role_assignment import ParameterServerRoles, check_roles
from echelon.launcher.run_options import RunOptions

LIST = "10.0.0.1:6174,10.0.0.2:6174"
SERVERS = ("10.0.0.1:6174", "10.0.0.2:6174")
TRAINER = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "3"}
PSERVER = {"TRAINING_ROLE": "PSERVER", "PADDLE_TRAINERS_NUM": "3"}


def test_without_servers_there_are_no_roles() -> None:
    assert find_role({}) == ALONE
    assert find_role(TRAINER) == ALONE  # as Paddle's launcher says it to ranks of any job
    assert (ALONE.is_worker, ALONE.is_server) == (True, False)


@pytest.mark.parametrize("name", ["PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_PSERVER_ENDPOINTS"])
def test_a_worker_by_the_environment(name: str) -> None:
    secret = {"ECHELON_PS_TOKEN": "hush, not a word", "ECHELON_PS_SESSION": "s1", "ECHELON_PS_JOIN_TIMEOUT": "2.5"}
    found = find_role({name: LIST} | TRAINER | secret)
    assert found == Role("worker", 1, SERVERS, 3, "", "s1", "hush, not a word", 2.5)
    assert "hush, not a word" not in repr(found)


@pytest.mark.parametrize(
    "own", [{"PADDLE_CURRENT_ENDPOINT": "10.0.0.2:6174"}, {"POD_IP": "10.0.0.2", "PADDLE_PORT": "6174"}]
)
def test_a_server_by_the_environment(own: dict[str, str]) -> None:
    found = find_role({"PADDLE_PSERVERS_IP_PORT_LIST": LIST} | PSERVER | own)
    assert (found.role, found.index, found.workers, found.current_endpoint) == ("server", 1, 3, SERVERS[1])


def test_arguments_win_over_the_environment() -> None:
    env = {"PADDLE_PSERVERS_IP_PORT_LIST": "h:1"} | PSERVER
    found = find_role(env, pservers=LIST, trainers=5, trainer_id=4, role="worker", session="mine", join_timeout=1)
    assert found == Role("worker", 4, SERVERS, 5, "", "mine", "", 1)
    server = find_role({}, pservers=list(SERVERS), trainers=5, role="server", current_endpoint="10.0.0.1:6174")
    assert (server.role, server.index) == ("server", 0)
    assert find_role({}, pservers="[::1]:7").endpoints == ("[::1]:7",)


def test_other_launchers_number_the_workers_too() -> None:
    assert find_role({"RANK": "2", "WORLD_SIZE": "4"}, pservers=LIST).index == 2
    assert find_role({"RANK": "2", "WORLD_SIZE": "4"}, pservers=LIST).workers == 4
    place = worker_rank_info(5, 8, {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "9"})
    assert (place.rank, place.world_size, place.local_rank, place.master_addr) == (5, 8, 1, "h")
    assert worker_rank_info(5, 8, {}).local_rank == 0


WRONG: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"pservers": LIST, "role": "sever"}, {}, "role: no role 'sever'; did you mean 'server'?"),
    ({"pservers": LIST}, {"TRAINING_ROLE": "BOSS"}, "TRAINING_ROLE: no role 'BOSS'; known: PSERVER, TRAINER"),
    ({"role": "server"}, {}, "role makes this process a server, but no server endpoints are given"),
    ({}, {"TRAINING_ROLE": "PSERVER"}, "TRAINING_ROLE makes this process a server, but no server endpoints are given"),
    ({"pservers": "10.0.0.1"}, {}, "'10.0.0.1' is no endpoint; write HOST:PORT"),
    ({"pservers": "h:1,"}, {}, "'' is no endpoint; write HOST:PORT"),
    ({"pservers": "h:65536"}, {}, "'h:65536' is no endpoint"),
    ({"pservers": "h:0"}, {}, "h:0 among the servers has no port"),
    ({"pservers": "h:1, h:2, h:1"}, {}, "h:1 is listed twice among the servers; list each server once"),
    ({"pservers": LIST, "trainers": 0}, {}, "trainers is 0; a job has 1 worker or more"),
    ({"pservers": LIST}, {"PADDLE_TRAINERS_NUM": "two"}, "PADDLE_TRAINERS_NUM must be a whole number"),
    ({"pservers": LIST, "trainers": 2}, {}, "which of the 2 workers is this? give each its own trainer_id from 0 to 1"),
    ({"pservers": LIST, "trainers": 2, "trainer_id": 2}, {}, "trainer_id is 2, but the job has 2 workers"),
    ({"pservers": LIST}, {"PADDLE_TRAINER_ID": "3"}, "PADDLE_TRAINER_ID is 3, but the job has 1 worker; "),
    ({"pservers": LIST, "role": "server"}, {}, "which of the 2 servers is this? give current_endpoint='host:port'"),
    (
        {"pservers": LIST, "role": "server", "current_endpoint": "h:1"},
        {},
        "this server is h:1, which is not among the servers 10.0.0.1:6174, 10.0.0.2:6174; write it as the list does",
    ),
    ({"pservers": LIST, "join_timeout": 0}, {}, "the join timeout is 0 s; it must be above 0"),
    ({"pservers": LIST}, {"ECHELON_PS_JOIN_TIMEOUT": "soon"}, "ECHELON_PS_JOIN_TIMEOUT must be a number of seconds"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "env", "line"), WRONG, ids=lambda value: str(value)[:30])
def test_a_contradiction_is_one_line(arguments: dict[str, Any], env: dict[str, str], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_role(env, **arguments)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def _roles(**options: Any) -> ParameterServerRoles | None:
    return check_roles(RunOptions("train.py", **options))


def test_what_a_host_starts() -> None:
    assert _roles() is None
    one = _roles(servers=2, workers=3)
    assert one is not None
    assert (one.servers, one.workers, one.trainers, one.first_trainer, one.one_host) == ((0, 1), 3, 3, 0, True)
    assert len({endpoint for endpoint in one.endpoints if endpoint.startswith(f"{LOOPBACK}:")}) == 2
    listed = {"pservers": "192.0.2.1:5,127.0.0.1:6", "trainers": 4}
    mine = _roles(**listed | {"workers": 2, "trainer_id_from": 2})
    assert mine == ParameterServerRoles(("192.0.2.1:5", "127.0.0.1:6"), (1,), 2, 4, 2, None)
    assert not mine.one_host
    only_servers = _roles(**listed | {"workers": 0})
    assert only_servers is not None
    assert (only_servers.servers, only_servers.workers) == ((1,), 0)
    only_workers = _roles(**listed | {"workers": 4, "servers": 0})
    assert only_workers is not None
    assert (only_workers.servers, only_workers.one_host) == ((), False)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"workers": 2}, "--workers belongs to a job with parameter servers; add --servers N, or use --procs"),
    ({"state": "x"}, "--state belongs to a job with parameter servers"),
    ({"servers": 0}, "--servers 0: expected 1 or more"),
    ({"servers": 1, "workers": 0}, "--workers 0: expected"),
    ({"servers": 1, "trainers": 2}, "--trainers and --trainer-id-from are for several hosts"),
    ({"pservers": "127.0.0.1:1"}, "give --trainers, the number of workers on all of them"),
    ({"pservers": "127.0.0.1:1", "trainers": 2}, "1 of 2 workers start here; give --trainer-id-from, the id"),
    ({"pservers": "127.0.0.1:1", "trainers": 2, "trainer_id_from": 2}, "--trainer-id-from 2 do not fit"),
    ({"pservers": "127.0.0.1:1", "trainers": 1, "servers": 2}, "--servers 2, but 1 of the --pservers are on this host"),
    ({"pservers": "192.0.2.1:1", "trainers": 1, "workers": 0}, "there is nothing to start here"),
    ({"pservers": "no-such-host.invalid:1", "trainers": 1}, "--pservers names the host 'no-such-host.invalid', which"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "line"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_refused_before_anything_starts(options: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        _roles(**options)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def a_worker_then_bound(mark: str) -> tuple[object, ...]:
    os.environ["ECHELON_BOUND_MARK"] = f"{mark}-{os.environ['RANK']}"
    free = echelon.init(pservers="127.0.0.1:1", trainers=2, trainer_id=int(os.environ["RANK"]))
    marked = [os.path.exists(os.environ["ECHELON_BOUND_MARK"])]
    line = r"barrier\(\) was called by a worker .*; call echelon\.distributed\.world\.bind\(\)"
    with pytest.raises(UsageError, match=line):
        echelon.barrier()
    bound = worlds.bind()
    marked.append(os.path.exists(os.environ["ECHELON_BOUND_MARK"]))
    echelon.barrier()
    assert worlds.current() is bound
    assert bound.role is free.role
    named = echelon.worker_index(), echelon.worker_num(), echelon.server_endpoints(), echelon.server_num()
    roles = echelon.is_worker(), echelon.is_server(), echelon.is_first_worker()
    return (free.rank, free.size, free.control, free.backend, free.role.role), bound.backend, marked, named, roles


def test_a_worker_does_not_join_the_others_until_it_is_bound(tmp_path: Path) -> None:
    for rank, (free, backend, marked, named, roles) in enumerate(run(a_worker_then_bound, str(tmp_path / "mark"))):
        assert free == (rank, 2, None, "none", "worker")
        assert (backend, marked) == ("gloo", [False, True])
        assert named == (rank, 2, ["127.0.0.1:1"], 1)
        assert roles == (True, False, rank == 0)


def test_binding_needs_a_place_to_meet() -> None:
    script = "import echelon; echelon.init(pservers='h:1', trainers=2, trainer_id=0); echelon.distributed.world.bind()"
    end = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert end.returncode == 1
    (line,) = end.stderr.splitlines()
    assert line.startswith("echelon: workers on several hosts need a rendezvous address for bind()")
