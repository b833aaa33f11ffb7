"""Whole servers with real links: they restore after kill -9, end with the workers, and name who is missing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting_server import free_endpoint
from serving_process import ServerProcess

from echelon.base.errors import EchelonError, PeerLost, UsageError
from echelon.base.security import OPEN, Security
from echelon.observability.runlog import read
from echelon.parameter_server.protocol.channel import HeartbeatSender, ServerChannel
from echelon.parameter_server.protocol.job_spec import BUCKETS, JobSpec, PersistenceSettings, TableSpec
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.server_peers import ServerPeers
from echelon.parameter_server.server.server_port import ServerPort
from echelon.strategy.sparse_update_rules import Sgd

DIM, RATE = 4, 0.5
IDS = np.array([-5, 0, 7, 2**63 - 1, -(2**63), 123456789012], np.int64)


def job_of(servers: int, trainers: int = 1, mode: str = "async", **keeping: object) -> JobSpec:
    table = TableSpec(name="t", dim=DIM, seed=3, rule=Sgd(lr=RATE))
    return JobSpec(
        session="s1",
        mode=mode,
        trainers=trainers,
        servers=servers,
        tables=(table,),
        keeping=PersistenceSettings(**keeping),
    )


def hello_again(job: JobSpec, worker: int) -> Callable:
    """Return a worker's first request to a restarted server: does it know the job?"""

    def hello(call: Callable[[WireMessage], WireMessage]) -> None:
        known = call(WireMessage({"op": "hello", "worker": worker, "session": job.session})).head
        if not known["opened"] or known["session"] != job.session:
            raise EchelonError("a server has restarted without its state")

    return hello


def open_job(link: ServerChannel, job: JobSpec, worker: int = 0) -> None:
    link.call(WireMessage({"op": "open", "worker": worker, "job": job.to_json()}))
    link.call(WireMessage({"op": "begin", "worker": worker}))


def pull(link: ServerChannel, ids: np.ndarray, step: int = 0, worker: int = 0) -> np.ndarray:
    head = {"op": "pull", "worker": worker, "step": step, "tables": {"t": len(ids)}, "dense": False, "commit": None}
    return link.call(WireMessage({**head, "peek": True, "state": False}, [ids])).arrays[0].reshape(-1, DIM)


def push(link: ServerChannel, ids: np.ndarray, grads: np.ndarray, seq: int, worker: int = 0) -> dict:
    head = {"op": "push", "worker": worker, "seq": seq, "weight": 1.0, "version": seq, "tables": {"t": len(ids)}}
    head |= {"lrs": {}, "groups": [], "dense": False, "values": False, "commit": True, "kind": "gradient"}
    return link.call(WireMessage({**head, "has": ["ids", "rows"]}, [ids, grads.reshape(-1)])).head


def own(endpoint: str) -> Security:
    """Return what a process of this user shows to a server that was started by hand without a token."""
    return Security().for_loopback([endpoint])


def argv(endpoints: list[str], index: int, state: Path | None = None, trainers: int = 1, join: float = 60) -> list[str]:
    kept = ["--state", str(state)] if state else []
    return [
        *("--pservers", ",".join(endpoints), "--endpoint", endpoints[index]),
        *("--trainers", str(trainers), "--join-timeout", str(join), *kept),
    ]


def test_server_killed_repeatedly_keeps_every_answered_push(tmp_path: Path):
    endpoint, job, state = free_endpoint(), job_of(1), tmp_path / "state"
    command = argv([endpoint], 0, state)
    server = ServerProcess(command, tmp_path / "log")
    link = ServerChannel(endpoint, hello=hello_again(job, 0), timeout=60, name="server 0", security=own(endpoint))
    open_job(link, job)
    expected = pull(link, IDS).copy()
    rng = np.random.default_rng(0)
    for seq in range(12):
        if seq in (3, 7):
            server.kill()
            server = ServerProcess(command, tmp_path / "log")
        grads = rng.standard_normal((len(IDS), DIM)).astype(np.float32)
        assert push(link, IDS, grads, seq)["duplicate"] is False
        expected = expected - np.float32(RATE) * grads
    np.testing.assert_array_equal(pull(link, IDS), expected)
    assert link.reconnects == 2
    assert any(state.rglob("*.seg"))
    link.call(WireMessage({"op": "leave", "worker": 0}))
    link.close()
    assert server.wait() == 0
    assert server.lines() == [f"echelon: server 0 of 1 is ready at {endpoint}"] * 3
    assert not any(path.is_file() for path in state.rglob("*"))  # the job is done: no worker comes back for it


def test_mirrored_servers_lost_disk_is_read_back_from_neighbour(tmp_path: Path):
    """Two servers mirror each other, and the state of a lost disk is read back from the neighbour."""
    endpoints = [free_endpoint(), free_endpoint()]
    job, states = job_of(2, replica=True), [tmp_path / "a", tmp_path / "b"]
    start = [
        lambda at=at: ServerProcess(
            argv(endpoints, at, states[at]), tmp_path / f"log{at}", ECHELON_PS_TOKEN="a secret of servers"
        )
        for at in range(2)
    ]
    servers = [begin() for begin in start]
    safe = Security(token="a secret of servers")
    links = [ServerChannel(e, hello=hello_again(job, 0), security=safe, timeout=60) for e in endpoints]
    for link in links:
        open_job(link, job)
    from echelon.parameter_server.protocol.hashing import bucket_of, owner_of

    owners = np.array([owner_of(int(bucket), BUCKETS, 2) for bucket in bucket_of(IDS, BUCKETS)])
    shares = [IDS[owners == at] for at in range(2)]
    expected = [pull(link, ids).copy() for link, ids in zip(links, shares, strict=True)]
    rng = np.random.default_rng(1)
    for seq in range(6):
        if seq == 4:
            servers[1].kill()
            for path in sorted(states[1].rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            servers[1] = start[1]()
        for at, link in enumerate(links):
            grads = rng.standard_normal((len(shares[at]), DIM)).astype(np.float32)
            assert push(link, shares[at], grads, seq)["duplicate"] is False
            expected[at] = expected[at] - np.float32(RATE) * grads
    for at, link in enumerate(links):
        np.testing.assert_array_equal(pull(link, shares[at]), expected[at])
        link.call(WireMessage({"op": "leave", "worker": 0}))
    for link in links:
        link.close()
    assert [server.wait() for server in servers] == [0, 0]


def test_server_by_hand_asks_for_the_token_of_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Any user of the host reaches a loopback port, and a server writes files as its owner."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    endpoint = free_endpoint()
    server = ServerProcess(argv([endpoint], 0), tmp_path / "log", XDG_STATE_HOME=str(tmp_path))
    ours = ServerChannel(endpoint, security=own(endpoint), timeout=30)
    open_job(ours, job_of(1))
    file = tmp_path / "echelon" / "server-token"
    assert (file.stat().st_mode & 0o777, len(file.read_text())) == (0o600, 64)
    for token in (None, "the token of another user"):
        theirs = ServerChannel(endpoint, security=Security(token=token), timeout=30)
        with pytest.raises(EchelonError, match="does not take this process's token"):
            theirs.call(WireMessage({"op": "export", "worker": -1, "table": "t", "path": str(tmp_path / "x")}))
        theirs.close()
    file.chmod(0o644)
    with pytest.raises(UsageError, match="can be read or written by other users; remove it"):
        own(endpoint)
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    with pytest.raises(UsageError, match=r"none can be kept in .* set ECHELON_PS_TOKEN"):
        own(endpoint)
    assert Security().for_loopback(["10.0.0.1:1", endpoint]).token is None
    ours.call(WireMessage({"op": "leave", "worker": 0}))
    ours.close()
    assert server.wait() == 0


def test_workers_that_never_come_are_named(tmp_path: Path):
    endpoint = free_endpoint()
    alone = ServerProcess(argv([endpoint], 0, trainers=3, join=0.3), tmp_path / "alone")
    assert alone.wait() == 1
    line = "echelon: server 0 has waited 0.3 s and no worker has opened a job; start the 3 workers"
    assert alone.lines()[1:] == [line]

    some = ServerProcess(argv([endpoint], 0, trainers=3, join=3), tmp_path / "some")
    link = ServerChannel(endpoint, security=own(endpoint))
    open_job(link, job_of(1, trainers=3), worker=1)
    assert some.wait() == 1
    link.close()
    line = "echelon: server 0 has waited 3 s for workers 0, 2; start them, or fewer with trainers="
    assert some.lines()[1:] == [line]


def test_idle_server_is_kept_by_heartbeats_and_ended_by_silence(tmp_path: Path):
    endpoint = free_endpoint()
    table = TableSpec(name="t", dim=DIM, rule=Sgd())
    job = JobSpec(session="s", mode="async", trainers=1, servers=1, tables=(table,), patience=0.2)
    server = ServerProcess(argv([endpoint], 0, join=2.0), tmp_path / "log")
    link = ServerChannel(endpoint, security=own(endpoint))
    open_job(link, job)
    beats = HeartbeatSender([endpoint], 0, own(endpoint), every=0.1)
    time.sleep(2.5)  # longer than the silence that ends it
    assert pull(link, IDS).shape == (len(IDS), DIM)
    beats.close()
    link.close()
    assert server.wait() == 1
    assert "has heard nothing of worker 0 for 2 s" in server.lines()[-1]


def test_a_server_that_is_told_to_end_keeps_its_state(tmp_path: Path):
    endpoint, state, job = free_endpoint(), tmp_path / "state", job_of(1)
    server = ServerProcess(argv([endpoint], 0, state), tmp_path / "log")
    link = ServerChannel(endpoint, hello=hello_again(job, 0), timeout=30, security=own(endpoint))
    open_job(link, job)
    grads = np.ones((len(IDS), DIM), np.float32)
    first = pull(link, IDS).copy()
    push(link, IDS, grads, 0)
    assert server.terminate() == 128 + 15
    server = ServerProcess(argv([endpoint], 0, state), tmp_path / "log")
    np.testing.assert_array_equal(pull(link, IDS), first - np.float32(RATE))
    link.close()
    server.kill()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            ["--pservers", "0.0.0.0:7", "--endpoint", "0.0.0.0:7"],
            "can be reached from other hosts without authentication; set ECHELON_PS_TOKEN",
        ),
        (["--pservers", "127.0.0.1:7", "--endpoint", "127.0.0.1:8"], "not among the servers"),
        (["--pservers", "127.0.0.1"], "HOST:PORT"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(given: list[str], line: str, capsys: pytest.CaptureFixture[str]):
    from echelon.parameter_server.server.process import main

    assert main([*given, "--trainers", "1"]) == 2
    printed = capsys.readouterr().err
    assert line in printed
    assert printed.startswith("echelon: ")
    assert printed.count("\n") == 1


def test_a_port_that_is_taken_is_one_line():
    first = ServerPort("127.0.0.1:0", lambda frame, gone: WireMessage({}))
    line = (
        r"^endpoint 127.0.0.1:\d+: the port is in use by another program; choose a free one, the same in every list of"
    )
    with pytest.raises(UsageError, match=line):
        ServerPort(first.endpoint, lambda frame, gone: WireMessage({}))
    for endpoint, line in (
        ("192.0.2.1:7", "no interface of this host has"),
        ("no-such-host.invalid:7", "; use a free"),
    ):
        with pytest.raises(UsageError, match=f"^endpoint {endpoint}: .*{line}"):
            ServerPort(endpoint, lambda frame, gone: WireMessage({}), Security(token="a secret of servers"))
    assert first.close()


def test_restarted_server_waits_for_its_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from echelon.distributed.ps_role import find_role
    from echelon.parameter_server.server.process import ParameterServerProcess

    holder = socket.create_server(("127.0.0.1", 0))
    endpoint = f"127.0.0.1:{holder.getsockname()[1]}"
    role = find_role(role="server", pservers=endpoint, current_endpoint=endpoint, trainers=1)
    with pytest.raises(UsageError, match="in use by another program"):
        ParameterServerProcess(role, None, OPEN)
    monkeypatch.setenv("ECHELON_RESTARTS", "1")
    threading.Timer(0.5, holder.close).start()
    process = ParameterServerProcess(role, None, OPEN)
    link = ServerChannel(endpoint)
    assert "ok" in link.call(WireMessage({"op": "beat", "worker": 0})).head
    link.close()
    process.stop(15)
    assert process.hold() == 143


def test_first_caller_meets_a_whole_server(monkeypatch: pytest.MonkeyPatch):
    """A worker that waits for a restarted server calls in the moment in which its port opens."""
    from echelon.distributed.ps_role import find_role
    from echelon.parameter_server.server import process

    answers: list[WireMessage] = []

    def opened(endpoint: str, handler: Callable[..., WireMessage], *given: Any, **options: Any) -> ServerPort:
        port = ServerPort(endpoint, handler, *given, **options)
        link = ServerChannel(endpoint)
        answers.append(link.call(WireMessage({"op": "beat", "worker": 0})))
        link.close()
        return port

    endpoint = free_endpoint()
    role = find_role(role="server", pservers=endpoint, current_endpoint=endpoint, trainers=1)
    monkeypatch.setattr(process, "ServerPort", opened)
    server = process.ParameterServerProcess(role, None, OPEN)
    assert [answer.head["ok"] for answer in answers] == [True]
    server.stop(15)
    assert server.hold() == 143


def test_servers_ask_each_other_and_do_without_one_that_is_gone():
    server = ServerPort("127.0.0.1:0", lambda frame, gone: WireMessage({"ok": True, "twice": 2 * frame.head["n"]}))
    peers = ServerPeers([server.endpoint, free_endpoint()], OPEN, patience=0.3)
    assert [peers.ask(0, WireMessage({"op": "x", "n": n})).head["twice"] for n in range(3)] == [0, 2, 4]
    for _ in range(2):  # lost once is not lost for ever
        with pytest.raises(PeerLost, match=r"^server 1 at .* has not answered for 0.3 s"):
            peers.ask(1, WireMessage({"op": "x", "n": 1}))
    assert peers.ask(0, WireMessage({"op": "x", "n": 9})).head["twice"] == 18
    peers.close()
    assert server.close()


def test_a_server_writes_down_what_it_holds_and_moves(tmp_path: Path):
    endpoint, job = free_endpoint(), job_of(1, trainers=2)
    server = ServerProcess(argv([endpoint], 0, trainers=2), tmp_path / "log", ECHELON_LOG_DIR=str(tmp_path))
    link = ServerChannel(endpoint, hello=hello_again(job, 0), timeout=60, name="server 0", security=own(endpoint))
    open_job(link, job)
    link.call(WireMessage({"op": "hello", "worker": 1, "session": job.session}))
    grads = np.ones((len(IDS), DIM), np.float32)
    for worker in (0, 1):
        pull(link, IDS, worker=worker)
        push(link, IDS, grads, 0, worker)  # made from version 0, so the second one is a version late
    for worker in (0, 1):
        link.call(WireMessage({"op": "leave", "worker": worker}))
    link.close()
    assert server.wait() == 0
    last = read(tmp_path).servers[0][-1]
    assert (last.rows, last.pulls, last.pushes) == ({"t": len(IDS)}, 2, 2)
    assert (last.staleness_mean, last.staleness_max) == (0.5, 1)
    assert last.bytes_in >= 2 * (IDS.nbytes + IDS.nbytes + grads.nbytes)  # two pulls, two pushes
    assert last.bytes_out >= 2 * grads.nbytes
    assert last.memory > 1e6
