"""``echelon watch``: serves the page of a run over HTTP, and renders it again when the run has written something.

Two addresses are served, the page and its trace, so path traversal is impossible. Clients must know the token, on this
machine too, which other users may share; a client sends it once in a link, and in a cookie from then on.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import secrets
import socket
import threading
import time
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from echelon.base.errors import UsageError
from echelon.tools.report.run_files import gather, signature
from echelon.tools.report.run_page import TRACE_ADDRESS, render

#: Seconds between two refreshes of a page; seconds after which it is rendered again although no file has changed.
EVERY, STALE = 2.0, 20.0
#: Seconds in which a client must send its request, and then take each piece of the response; number of clients at once.
PATIENCE, MOST_CALLERS = 10.0, 32
PIECE = 1 << 16

#: Headers of every response. The page itself contains its Content-Security-Policy.
GUARDS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageCache:
    """The page of one directory and its ETag; one thread at a time renders it.

    trace: merged trace of the page that was rendered last; None without one
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._lock = directory, threading.Lock()
        self.trace: Path | None = None
        self._seen: object = None
        self._due, self._page, self._tag = 0.0, b"", ""

    def newest(self) -> tuple[bytes, str]:
        """Return the page and its ETag, rendered again if files have changed.

        At most a fifth of the time is spent on rendering, so the page of a large run may lag behind.
        """
        with self._lock:
            seen, begun = signature(self._directory), time.monotonic()
            if (seen != self._seen and begun >= self._due) or begun >= self._due + STALE:
                gathered = gather(self._directory)
                self._page = render(gathered, time.time(), live=EVERY).encode()
                self.trace = gathered.trace
                self._tag = f'"{hashlib.sha256(self._page).hexdigest()[:32]}"'
                ended = time.monotonic()
                self._seen, self._due = seen, ended + 4 * (ended - begun)
            return self._page, self._tag


class PageServer(ThreadingHTTPServer):
    """The HTTP server of one page.

    token: secret that clients must send
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, pages: PageCache, token: str) -> None:
        self.pages, self.token = pages, token
        self._room = threading.BoundedSemaphore(MOST_CALLERS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), PageRequestHandler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def cookie(self) -> str:
        """The name of the cookie. The name has the port, because browsers share cookies between ports of a host."""
        return f"echelon-watch-{self.port}"

    def server_bind(self) -> None:
        """Bind the socket without looking up this machine's name, which can take seconds."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that disconnect or send invalid data."""


class _DeadlineReader(io.RawIOBase):
    """Reads a request until a deadline, which slow single bytes do not extend. Raises ``TimeoutError`` after it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._until = connection, time.monotonic() + PATIENCE

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class PageRequestHandler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "echelon", ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_DeadlineReader(self.connection))

    def do_GET(self) -> None:
        try:
            address = urlsplit(self.path)
            query = parse_qs(address.query, max_num_fields=8)
        except ValueError:
            return self._refuse(HTTPStatus.BAD_REQUEST)
        given = query.get("token", [""])[0]
        if given and self._is_token(given):
            return self._let_in(given)
        if not self._may():
            return self._refuse(HTTPStatus.FORBIDDEN)
        if address.path == f"/{TRACE_ADDRESS}":
            return self._trace()
        if address.path != "/":
            return self._refuse(HTTPStatus.NOT_FOUND)
        return self._page()

    def _page(self) -> None:
        page, tag = self.server.pages.newest()
        if self.headers.get("If-None-Match") == tag:
            return self._answer(HTTPStatus.NOT_MODIFIED, b"", ETag=tag)
        return self._answer(HTTPStatus.OK, page, ETag=tag, **{"Content-Type": "text/html; charset=utf-8"})

    def _trace(self) -> None:
        trace = self.server.pages.trace
        try:
            content = trace.read_bytes() if trace is not None else b""
        except OSError:
            content = b""
        if not content:
            return self._refuse(HTTPStatus.NOT_FOUND)
        return self._answer(HTTPStatus.OK, content, **{"Content-Type": "application/gzip"})

    # ---- access control ----

    def _may(self) -> bool:
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(given.strip()):
            return True
        return self._is_token(self._cookie())

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            return ""
        return found.value if found is not None else ""

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.server.token.encode())

    def _let_in(self, token: str) -> None:
        """Move the token from the link to a cookie that scripts cannot read, and redirect to an address without it."""
        cookie = f"{self.server.cookie}={token}; HttpOnly; SameSite=Strict; Path=/"
        self._answer(HTTPStatus.SEE_OTHER, b"", Location="/", **{"Set-Cookie": cookie})

    # ---- responses ----

    def _answer(self, status: HTTPStatus, body: bytes, **headers: str) -> None:
        self.connection.settimeout(PATIENCE)
        self.send_response(status)
        for name, value in {**GUARDS, **headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has disconnected
            for place in range(0, len(body), PIECE):
                self.wfile.write(body[place : place + PIECE])

    def _refuse(self, status: HTTPStatus) -> None:
        self.send_error(status)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send one short line, also for a malformed request. The response repeats nothing of the request."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self.close_connection = True
        self.request_version = "HTTP/1.0"  # the version in a malformed request may be anything
        words = {
            HTTPStatus.FORBIDDEN: "the token is missing or wrong: use the link that 'echelon watch' has printed",
            HTTPStatus.METHOD_NOT_ALLOWED: "only GET",
        }
        body = f"{words.get(status, status.phrase.lower())}\n".encode()
        more = {"Allow": "GET"} if status is HTTPStatus.METHOD_NOT_ALLOWED else {}
        with contextlib.suppress(OSError):
            self._answer(status, body, **more, **{"Content-Type": "text/plain; charset=utf-8"})

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the console does not show requests."""


def open_server(directory: Path, host: str, port: int) -> PageServer:
    """Return a server that listens but does not answer yet, with a new token.

    Raises ``UsageError`` if the server cannot listen there.
    """
    try:
        return PageServer(host, port, PageCache(directory), secrets.token_urlsafe(24))
    except OSError as error:
        said = error.strerror or str(error)
        raise UsageError(
            f"cannot listen on {host}:{port}: {said}; choose another --port (0: any that is free) or --host"
        ) from None
    except OverflowError:
        raise UsageError(f"there is no port {port}; choose --port from 0 to 65535") from None


def link(server: PageServer, host: str) -> str:
    """Return the URL to open in a browser, with the token."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{server.port}/?token={server.token}"
