"""Links to real servers: what is asked is answered in order, through breaks, deaths and silences."""

from __future__ import annotations

import gc
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from counting_server import Counting, Process, free_endpoint, rows_of, serving
from harness import LIMIT

import echelon
from echelon.base.errors import EchelonError, PeerLost
from echelon.parameter_server.protocol.channel import HeartbeatSender, ServerChannel
from echelon.parameter_server.protocol.message import KINDS, WireMessage, WireMessageError
from echelon.parameter_server.server.server_port import ServerPort


def push(seq: int, size: int = 100) -> WireMessage:
    return WireMessage({"op": "push", "worker": 0, "seq": seq}, [np.full(size, seq, np.int64)])


def test_arrays_of_every_kind_and_shape_come_back_as_they_went():
    rng = np.random.default_rng(0)
    kinds = [rng.integers(0, 250, (3, 5)).astype(dtype) for dtype in KINDS.values()]
    shapes = [np.empty((0, 16), np.float32), np.float32([[1, 2], [3, 4]]).T]
    head = {"op": "echo", "worker": 7, "text": "é\n", "deep": {"a": [1, None, 0.1]}}
    with serving() as server:
        link = ServerChannel(server.endpoint)
        answers = [link.call(WireMessage(head, arrays)) for arrays in (kinds, shapes)]
        link.close()
    assert [answer.head for answer in answers] == [head, head]
    for got, sent in zip([array for answer in answers for array in answer.arrays], kinds + shapes, strict=True):
        assert got.dtype == sent.dtype
        assert got.flags.aligned
        np.testing.assert_array_equal(got, sent)


def test_concurrent_requests_are_answered_in_order_to_each_asker():
    rng = np.random.default_rng(1)
    with serving() as server:
        link = ServerChannel(server.endpoint, in_flight=8)
        sent = [rng.integers(-(2**63), 2**63 - 1, int(size)) for size in rng.integers(0, 9000, 200)]
        done: list[int] = []
        futures: list[Future[WireMessage]] = []
        for at, ids in enumerate(sent):
            futures.append(link.send(WireMessage({"op": "pull", "worker": 0}, [ids])))
            futures[-1].add_done_callback(lambda _, at=at: done.append(at))
            assert link.waits_for() <= 8
        for ids, future in zip(sent, futures, strict=True):
            np.testing.assert_array_equal(future.result().arrays[0], rows_of(ids))
        assert done == list(range(200))
        link.close()


def test_several_threads_share_a_link():
    wrong = []

    def ask(link: ServerChannel, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(50):
            ids = rng.integers(0, 2**40, int(rng.integers(1, 500)))
            if not np.array_equal(link.call(WireMessage({"op": "pull", "worker": 0}, [ids])).arrays[0], rows_of(ids)):
                wrong.append(seed)

    with serving() as server:
        link = ServerChannel(server.endpoint)
        threads = [threading.Thread(target=ask, args=(link, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        link.close()
    assert not wrong


def test_server_error_is_raised_by_its_asker_only_link_goes_on():
    with serving() as server:
        link = ServerChannel(server.endpoint)
        before = link.send(push(0))
        failed = link.send(WireMessage({"op": "fail", "worker": 0}))
        after = link.send(push(1))
        assert before.result().head["total"] == 0
        assert after.result().head["total"] == 100
        with pytest.raises(EchelonError, match=r"^the server failed with ZeroDivisionError: a mistake of ours$"):
            failed.result()
        assert link.reconnects == 0
        link.close()


def test_a_frame_over_the_limits_is_refused_where_it_was_made():
    link = ServerChannel("127.0.0.1:1")
    with pytest.raises(WireMessageError, match="9 arrays"):
        link.send(WireMessage({"op": "echo"}, [np.zeros(1, np.float32)] * 9))
    link.close()


def test_a_killed_server_comes_back_and_every_push_counts_once(tmp_path: Path):
    endpoint, file = free_endpoint(), tmp_path / "sum.json"
    server = Process(endpoint, file)
    hellos: list[int] = []

    def hello(call) -> None:
        hellos.append(call(WireMessage({"op": "hello", "worker": 0})).head["seq"])

    link = ServerChannel(endpoint, hello=hello, timeout=60)
    futures: list[Future[WireMessage]] = []
    answered: list[Future[WireMessage]] = []

    def kill_sometimes() -> None:
        nonlocal server
        for kills in range(3):
            goal = len(answered) + 30
            while len(answered) < goal or len(hellos) < kills:
                time.sleep(0.001)
            server.kill()
            server = Process(endpoint, file)

    thread = threading.Thread(target=kill_sometimes)
    thread.start()
    seq = 0
    while thread.is_alive() or seq < 300:
        futures.append(link.send(push(seq, size=20_000)))
        futures[-1].add_done_callback(answered.append)
        seq += 1
    answers = [future.result().head for future in futures]
    state = link.call(WireMessage({"op": "state", "worker": 0})).head
    link.close()
    server.kill()
    assert state["order"] == list(range(seq))
    assert state["total"] == 20_000 * sum(range(seq))
    assert link.reconnects >= len(hellos) >= 3
    assert hellos == sorted(hellos)
    # an answer that was lost on the way is given once more, with the same sum or (a repeated push) a later one
    totals = [answer["total"] for answer in answers]
    assert totals == sorted(totals)
    assert all(total == 20_000 * sum(range(at + 1)) or answers[at]["duplicate"] for at, total in enumerate(totals))


def test_a_server_that_stays_away_is_named_to_everyone_who_waits():
    server = Process()
    link = ServerChannel(server.endpoint, timeout=0.6, name="server 1")
    link.call(push(0))
    server.kill()
    waiting = [link.send(push(seq)) for seq in range(1, 4)]
    for future in waiting:
        with pytest.raises(PeerLost, match=rf"^server 1 at {server.endpoint} has not answered for 0.6 s \(.*\); start"):
            future.result()
    with pytest.raises(PeerLost, match="server 1"):
        link.send(push(4))
    link.close()


def test_a_server_that_is_not_there_yet_is_waited_for(tmp_path: Path):
    endpoint = free_endpoint()
    link = ServerChannel(endpoint, timeout=30)
    futures = [link.send(push(seq)) for seq in range(3)]
    with serving(endpoint=endpoint, file=tmp_path / "sum.json"):
        assert [future.result().head["total"] for future in futures] == [0, 100, 300]
        assert link.reconnects == 0
        link.close()


def test_a_full_link_to_a_lost_server_lets_its_senders_go():
    link = ServerChannel(free_endpoint(), timeout=0.3, in_flight=2)
    sending = [link.send(push(seq)) for seq in range(2)]
    with pytest.raises(PeerLost):
        link.send(push(2))
    assert all(isinstance(future.exception(), PeerLost) for future in sending)
    link.close()


def test_closing_fails_what_waits_and_leaves_no_thread(tmp_path: Path):
    threads = set(threading.enumerate())
    with serving() as server:
        link = ServerChannel(server.endpoint)
        seen = tmp_path / "seen"
        waiting = link.send(WireMessage({"op": "wait", "until": str(tmp_path / "never"), "seen": str(seen)}))
        behind = link.send(push(0))
        while not seen.exists() or seen.read_text() != "waits":
            time.sleep(0.01)
        link.close()
        for future in (waiting, behind):
            with pytest.raises(EchelonError, match=r"^the link to the server at .* is closed$"):
                future.result(timeout=0)
        with pytest.raises(EchelonError, match="closed"):
            link.send(push(1))
        link.close()
        other = ServerChannel(free_endpoint())  # no server there: the thread is between two attempts, or in one
        other.send(push(0))
        other.close()
        assert not set(threading.enumerate()) - threads
        while seen.read_text() != "True":  # the server's side of it learns that no caller waits any more
            time.sleep(0.01)


def test_a_link_that_was_never_used_costs_nothing():
    threads = set(threading.enumerate())
    links = [ServerChannel(free_endpoint()) for _ in range(10)]
    assert not set(threading.enumerate()) - threads
    for link in links:
        link.close()


def test_frozen_server_is_given_up_and_reconnected_when_it_thaws():
    with serving() as server:
        link = ServerChannel(server.endpoint, timeout=60)
        beats = HeartbeatSender([server.endpoint], 3, every=0.1, links=[link])
        link.call(push(0))
        server.freeze()
        waiting = link.send(push(1))
        while link._away_since is None:  # the link has noticed: what waits will not be answered on this connection
            time.sleep(0.01)
        server.thaw()
        assert waiting.result().head["total"] == 100
        assert link.reconnects >= 1
        beats.close()
        link.close()


def test_connection_to_itself_counts_as_none(monkeypatch: pytest.MonkeyPatch):
    """A port without a listener, dealt out by the kernel as the caller's own: the connection leads to its own end."""

    def connect(place: tuple[str, int], timeout: float) -> socket.socket:
        itself = socket.socket()
        itself.settimeout(timeout)
        itself.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        itself.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its port is free at once
        itself.bind(place)
        itself.connect(place)
        return itself

    monkeypatch.setattr(socket, "create_connection", connect)
    link = ServerChannel(free_endpoint(), timeout=0.3)
    with pytest.raises(PeerLost, match=r"has not answered for 0.3 s \(nothing listens there\)"):
        link.call(WireMessage({"op": "hello", "worker": 0}))
    link.close()


def test_beats_reach_every_server_and_stop(tmp_path: Path):
    heard: dict[int, list[dict]] = {0: [], 1: []}
    servers = []
    for at in heard:
        server = ServerPort(
            "127.0.0.1:0", lambda frame, _, at=at: (heard[at].append(frame.head), WireMessage({"ok": True}))[1]
        )
        servers.append(server)
    threads = set(threading.enumerate())
    beats = HeartbeatSender([servers[0].endpoint, free_endpoint(), servers[1].endpoint], 5, every=0.05)
    while min(len(heads) for heads in heard.values()) < 3:
        time.sleep(0.01)
    beats.close()
    counts = [len(heads) for heads in heard.values()]
    assert all(head == {"op": "beat", "worker": 5} for heads in heard.values() for head in heads)
    assert all(server.close() for server in servers)
    assert [len(heads) for heads in heard.values()] == counts
    assert not set(threading.enumerate()) - threads


def test_a_client_that_does_not_take_its_answers_delays_no_other():
    from echelon.base.security import OPEN
    from echelon.parameter_server.protocol.connection import ServerConnection
    from echelon.parameter_server.protocol.message_wire import PackedMessage

    server = ServerPort("127.0.0.1:0", Counting().handle)
    lazy = ServerConnection(server.endpoint, OPEN)
    lazy.open(10.0)
    ids = np.arange(100_000)
    for _ in range(2):  # 6.4 MB each, never read
        lazy.write(PackedMessage.of(WireMessage({"op": "pull", "worker": 1}, [ids])))
    link = ServerChannel(server.endpoint)
    for _ in range(20):
        np.testing.assert_array_equal(
            link.call(WireMessage({"op": "pull", "worker": 0}, [ids[:50]])).arrays[0], rows_of(ids[:50])
        )
    assert server.streams == 2
    lazy.close()
    link.close()
    gc.collect()
    assert server.close(patience=10)


def _leave_it_open(endpoint: str, seen: str) -> None:
    """Ends while a call waits, having made a child that ends too."""
    link = ServerChannel(endpoint)
    HeartbeatSender([endpoint], 0, every=0.05, links=[link])
    link.call(push(0))
    child = os.fork()
    if child == 0:
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    link.send(WireMessage({"op": "wait", "until": "/nowhere", "seen": seen}))
    while not Path(seen).exists():
        time.sleep(0.01)
    sys.exit(7)


def test_process_with_open_link_and_its_child_end_as_they_want(tmp_path: Path):
    program = f"""
import sys, types
sys.path[:0] = {sys.path!r}
sys.modules["echelon"] = types.ModuleType("echelon")  # the package without its parts that import torch: 4 s
sys.modules["echelon"].__path__ = {list(echelon.__path__)!r}
import test_net_link
test_net_link._leave_it_open({{endpoint!r}}, {str(tmp_path / "seen")!r})
"""
    with serving() as server:
        command = [sys.executable, "-c", program.format(endpoint=server.endpoint)]
        ended = subprocess.run(command, timeout=LIMIT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (7, "")
