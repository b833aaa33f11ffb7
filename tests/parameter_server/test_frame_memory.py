"""Arrays of long messages in memory that a worker and a server on one host share."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from counting_server import Process, free_endpoint

from echelon.base.security import Security
from echelon.parameter_server.protocol.channel import ServerChannel
from echelon.parameter_server.protocol.frame_memory import HALF, FrameMemory, FrameMemoryOffer, open_offered
from echelon.parameter_server.protocol.message import WireMessage, WireMessageError
from echelon.parameter_server.server.server_port import ServerPort

KEPT: list[WireMessage] = []


def doubled(message: WireMessage, has_hung_up: object) -> WireMessage:
    if message.head.get("keep"):
        KEPT.append(message)
    return WireMessage({"n": message.head["n"]}, [2 * array for array in message.arrays])


@contextmanager
def serving(security: Security | None = None) -> Iterator[tuple[ServerPort, ServerChannel]]:
    port = ServerPort("127.0.0.1:0", doubled, security or Security())
    link = ServerChannel(port.endpoint, security=security or Security(), timeout=30)
    try:
        yield port, link
    finally:
        link.close()
        port.close()
        KEPT.clear()


def memory_of(link: ServerChannel) -> FrameMemory | None:
    assert link._connection is not None
    assert link._connection._stream is not None
    return link._connection._stream.memory


def message(number: int, size: int, **more: object) -> WireMessage:
    rng = np.random.default_rng(number)
    return WireMessage({"op": "x", "n": number, **more}, [rng.random(size, np.float32), rng.integers(0, 9, 3)])


def assert_doubled(answer: WireMessage, number: int, size: int) -> None:
    assert answer.head == {"n": number}
    for got, sent in zip(answer.arrays, message(number, size).arrays, strict=True):
        np.testing.assert_array_equal(got, 2 * sent)


def test_messages_of_all_lengths_arrive_at_once_and_over_breaks() -> None:
    sizes = [3, 8000, 9000, 300_000, 1_500_000, HALF // 4 + 1]
    with serving() as (_, link):
        for turn in range(6):
            sent = [(n, sizes[(n + turn) % len(sizes)]) for n in range(12)]
            answers = [link.send(message(*each)) for each in sent]
            if turn % 2:
                link.break_off()
            for each, answer in zip(sent, answers, strict=True):
                assert_doubled(answer.result(), *each)
        assert link.reconnects
        memory = memory_of(link)
        assert memory is not None
        assert memory._put  # some went through the memory


def test_what_a_receiver_keeps_stays_as_it_was() -> None:
    """A server that holds pushes, and a worker that holds rows, while many more messages pass through the memory."""
    with serving() as (_, link):
        rows = [link.call(message(n, 100_000, keep=True)) for n in range(40)]  # more than either half has room for
        for n in range(40, 90):
            assert_doubled(link.call(message(n, 100_000)), n, 100_000)
        for n, (kept, got) in enumerate(zip(KEPT, rows, strict=True)):
            assert_doubled(got, n, 100_000)
            np.testing.assert_array_equal(kept.arrays[0], message(n, 100_000).arrays[0])


def test_memory_is_used_again_when_its_arrays_are_gone() -> None:
    with serving() as (_, link):
        for n in range(60):
            assert_doubled(link.call(message(n, 200_000)), n, 200_000)
        gc.collect()
        link.call(message(0, 3))
        memory = memory_of(link)
        assert memory is not None
        assert memory._put == 60
        assert len(memory._held) <= 1


def test_a_new_server_answers_what_waits_and_shares_memory_again() -> None:
    endpoint = free_endpoint()
    first = Process(endpoint)
    link = ServerChannel(endpoint, timeout=30)
    ids = np.arange(50_000)
    link.call(WireMessage({"op": "echo", "worker": 0}, [ids]))
    assert memory_of(link) is not None
    first.kill()
    under_way = [link.send(WireMessage({"op": "echo", "worker": 0}, [ids + n])) for n in range(4)]
    second = Process(endpoint)
    for n, answer in enumerate(under_way):
        np.testing.assert_array_equal(answer.result(30).arrays[0], ids + n)
    assert memory_of(link) is not None
    link.close()
    second.kill()


def test_files_other_than_an_offer_are_not_opened(tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(64 + 2 * HALF))
    with secret.open("rb") as file:
        assert open_offered({"pid": os.getpid(), "file": file.fileno(), "nonce": bytes(32).hex()}) is None
    offer = FrameMemoryOffer()
    assert open_offered({**offer.head, "nonce": bytes(32).hex()}) is None
    assert open_offered({**offer.head, "file": -1}) is None
    assert open_offered({**offer.head, "pid": "1"}) is None
    loose = os.memfd_create("echelon-frames")  # may be cut short by its maker
    os.ftruncate(loose, 64 + 2 * HALF)
    assert open_offered({"pid": os.getpid(), "file": loose, "nonce": bytes(32).hex()}) is None
    os.close(loose)
    assert open_offered(offer.head) is not None
    offer.close()
    assert open_offered(offer.head) is None


def test_numbers_from_the_other_end_are_checked() -> None:
    offer = FrameMemoryOffer()
    one, other = offer.accepted(), open_offered(offer.head)
    offer.close()
    assert other is not None
    assert one.put([np.ones(HALF // 4 + 1, np.float32)]) == -1
    assert one.put([np.ones(9, np.float32)]) == -1
    assert one.put([np.ones(9000, np.float32)]) == 0
    np.testing.assert_array_equal(other.take(0, [36000])[0].view(np.float32), np.ones(9000, np.float32))
    for offset, size in ((-1, 4), (HALF - 64, 128), (HALF, 1), (0, HALF + 1)):
        with pytest.raises(WireMessageError):
            other.take(offset, [size])
    with pytest.raises(WireMessageError):
        one.release(2)
    one.release(other.done())
    assert not one._held
    with pytest.raises(WireMessageError):
        one.release(0)


def test_nothing_is_shared_without_the_token() -> None:
    with serving(Security(token="a secret")) as (port, link):
        assert_doubled(link.call(message(0, 100_000)), 0, 100_000)
        assert memory_of(link) is not None
        stranger = ServerChannel(port.endpoint, timeout=1, join=1)
        began = time.monotonic()
        with pytest.raises(Exception, match="token"):
            stranger.call(message(0, 100_000))
        assert time.monotonic() - began < 20
        stranger.close()
