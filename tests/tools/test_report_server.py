"""``echelon watch``: one page over HTTP, for those who may see it, whatever else is sent to the port."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up_runs import append, metrics, spans

from echelon.base.errors import UsageError
from echelon.tools.report.page_server import MOST_CALLERS, PageCache, PageServer, link, open_server

SECRET = "contents that nobody asked for"


@contextlib.contextmanager
def serving(directory: Path, token: str = "a-token") -> Iterator[PageServer]:
    with PageServer("127.0.0.1", 0, PageCache(directory), token) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: PageServer, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    return ask_as_stranger(server, path, method, **{"Authorization": f"Bearer {server.token}", **headers})


def ask_as_stranger(
    server: PageServer, path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    caller = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        caller.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = caller.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        caller.close()


def until_new(server: PageServer, tag: str) -> tuple[str, str]:
    """Ask as a page does, until there is another page."""
    until = time.monotonic() + 30
    while (answer := ask(server, If_None_Match=tag))[0] == 304:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert answer[0] == 200
    return answer[1]["ETag"], answer[2]


def send(server: PageServer, data: bytes) -> bytes:
    """Bytes as they are, and all that comes back."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as caller:
        try:
            caller.sendall(data)
            caller.shutdown(socket.SHUT_WR)
            found = b""
            while more := caller.recv(65536):
                found += more
        except TimeoutError:
            raise
        except OSError:
            return b""  # it hung up before it had heard all
        return found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "secret.txt").write_text(SECRET)
    place = tmp_path / "log"
    append(place / "metrics.jsonl", metrics(10, 100))
    (place / "secret.txt").write_text(SECRET)
    return place


def test_the_page_grows_with_its_files(directory: Path) -> None:
    with serving(directory) as server:
        status, headers, page = ask(server)
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert 'data-live="2.0"' in page
        assert "connect-src &#39;self&#39;" in page
        assert "<b>100</b>of 4,000 steps" in page
        assert ask(server, If_None_Match=headers["ETag"])[0] == 304
        append(directory / "metrics.jsonl", metrics(110, 250))
        later, page = until_new(server, headers["ETag"])
        assert later != headers["ETag"]
        assert "<b>250</b>of 4,000 steps" in page


def test_an_empty_directory_says_so_until_there_is_a_run(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        _, headers, page = ask(server)
        assert "Nothing written yet" in page
        append(tmp_path / "metrics.jsonl", metrics(10, 20))
        assert "Nothing written yet" not in until_new(server, headers["ETag"])[1]


def test_the_browser_is_told_to_guard_the_page(directory: Path) -> None:
    with serving(directory) as server:
        headers = ask(server)[1]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "BREW"])
def test_only_get_is_answered(directory: Path, method: str) -> None:
    with serving(directory) as server:
        status, headers, body = ask(server, method=method)
    assert (status, headers["Allow"]) == (405, "GET")
    assert body in ("only GET\n", "")


def test_the_trace_is_served_beside_the_page(directory: Path) -> None:
    (directory / "run.json").unlink(missing_ok=True)
    append(directory / "timeline" / "rank-0.jsonl", spans(0))
    (directory / "timeline" / "trace.json.gz").write_bytes(b"packed")
    with serving(directory) as server:
        assert 'href="trace.json.gz"' in ask(server)[2]
        status, headers, body = ask(server, "/trace.json.gz")
    assert (status, headers["Content-Type"], body) == (200, "application/gzip", "packed")


def test_there_are_no_other_files(directory: Path) -> None:
    paths = ["/secret.txt", "/metrics.jsonl", "/../secret.txt", "/../../../../etc/passwd", "/%2e%2e/secret.txt", "/./"]
    paths += [
        "//secret.txt",
        "/..%2fsecret.txt",
        "/..\\secret.txt",
        "/%00",
        "/report.html",
        "/trace.json.gz",
        "/;/../",
        "/a" * 2000,
    ]
    with serving(directory) as server:
        for path in paths:
            answer = send(server, f"GET {path} HTTP/1.1\r\nAuthorization: Bearer a-token\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.0 404 "), path
            assert len(answer) < 600
            assert SECRET.encode() not in answer


def hostile() -> list[bytes]:
    noise = random.Random(3)
    found = [noise.randbytes(size) for size in (1, 10, 1000, 100_000)]
    found += [b"", b"\r\n", b"\0" * 5000, b"GET", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nHost: [\r\n\r\n"]
    found += [b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 300 + b"\r\n"]
    found += [b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"]
    found += [b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /?" + b"a=b&" * 50 + b" HTTP/1.1\r\n\r\n"]
    found += [
        b"<script>alert(1)</script> / HTTP/1.1\r\n\r\n",
        b"GET /<script>alert(1) HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ]
    found += [
        b'GET / HTTP/1.1\r\nHost: localhost\r\nCookie: =;;\x01="\r\nAuthorization: \xff\r\nIf-None-Match: \xfe\r\n'
    ]
    return found


@pytest.mark.parametrize("known", [False, True])
def test_any_request_gets_a_short_answer_and_harms_no_other(directory: Path, known: bool) -> None:
    with serving(directory) as server:
        proof = b"\r\nAuthorization: Bearer a-token\r\n" if known else b"\r\n"
        for data in (each.replace(b"\r\n", proof, 1) for each in hostile()):
            answer = send(server, data)
            assert SECRET.encode() not in answer
            assert b"alert(1)" not in answer or b"<!DOCTYPE html>" in answer
            if b"<!DOCTYPE html>" not in answer:
                assert len(answer) < 700, data[:60]
        assert ask(server, Authorization="Bearer a-token")[0] == 200


def test_who_is_not_here_needs_the_token(directory: Path) -> None:
    with serving(directory, "right-token") as server:
        refused = ask_as_stranger(server)
        assert refused[0] == 403
        assert refused[2] == "the token is missing or wrong: use the link that 'echelon watch' has printed\n"
        for wrong in ("wrong", "right-toke", "right-token2", "", "%ff%00", "r%C3%AFght-token"):
            assert ask_as_stranger(server, f"/?token={wrong}")[0] == 403
        assert ask_as_stranger(server, "/anything")[0] == 403  # not even what is there and what is not
        status, headers, body = ask_as_stranger(server, "/?token=right-token")
        assert (status, headers["Location"], body) == (303, "/", "")
        cookie, *rules = headers["Set-Cookie"].split("; ")
        assert set(rules) == {"HttpOnly", "SameSite=Strict", "Path=/"}
        assert ask_as_stranger(server, Cookie=cookie)[0] == 200
        assert "right-token" not in ask_as_stranger(server, Cookie=cookie)[2]
        assert ask_as_stranger(server, Cookie=cookie[:-1])[0] == 403
        assert ask_as_stranger(server, Cookie=cookie.replace("=", "0=", 1))[0] == 403
        assert ask_as_stranger(server, Authorization="Bearer right-token")[0] == 200
        assert ask_as_stranger(server, Authorization="Basic right-token")[0] == 403


def test_every_server_gets_a_token_of_its_own(tmp_path: Path) -> None:
    """On loopback too: other users of the host can reach it, and the run's directory may be closed to them."""
    with open_server(tmp_path, "127.0.0.1", 0) as server, open_server(tmp_path, "0.0.0.0", 0) as other:
        assert len(server.token) >= 32
        assert server.token != other.token
        assert link(server, "127.0.0.1") == f"http://127.0.0.1:{server.port}/?token={server.token}"
        assert link(other, "10.1.2.3") == f"http://10.1.2.3:{other.port}/?token={other.token}"


def test_callers_that_say_nothing_do_not_pile_up(directory: Path) -> None:
    with serving(directory) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MOST_CALLERS)]
        try:
            assert send(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""  # no room
        finally:
            for each in silent:
                each.close()
        until = time.monotonic() + 30
        while not send(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            assert time.monotonic() < until
            time.sleep(0.02)


def test_server_hangs_up_on_a_caller_that_sends_slowly(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that sends single characters now and then is disconnected, and others are still answered."""
    monkeypatch.setattr("echelon.tools.report.page_server.PATIENCE", 0.3)
    with serving(directory) as server, socket.create_connection(("127.0.0.1", server.port)) as caller:
        caller.sendall(b"GET / HTTP/1.1\r\n")
        until = time.monotonic() + 20
        with contextlib.suppress(OSError):  # it has hung up
            while True:
                assert time.monotonic() < until
                caller.sendall(b"x")
                time.sleep(0.05)
        assert ask(server)[0] == 200


def test_a_port_that_is_taken_or_none_is_one_clear_line(tmp_path: Path) -> None:
    with (
        open_server(tmp_path, "127.0.0.1", 0) as server,
        pytest.raises(UsageError, match=r"^cannot listen on 127\.0\.0\.1:\d+: Address already in use; choose another"),
    ):
        open_server(tmp_path, "127.0.0.1", server.port)
    with pytest.raises(UsageError, match=r"^there is no port 70000; choose --port from 0 to 65535$"):
        open_server(tmp_path, "127.0.0.1", 70000)
    with pytest.raises(UsageError, match=r"^cannot listen on no-such-host\.invalid:0: .*; choose another --port"):
        open_server(tmp_path, "no-such-host.invalid", 0)
