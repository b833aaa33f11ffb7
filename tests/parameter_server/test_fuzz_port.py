"""A server's port under garbage, lies, floods and strangers. After each, a legitimate worker gets the right numbers."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from counting_server import Counting, free_endpoint, rows_of
from harness import LIMIT
from serving_process import ServerProcess
from test_net_serve import DIM, IDS, argv, job_of, open_job, pull, push

from echelon.base.errors import EchelonError
from echelon.base.job_secret import GREETING, callers_proof
from echelon.base.security import Security
from echelon.parameter_server.protocol.byte_stream import ByteStream
from echelon.parameter_server.protocol.channel import ServerChannel
from echelon.parameter_server.protocol.message import MAX_ARRAYS, MAX_BYTES, MAX_HEAD, WireMessage
from echelon.parameter_server.protocol.message_wire import PackedMessage, receive
from echelon.parameter_server.server.server_port import ServerPort

TOKEN = "the right one, of a job"
SAFE = Security(token=TOKEN)
ALLOWED = 96 << 20  #: bytes that a server may grow by while it is abused
SIZES = struct.Struct(f"<II{MAX_ARRAYS}Q")


class Target:
    """A real server with a token, and a worker that knows what it must answer."""

    def __init__(self, directory: Path, **env: str) -> None:
        self.endpoint = free_endpoint()
        command = argv([self.endpoint], 0, directory / "state")
        self.process = ServerProcess(command, directory / "log", ECHELON_PS_TOKEN=TOKEN, **env)
        link = self.link()
        open_job(link, job_of(1))
        first = pull(link, IDS).copy()
        push(link, IDS, np.ones((len(IDS), DIM), np.float32), 0)
        self.expected = first - np.float32(0.5)
        link.close()
        self.memory = self.process.rss()

    def link(self) -> ServerChannel:
        return ServerChannel(self.endpoint, security=SAFE, timeout=30)

    def check(self) -> None:
        """It serves, with the numbers it had, in the memory it had."""
        link = self.link()
        np.testing.assert_array_equal(pull(link, IDS), self.expected)
        stats = link.call(WireMessage({"op": "stats", "worker": -1})).head
        link.close()
        assert stats["seqs"] == {"0": 0}
        assert stats["rows"] == {"t": len(IDS)}
        assert self.process.rss() - self.memory < ALLOWED


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    target = Target(tmp_path_factory.mktemp("fuzz"))
    yield target
    target.process.kill()


def connect(target: Target) -> socket.socket:
    host, port = target.endpoint.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=60)


def hurl(target: Target, data: bytes) -> None:
    """Send bytes and hang up; the server may hang up first."""
    with connect(target) as stranger, contextlib.suppress(OSError):
        stranger.sendall(data)


def drain(caller: socket.socket, seconds: float = 60.0) -> bytes:
    """Read until the server hangs up."""
    caller.settimeout(seconds)
    heard = b""
    with contextlib.suppress(OSError):
        while piece := caller.recv(65536):
            heard += piece
    return heard


def member(target: Target) -> ByteStream:
    """A connection that has proven the token."""
    stream = ByteStream(connect(target))
    stream.limit(60)
    stream.converse(callers_proof(TOKEN.encode()))
    assert receive(stream).unpacked().head == {"ok": True}
    return stream


def good_message() -> bytes:
    head = {"op": "pull", "worker": 0, "step": 0, "tables": {"t": 3}, "dense": False, "commit": None, "peek": True}
    return b"".join(bytes(part) for part in PackedMessage.of(WireMessage({**head, "state": False}, [IDS[:3]])).buffers)


def test_random_bytes(target: Target):
    rng = np.random.default_rng(0)
    for size in rng.integers(1, 20_000, 60):
        hurl(target, rng.bytes(int(size)))
        hurl(target, GREETING + rng.bytes(int(size)))
    for cut in range(len(GREETING)):
        hurl(target, GREETING[:cut])
    target.check()


def test_messages_spoken_by_hand_are_answered(target: Target):
    """Otherwise the tests with changed ones would test nothing."""
    stream = member(target)
    stream.send([good_message()])
    answer = receive(stream).unpacked()
    stream.close()
    np.testing.assert_array_equal(answer.arrays[0].reshape(-1, DIM), target.expected[:3])


def test_messages_with_flipped_bits(target: Target):
    rng = np.random.default_rng(3)
    good = good_message()
    for _ in range(250):
        changed = bytearray(good)
        for at in rng.integers(0, len(changed), int(rng.integers(1, 6))):
            changed[at] = int(rng.integers(0, 256))
        stream = member(target)
        with contextlib.suppress(OSError):
            stream.send([changed])
            stream._socket.shutdown(socket.SHUT_WR)
        drain(stream._socket, 2.0)
        stream.close()
    target.check()


def test_messages_that_are_shorter_than_they_say(target: Target):
    good = good_message()
    for cut in range(1, len(good), 7):
        stream = member(target)
        stream.send([good[:cut]])
        stream.close()
    for sizes in ((MAX_HEAD, 0), (100, MAX_ARRAYS, *[MAX_BYTES // MAX_ARRAYS] * MAX_ARRAYS)):
        stream = member(target)
        stream.send([SIZES.pack(*sizes, *[0] * (MAX_ARRAYS + 2 - len(sizes)))])
        stream.close()
    target.check()


def test_sizes_beyond_the_limits_take_no_memory(target: Target):
    for sizes in (
        (MAX_HEAD + 1, 0),
        (2, MAX_ARRAYS + 1),
        (2, 1, MAX_BYTES + 1),
        (2, 8, *[2**62] * 8),
        (2**32 - 1,) * 2,
    ):
        stream = member(target)
        stream.send([SIZES.pack(*sizes, *[0] * (MAX_ARRAYS + 2 - len(sizes)))])
        assert "is over the limits" in receive(stream).unpacked().head["error"]
        assert drain(stream._socket) == b""
        stream.close()
    target.check()


HEADS = [
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{",
    b"\xff\xfe",
    b"{}",
    b'{"op":"stats"}',
    b'{"op":"stats","arrays":7}',
    b'{"op":"stats","arrays":[[]]}',
    b'{"op":"stats","arrays":[["float32",[1099511627776]]]}',
    b'{"op":"stats","arrays":[["float32",[4611686018427387904,4]]]}',
    b'{"op":"stats","arrays":[["float32",[-1]]]}',
    b'{"op":"stats","arrays":[["float32",[1e400]]]}',
    b'{"op":"stats","arrays":[["float32",[true]]]}',
    b'{"op":"stats","arrays":[["object",[1]]]}',
    b'{"op":"stats","arrays":[[["float32"],[1]]]}',
    b'{"op":"stats","arrays":[' + b'["uint8",[0]],' * 100_000 + b'["uint8",[0]]]}',
    b'{"op":"stats","arrays":[["uint8",[' + b"1," * 100_000 + b"1]]]}",
    b'{"op":"stats","arrays":[["int64",[' + b"9" * 5000 + b"]]]}",
    b"[" * 200_000,
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b'{"op":{"deep":[1]},"arrays":[]}',
    b'{"op":"no such","arrays":[]}',
    b'{"op":"open","worker":0,"job":' + b"[" * 500 + b"]" * 500 + b',"arrays":[]}',
    b'{"op":"open","worker":0,"job":{"session":"x","mode":"sync","trainers":1e99,"servers":1},"arrays":[]}',
    b'{"op":"pull","worker":0,"step":0,"tables":{"t":1152921504606846976},"peek":true,"arrays":[["int64",[0]]]}',
    b'{"op":"pull","worker":0,"step":0,"tables":{"t":-1},"peek":true,"arrays":[["int64",[0]]]}',
    b'{"op":"pull","worker":1e30,"step":0,"tables":{"t":0},"peek":true,"arrays":[["int64",[0]]]}',
    b'{"op":"pull","worker":0,"step":0,"tables":7,"peek":true,"arrays":[["int64",[0]]]}',
    b'{"op":"push","worker":0,"seq":1,"tables":{"t":1},"has":["ids"],"arrays":[["int64",[0]]]}',
    b'{"op":"push","worker":99999999,"seq":1,"tables":{},"has":[],"arrays":[]}',
    b'{"op":"begin","worker":0,"arrays":[["uint8",[0]]]}',
    b'{"op":"leave","worker":"0","arrays":[]}',
    b'{"op":"leave","worker":-7,"arrays":[]}',
    b'{"op":"enter","worker":5,"step":-1,"arrays":[]}',
    b'{"op":"blob","worker":[],"arrays":[]}',
    b'{"op":"commit","worker":0,"seq":999999,"arrays":[]}',
    b'{"op":"save","path":7,"step":1,"worker":0,"arrays":[]}',
    b'{"op":"load","path":"/nowhere","worker":0,"arrays":[]}',
    b'{"op":"mirror","server":-1,"file":"x","arrays":[]}',
    b'{"op":"mirror","server":0,"file":"../../escape","offset":0,"arrays":[]}',
    b'{"op":"export","path":"/nowhere","table":"t","format":"pickle","worker":0,"arrays":[]}',
]


def test_invalid_or_false_heads_are_answered_with_one_line(target: Target):
    stream = member(target)
    for head in HEADS:
        stream.send([SIZES.pack(len(head), MAX_ARRAYS, *[0] * MAX_ARRAYS) + head])
        line = receive(stream).unpacked().head.get("error", "")
        assert line, head[:80]
        assert "\n" not in line
        assert "the server failed" not in line, (head[:80], line)
    stream.close()
    target.check()


def test_strangers_with_wrong_tokens_reach_nothing(target: Target):
    rng = np.random.default_rng(4)
    tokens = ["", TOKEN[:-1], TOKEN + " ", TOKEN.upper(), *(rng.bytes(8).hex() for _ in range(40))]
    for token in tokens:
        with connect(target) as stranger, contextlib.suppress(OSError):
            proof, heard = callers_proof(token.encode()), b""
            say, wanted = next(proof)
            for _ in range(2):
                stranger.sendall(say)
                heard = stranger.recv(wanted, socket.MSG_WAITALL)
                say, wanted = proof.send(heard)
            stranger.sendall(say + good_message())  # as if it had been let in
            heard = drain(stranger)
            assert heard == bytes(32), token
    target.check()


def test_stranger_with_much_to_say_takes_no_memory(target: Target):
    """The reproduction of a review: three strangers at once, 256 MiB each."""
    strangers = [connect(target) for _ in range(3)]
    for stranger in strangers:
        with pytest.raises(OSError), stranger:  # noqa: PT011, PT012
            stranger.sendall(GREETING + bytes(32))
            for _ in range(256):
                stranger.sendall(bytes(1 << 20))
    target.check()


def test_slow_and_idle_clients_delay_no_other(target: Target):
    idle = [connect(target) for _ in range(60)]  # say nothing
    halves = [connect(target) for _ in range(60)]
    for at, one in enumerate(halves):
        one.sendall(GREETING[: at % len(GREETING)])
    begun = [member(target) for _ in range(30)]
    for at, one in enumerate(begun):  # a byte of a message, or none
        one.send([good_message()[: at % 7]])
    lazy = [member(target) for _ in range(4)]  # ask for much and take nothing
    ids = np.arange(200_000)
    head = {"op": "pull", "worker": 0, "step": 0, "tables": {"t": len(ids)}, "dense": False, "commit": None}
    for one in lazy:
        one.send(PackedMessage.of(WireMessage({**head, "peek": True, "state": False}, [ids])).buffers)
    target.check()
    for one in [*idle, *halves, *begun, *lazy]:
        one.close()
    target.check()


def test_strangers_do_not_use_up_descriptors(tmp_path: Path):
    """Silent strangers, more than the server has descriptors: a worker gets in, and a snapshot can be written."""
    target = Target(tmp_path, DESCRIPTORS="128")
    crowd = [connect(target) for _ in range(160)]
    link = target.link()
    np.testing.assert_array_equal(pull(link, IDS), target.expected)
    link.call(WireMessage({"op": "save", "worker": -1, "path": str(tmp_path / "saved"), "step": 1}))
    link.close()
    for stranger in crowd:
        stranger.close()
    target.process.kill()


def test_full_server_says_so_and_takes_next_when_one_has_left():
    server = ServerPort("127.0.0.1:0", Counting().handle, max_streams=3)
    links = [ServerChannel(server.endpoint) for _ in range(3)]
    for link in links:
        link.call(WireMessage({"op": "pull", "worker": 0}, [IDS]))
    fourth = ServerChannel(server.endpoint, timeout=30)
    waiting = fourth.send(WireMessage({"op": "pull", "worker": 0}, [IDS]))
    impatient = ServerChannel(server.endpoint, timeout=0.2, name="server 0")
    with pytest.raises(EchelonError, match=r"server 0 .* 3 streams open already"):
        impatient.call(WireMessage({"op": "pull", "worker": 0}, [IDS]))
    links.pop().close()
    np.testing.assert_array_equal(waiting.result().arrays[0], rows_of(IDS))
    for link in [*links, fourth, impatient]:
        link.close()
    deadline = time.monotonic() + LIMIT
    while server.streams and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.streams == 0
    assert server.close()
