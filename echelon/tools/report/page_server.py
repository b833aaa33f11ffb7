"""``echelon watch``: the page of a run over HTTP, made anew when the run has written something.

There is one address to ask for, so there are no paths to climb. Whoever is not on this machine must know the token; it
comes once in a link, and stays in a cookie from then on.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import ipaddress
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
from echelon.tools.report.run_page import render

#: Seconds after which a page asks for what is new, and after which it is made anew though no file has changed.
EVERY, STALE = 2.0, 20.0
#: Seconds that a caller has to say what it wants, and then to take each piece of the answer; how many may call at once.
PATIENCE, MOST_CALLERS = 10.0, 32
PIECE = 1 << 16

#: What every answer says to the browser. The page itself says what it may load and run.
GUARDS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageCache:
    """The page of one directory, and its tag; made by one caller at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._lock = directory, threading.Lock()
        self._seen: object = None
        self._due, self._page, self._tag = 0.0, b"", ""

    def newest(self) -> tuple[bytes, str]:
        """At most a fifth of the time is spent on making pages, so that the page of a large run is a little behind."""
        with self._lock:
            seen, begun = signature(self._directory), time.monotonic()
            if (seen != self._seen and begun >= self._due) or begun >= self._due + STALE:
                self._page = render(gather(self._directory), time.time(), live=EVERY).encode()
                self._tag = f'"{hashlib.sha256(self._page).hexdigest()[:32]}"'
                ended = time.monotonic()
                self._seen, self._due = seen, ended + 4 * (ended - begun)
            return self._page, self._tag


class PageServer(ThreadingHTTPServer):
    """token: what callers must know; None: they are on this machine, and need not."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, pages: PageCache, token: str | None) -> None:
        self.pages, self.token = pages, token
        self._room = threading.BoundedSemaphore(MOST_CALLERS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), PageRequestHandler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def cookie(self) -> str:
        """By port: cookies know none, and several runs may be watched on one machine."""
        return f"echelon-watch-{self.port}"

    def server_bind(self) -> None:
        """Without asking for this machine's name, which can take seconds."""
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
        """A caller that hangs up, or sends nonsense, is no news."""


class _DeadlineReader(io.RawIOBase):
    """What a caller says, as long as there is patience: a letter now and then makes it no longer."""

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
            asked = urlsplit(self.path)
            query = parse_qs(asked.query, max_num_fields=8)
        except ValueError:
            return self._refuse(HTTPStatus.BAD_REQUEST)
        if not self._meant_for_us():
            return self._refuse(HTTPStatus.MISDIRECTED_REQUEST)
        given = query.get("token", [""])[0]
        if self.server.token is not None and given and self._is_token(given):
            return self._let_in(given)
        if not self._may():
            return self._refuse(HTTPStatus.FORBIDDEN)
        if asked.path != "/":
            return self._refuse(HTTPStatus.NOT_FOUND)
        return self._page()

    def _page(self) -> None:
        page, tag = self.server.pages.newest()
        if self.headers.get("If-None-Match") == tag:
            return self._answer(HTTPStatus.NOT_MODIFIED, b"", ETag=tag)
        return self._answer(HTTPStatus.OK, page, ETag=tag, **{"Content-Type": "text/html; charset=utf-8"})

    # ---- who may ----

    def _meant_for_us(self) -> bool:
        """Without a token, only under this machine's own names: else any page on the web could have its name point here
        and read the run through the browser of whoever looks at it."""
        if self.server.token is not None:
            return True
        try:
            return is_loopback(urlsplit(f"//{self.headers.get('Host', '')}").hostname or "")
        except ValueError:
            return False

    def _may(self) -> bool:
        if self.server.token is None:
            return True
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
        token = self.server.token or ""
        return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())

    def _let_in(self, token: str) -> None:
        """The token goes from the link into a cookie that scripts cannot read, and out of the address."""
        cookie = f"{self.server.cookie}={token}; HttpOnly; SameSite=Strict; Path=/"
        self._answer(HTTPStatus.SEE_OTHER, b"", Location="/", **{"Set-Cookie": cookie})

    # ---- answers ----

    def _answer(self, status: HTTPStatus, body: bytes, **headers: str) -> None:
        self.connection.settimeout(PATIENCE)
        self.send_response(status)
        for name, value in {**GUARDS, **headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # hung up in the middle
            for place in range(0, len(body), PIECE):
                self.wfile.write(body[place : place + PIECE])

    def _refuse(self, status: HTTPStatus) -> None:
        self.send_error(status)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """One short line; also for what is no request at all. Nothing of it is repeated."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self.close_connection = True
        self.request_version = "HTTP/1.0"  # what came may have claimed anything
        words = {
            HTTPStatus.FORBIDDEN: "the token is missing or wrong: use the link that 'echelon watch' has printed",
            HTTPStatus.METHOD_NOT_ALLOWED: "only GET",
            HTTPStatus.MISDIRECTED_REQUEST: "ask for localhost",
        }
        body = f"{words.get(status, status.phrase.lower())}\n".encode()
        more = {"Allow": "GET"} if status is HTTPStatus.METHOD_NOT_ALLOWED else {}
        with contextlib.suppress(OSError):
            self._answer(status, body, **more, **{"Content-Type": "text/plain; charset=utf-8"})

    def log_message(self, format: str, *args: Any) -> None:
        """The console is for people, not for every call."""


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_server(directory: Path, host: str, port: int) -> PageServer:
    """Listening, not yet answering. Other addresses than this machine's own get a token."""
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    try:
        return PageServer(host, port, PageCache(directory), token)
    except OSError as error:
        said = error.strerror or str(error)
        raise UsageError(
            f"cannot listen on {host}:{port}: {said}; choose another --port (0: any that is free) or --host"
        ) from None
    except OverflowError:
        raise UsageError(f"there is no port {port}; choose --port from 0 to 65535") from None


def link(server: PageServer, host: str) -> str:
    """What to open in a browser."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    token = f"?token={server.token}" if server.token is not None else ""
    return f"http://{shown}:{server.port}/{token}"
