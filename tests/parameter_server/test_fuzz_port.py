"""A server's port under garbage, lies, floods and strangers. After each, a legitimate worker gets the right numbers."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from counting_server import Counting, free_endpoint, rows_of
from harness import LIMIT
from pyarrow import flight
from raw_grpc import ACTION, DATA, EXCHANGE, PREFACE, Caller, arrow_parts, flight_data, frame, message
from serving_process import ServerProcess
from test_net_serve import DIM, IDS, argv, job_of, open_job, pull, push

from echelon.base.errors import EchelonError
from echelon.base.security import Security
from echelon.parameter_server.protocol.arrow_wire import SCHEMA, to_batch
from echelon.parameter_server.protocol.channel import ServerChannel
from echelon.parameter_server.protocol.connection import FlightConnection
from echelon.parameter_server.protocol.message import MAX_ARRAYS, WireMessage
from echelon.parameter_server.server.flight_server import FlightServer

TOKEN = "the right one"
SAFE = Security(token=TOKEN)
ALLOWED = 96 << 20  #: bytes that a server may grow by while it is abused
BLOB = pa.large_binary()


class Target:
    """A real server with a token, and a worker that knows what it must answer."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = free_endpoint()
        self.process = ServerProcess(argv([self.endpoint], 0), directory / "log", ECHELON_PS_TOKEN=TOKEN)
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


def refused(do: Callable[[], object]) -> str:
    """Return Flight's error for a forbidden call."""
    with pytest.raises((flight.FlightError, pa.ArrowException)) as caught:
        do()
    return str(caught.value)


def test_random_bytes(target: Target):
    rng = np.random.default_rng(0)
    for size in rng.integers(1, 20_000, 60):
        hurl(target, rng.bytes(int(size)))
    target.check()


def test_half_a_preface_and_random_frames_after_a_whole_one(target: Target):
    rng = np.random.default_rng(1)
    for cut in range(len(PREFACE)):
        hurl(target, PREFACE[:cut])
    for _ in range(60):
        kind, flags, stream = int(rng.integers(0, 12)), int(rng.integers(0, 256)), int(rng.integers(0, 4))
        body = rng.bytes(int(rng.integers(0, 200)))
        hurl(target, PREFACE + frame(4, 0, 0, b"") + frame(kind, flags, stream, body, int(rng.integers(0, 2**24))))
    target.check()


def test_calls_with_garbage_for_messages(target: Target):
    rng = np.random.default_rng(2)
    for _ in range(60):
        for path in (EXCHANGE, ACTION):
            caller = Caller(target.endpoint, path, TOKEN)
            with contextlib.suppress(OSError):
                caller.send([message(rng.bytes(int(rng.integers(0, 3000)))) for _ in range(2)])
            caller.close()
    target.check()


def good_messages() -> list[bytes]:
    head = {"op": "pull", "worker": 0, "step": 0, "tables": {"t": 3}, "dense": False, "commit": None, "peek": True}
    schema, _ = arrow_parts(SCHEMA.serialize())
    meta, body = arrow_parts(to_batch(WireMessage({**head, "state": False}, [IDS[:3]])).serialize())
    return [flight_data(schema, path=b"frames"), flight_data(meta, body)]


def test_our_own_messages_spoken_by_hand_are_answered(target: Target):
    """Otherwise the tests with changed ones would test nothing."""
    caller = Caller(target.endpoint, token=TOKEN)
    caller.send([message(one) for one in good_messages()])
    heard = caller.drain()
    caller.close()
    assert target.expected[:3].tobytes() in heard


def test_messages_with_flipped_bits(target: Target):
    rng = np.random.default_rng(3)
    good = good_messages()
    for _ in range(250):
        which = int(rng.integers(0, 2))
        changed = bytearray(good[which])
        for at in rng.integers(0, len(changed), int(rng.integers(1, 6))):
            changed[at] = int(rng.integers(0, 256))
        caller = Caller(target.endpoint, token=TOKEN)
        with contextlib.suppress(OSError):
            caller.send([message(bytes(changed) if at == which else one) for at, one in enumerate(good)])
        caller.drain(2.0)
        caller.close()
    target.check()


def test_messages_that_are_shorter_than_they_say(target: Target):
    good = good_messages()
    for claimed in (2**20, 2**31 - 1, 2**32 - 1):
        caller = Caller(target.endpoint, token=TOKEN)
        caller.send([message(good[0]), message(good[1][:100], claimed)], end=False)
        caller.close()
    for cut in range(1, len(good[1]), 29):
        caller = Caller(target.endpoint, token=TOKEN)
        with contextlib.suppress(OSError):
            caller.send([message(good[0]), message(good[1][:cut])])
        caller.drain(2.0)
        caller.close()
    target.check()


def exchange(target: Target, schema: pa.Schema, batches: list[pa.RecordBatch], path: bytes = b"frames") -> list[dict]:
    """The heads of the answers to batches of any schema."""
    client = flight.FlightClient(f"grpc+tcp://{target.endpoint}")
    options = flight.FlightCallOptions(headers=SAFE.headers(), timeout=LIMIT)
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(path), options)
    try:
        writer.begin(schema)
        heads = []
        for batch in batches:
            writer.write_batch(batch)
            heads.append(json.loads(reader.read_chunk().data.column(0)[0].as_py()))
        if not batches:
            writer.done_writing()
            reader.read_chunk()
        return heads
    finally:
        with contextlib.suppress(Exception):
            writer.close()
        client.close()


def test_streams_of_other_schemas_and_other_names(target: Target):
    one = pa.array([b"x"], BLOB)
    schemas = [
        pa.schema([]),
        pa.schema([("head", pa.int64())]),
        pa.schema([("head", BLOB)] * (MAX_ARRAYS + 2)),
        pa.schema([(field.name, pa.binary()) for field in SCHEMA]),
        pa.schema([("head", pa.dictionary(pa.int32(), BLOB)), *list(SCHEMA)[1:]]),
        pa.schema([("head", pa.list_(BLOB)), *list(SCHEMA)[1:]]),
    ]
    for schema in schemas:
        assert "schema" in refused(lambda schema=schema: exchange(target, schema, []))
    assert "no stream" in refused(lambda: exchange(target, SCHEMA, [], path=b"other"))
    batch = pa.RecordBatch.from_arrays([one] * (MAX_ARRAYS + 1), schema=SCHEMA)
    assert "cannot be read" in exchange(target, SCHEMA, [batch])[0]["error"]
    target.check()


def test_batches_of_no_row_many_rows_and_no_value(target: Target):
    def batch(*cells: bytes | None) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([pa.array(cells, BLOB)] * (MAX_ARRAYS + 1), schema=SCHEMA)

    heads = exchange(target, SCHEMA, [batch(), batch(b"{}", b"{}"), batch(None), batch(*[b"{}"] * 10_000)])
    rows = ["0 rows", "2 rows", "not plain bytes", "10000 rows"]
    assert all(text in head["error"] for text, head in zip(rows, heads, strict=True))
    target.check()


def column(body: bytes, first: int, last: int) -> pa.Array:
    """A cell that claims to lie between two offsets."""
    offsets = pa.py_buffer(np.array([first, last], np.int64).tobytes())
    return pa.Array.from_buffers(BLOB, 1, [None, offsets, pa.py_buffer(body)])


def by_hand(target: Target, cells: list[bytes]) -> bytes:
    """Send one batch of these cells, without asking Arrow whether it makes sense."""
    columns = [column(cell, 0, len(cell)) for cell in cells]
    columns += [column(b"", 0, 0)] * (MAX_ARRAYS + 1 - len(cells))
    meta, body = arrow_parts(pa.RecordBatch.from_arrays(columns, schema=SCHEMA).serialize())
    caller = Caller(target.endpoint, token=TOKEN)
    caller.send([message(good_messages()[0]), message(flight_data(meta, body))])
    heard = caller.drain()
    caller.close()
    return heard


def test_cells_that_lie_outside_their_memory(target: Target):
    good = json.dumps({"op": "stats", "worker": -1, "arrays": []}).encode()
    meta, body = arrow_parts(to_batch(WireMessage({"op": "stats", "worker": -1})).serialize())
    size = len(json.dumps({"op": "stats", "worker": -1, "arrays": []}, separators=(",", ":")))
    for first, last in ((0, 2**40), (-8, 4), (9, 3), (2**62, 2**62 + 1), (0, -1), (-(2**63), 2**63 - 1)):
        lie = body.replace(np.array([0, size], np.int64).tobytes(), np.array([first, last], np.int64).tobytes(), 1)
        assert lie != body
        caller = Caller(target.endpoint, token=TOKEN)
        caller.send([message(good_messages()[0]), message(flight_data(meta, lie))])
        heard = caller.drain()
        caller.close()
        assert b"a message without its bytes" in heard
    assert b"members" in by_hand(target, [good])
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
    b'{"op":"mirror","server":0,"file":"../../escape","offset":0,"arrays":[]}',
    b'{"op":"export","path":"/nowhere","table":"t","format":"pickle","worker":0,"arrays":[]}',
]


def test_invalid_or_false_heads_are_answered_with_one_line(target: Target):
    empty = column(b"", 0, 0)
    batches = [
        pa.RecordBatch.from_arrays([column(head, 0, len(head)), *[empty] * MAX_ARRAYS], schema=SCHEMA) for head in HEADS
    ]
    answers = exchange(target, SCHEMA, batches)
    for head, answer in zip(HEADS, answers, strict=True):
        line = answer.get("error", "")
        assert line, head[:80]
        assert "\n" not in line
        assert "the server failed" not in line, (head[:80], line)
    target.check()


def test_actions_that_are_not_there_or_make_no_sense(target: Target):
    def act(name: str, body: bytes) -> object:
        client = flight.FlightClient(f"grpc+tcp://{target.endpoint}")
        try:
            options = flight.FlightCallOptions(headers=SAFE.headers(), timeout=LIMIT)
            return [result.body.to_pybytes() for result in client.do_action(flight.Action(name, body), options)]
        finally:
            client.close()

    assert "no action" in refused(lambda: act("shutdown", b""))
    assert "over the limit" in refused(lambda: act("beat", b"[" * 2**20))
    for body in (b"[", b"\xff", b"[" * 60_000, b"[]", b"7"):
        assert "cannot be read" in refused(lambda body=body: act("beat", body))
    (answer,) = act("beat", b'{"worker":"x"}')
    assert "error" in json.loads(answer)
    client = flight.FlightClient(f"grpc+tcp://{target.endpoint}")
    options = flight.FlightCallOptions(headers=SAFE.headers(), timeout=LIMIT)
    refused(lambda: client.do_get(flight.Ticket(b"x"), options))
    refused(lambda: list(client.list_flights(options=options)))
    refused(lambda: client.get_flight_info(flight.FlightDescriptor.for_command(b"x"), options))
    client.close()
    target.check()


def test_strangers_with_wrong_tokens_reach_nothing(target: Target):
    rng = np.random.default_rng(4)
    tokens = [None, "", TOKEN[:-1], TOKEN + " ", TOKEN.upper(), *(rng.bytes(8).hex() for _ in range(40))]
    good = [message(one) for one in good_messages()]
    for token in tokens:
        for path in (EXCHANGE, ACTION):
            caller = Caller(target.endpoint, path, token)
            with contextlib.suppress(OSError):
                caller.send(good)
            heard = caller.drain()
            caller.close()
            assert b"token is not this server's" in heard or b"grpc-status\x0216" in heard, (token, heard)
            assert target.expected[:3].tobytes() not in heard
    target.check()


def test_slow_and_idle_clients_hold_up_nobody(target: Target):
    idle = [connect(target) for _ in range(60)]  # say nothing
    halves = [connect(target) for _ in range(60)]
    for at, one in enumerate(halves):
        one.sendall(PREFACE[: at % len(PREFACE)])
    callers = [Caller(target.endpoint, token=TOKEN) for _ in range(30)]  # never send a message
    good = good_messages()
    begun = [Caller(target.endpoint, token=TOKEN) for _ in range(30)]
    for one in begun:  # a byte of one
        one.raw(frame(DATA, 0, 1, message(good[0])))
        one.raw(frame(DATA, 0, 1, message(good[1])[:7]))
    lazy = [FlightConnection(target.endpoint, SAFE) for _ in range(4)]  # ask for much and take nothing
    ids = np.arange(200_000)
    head = {"op": "pull", "worker": 0, "step": 0, "tables": {"t": len(ids)}, "dense": False, "commit": None}
    for one in lazy:
        one.open()
        one.write(to_batch(WireMessage({**head, "peek": True, "state": False}, [ids])))
    target.check()
    for one in [*idle, *halves, *callers, *begun, *lazy]:
        one.close()
    target.check()


def test_full_server_says_so_and_takes_next_when_one_has_left():
    server = FlightServer("127.0.0.1:0", Counting().handle, max_streams=3)
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
