"""Opens a URL at an offset: from a web server, a path, or any file system that fsspec supports.

http(s) is opened with the standard library: fsspec's http has no public way to tell which part of the file a response
holds and of which version it is. When a connection breaks, it drops what was not read yet (165 to 484 kB of
a burst of 2 MB over loopback, nothing at 12 MB/s), and reads at a third of the speed (1.6 and 4.6 GB/s, loopback).
"""

from __future__ import annotations

import functools
import http.client
import json
import random
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPMessage
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from echelon.base.errors import DataError, UsageError, nearest, one_line

WEB = ("http", "https")
#: Schemes that are opened with fsspec. It has more, but some of those give access to this machine's own files.
STORES = (
    *("s3", "s3a", "gs", "gcs", "hdfs", "webhdfs", "abfs", "abfss", "az", "adl", "oss", "oci", "tos"),
    *("hf", "sftp", "ssh", "ftp", "smb", "webdav", "memory"),
)
LONGEST_PAUSE, LONGEST_RETRY_AFTER = 30.0, 60.0
BUSY = {408, 425, 429, 500, 502, 503, 504}
PASSING = (OSError, http.client.HTTPException)
LOOPBACKS = ("127.0.0.1", "localhost", "::1")


class RetryableDownloadError(Exception):
    """The connection broke, or the server is busy: retry, after ``pause`` seconds if the server gave a time."""

    def __init__(self, reason: str, pause: float | None = None) -> None:
        super().__init__(reason)
        self.pause = pause


@dataclass(frozen=True)
class OpenRemoteFile:
    """An open download.

    start:   offset of the first byte: 0 if the server did not continue at the requested offset
    size:    bytes of the whole file, None if unknown
    version: text that changes with the file; "" if it is unknown
    """

    read: Callable[[int], bytes]
    close: Callable[[], None]
    start: int
    size: int | None
    version: str


@dataclass(frozen=True)
class Access:
    """Timeout and token of requests. The token is sent to ``token_host`` (scheme and host) only."""

    timeout: float = 60.0
    token: str = ""
    token_host: str = ""


def open_url(url: str, access: Access, start: int = 0, version: str = "") -> OpenRemoteFile:
    """Open the URL at ``start`` if the file still has that ``version``, else at 0."""
    scheme = scheme_of(url)
    if scheme in WEB:
        return _open_web(url, access, start, version)
    return _open_path(url, start, version) if scheme in ("", "file") else _open_elsewhere(url, start, version)


def backoff(failures: int) -> float:
    """Return the seconds to wait before a retry, randomized so that machines do not retry at the same time."""
    return min(0.25 * 2.0**failures, LONGEST_PAUSE) * random.uniform(0.5, 1.0)


def scheme_of(url: str) -> str:
    return url.split("://", 1)[0].lower() if "://" in url else ""


def is_remote(url: str) -> bool:
    return scheme_of(url) not in ("", "file")


def redact_url(url: str) -> str:
    """Return the URL without secrets, for messages: a signed URL has them in the query, others before the host."""
    if not is_remote(url):
        return url
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def path_of(url: str) -> Path:
    """Return the path of a local path or a ``file://`` URL."""
    return Path(unquote(urlsplit(url).path) if scheme_of(url) == "file" else url)


def _open_web(url: str, access: Access, start: int, version: str) -> OpenRemoteFile:
    _check_web(url)
    request = urllib.request.Request(url, headers={"User-Agent": "echelon", "Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    if access.token and host_of(url) == access.token_host:
        _show_token(request, access.token)
    try:
        response = _opener().open(request, timeout=access.timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the file has become shorter than our partial file
            return _open_web(url, access, 0, "")
        raise _refusal(url, error) from None
    except PASSING as error:
        raise _unreachable(url, error.reason if isinstance(error, urllib.error.URLError) else error) from None
    opened = _opened(response, start)
    if opened.start and opened.version != version:
        opened.close()
        return _open_web(url, access, 0, "")
    return opened


def _check_web(url: str) -> None:
    """Raise for an invalid URL before any request is made."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise UsageError(f"'{redact_url(url)}' has a name or password in it; give a token by token_env instead")
    try:
        good = bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good or re.search(r"[\x00-\x20\x7f-\U0010ffff]", url):
        raise UsageError(f"'{redact_url(url)!a}' is no URL: a host is missing, or a character must be written as %XX")


def host_of(url: str) -> str:
    """Return scheme, host and port, to which a token is bound."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}".lower()


def _show_token(request: urllib.request.Request, token: str) -> None:
    parts = urlsplit(request.full_url)
    if parts.scheme != "https" and parts.hostname not in LOOPBACKS:
        raise UsageError(f"{redact_url(request.full_url)} would be sent the token for all to read; use https://")
    request.add_unredirected_header("Authorization", f"Bearer {token}")  # "unredirected": not sent to another host


def _opened(response: Any, requested: int) -> OpenRemoteFile:
    length = response.headers.get("Content-Length")
    start, size = 0, int(length) if length and length.isdigit() else None
    if response.status == 206:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", "").strip())
        if match is None or int(match[1]) != requested:
            response.close()
            raise RetryableDownloadError("the server answered with another part of the file than was asked for")
        start, size = int(match[1]), int(match[2])
    # read1 returns what has arrived, so that a broken connection loses less
    return OpenRemoteFile(_guarded(response.read1), response.close, start, size, _version(response.headers, size))


def _version(headers: HTTPMessage, size: int | None) -> str:
    """Return a version of the file. Weak ETags and dates are less reliable, but with the size they reveal a change."""
    etag, modified = headers.get("ETag"), headers.get("Last-Modified")
    return json.dumps([etag, modified, size]) if etag or modified else ""


def _refusal(url: str, error: urllib.error.HTTPError) -> Exception:
    if error.code in BUSY:
        pause = error.headers.get("Retry-After", "")
        return RetryableDownloadError(
            f"HTTP {error.code}", min(float(pause), LONGEST_RETRY_AFTER) if pause.isdecimal() else None
        )
    hints = {404: "check the name", 401: "it asks for a token: token_env", 403: "it asks for a token: token_env"}
    reason = one_line(Exception(error.reason or ""), 80)
    return DataError(f"{redact_url(url)}: HTTP {error.code} {reason}; {hints.get(error.code, 'check the spec')}")


def _unreachable(url: str, reason: object) -> Exception:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return DataError(
            f"{redact_url(url)}: its certificate is not trusted ({reason.verify_message}); "
            "if it is your own, name its authority's file in SSL_CERT_FILE"
        )
    if isinstance(reason, http.client.InvalidURL | UnicodeError):
        return UsageError(f"'{redact_url(url)}' is no URL: {one_line(reason)}")
    return RetryableDownloadError(one_line(reason) if isinstance(reason, BaseException) else str(reason))


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Allows redirects from https to https only, and passes a token to the same host only."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        to = urlsplit(newurl).scheme.lower()
        if to not in WEB or (urlsplit(req.full_url).scheme == "https" and to != "https"):
            fp.close()
            raise DataError(
                f"{redact_url(req.full_url)} redirects to {redact_url(newurl)}, which is not safe; ask its owner"
            )
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.get_header("Authorization")
        if request is not None and token and host_of(newurl) == host_of(req.full_url):
            request.add_unredirected_header("Authorization", token)
        return request


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    context = ssl.create_default_context()
    return urllib.request.build_opener(_Redirects(), urllib.request.HTTPSHandler(context=context))


def _open_path(url: str, start: int, version: str) -> OpenRemoteFile:
    path = path_of(url)
    try:
        file = path.open("rb")
        facts = path.stat()
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}; check the path") from None
    result = f"{facts.st_size}-{facts.st_mtime_ns}"
    start = start if result == version and start <= facts.st_size else 0
    file.seek(start)
    return OpenRemoteFile(_guarded(file.read), file.close, start, facts.st_size, result)


def _open_elsewhere(url: str, start: int, version: str) -> OpenRemoteFile:
    system, path = _file_system(url)
    try:
        size = system.info(path).get("size")
        result = str(system.ukey(path))
        file = system.open(path, "rb")
        start = start if result == version and start <= (size or 0) else 0
        file.seek(start)
    except FileNotFoundError:
        raise DataError(f"{redact_url(url)}: there is no such file; check the spec") from None
    except PermissionError as error:
        raise DataError(f"{redact_url(url)}: not allowed ({one_line(error)}); check the credentials") from None
    except Exception as error:  # libraries have their own errors, and which of them are temporary is unknown here
        raise RetryableDownloadError(one_line(error)) from error
    return OpenRemoteFile(_guarded(file.read), file.close, start, size, result)


def _guarded(read: Callable[[int], bytes]) -> Callable[[int], bytes]:
    def guarded(count: int) -> bytes:
        try:
            return read(count)
        except Exception as error:
            raise RetryableDownloadError(one_line(error)) from error

    return guarded


def _file_system(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    from fsspec.registry import known_implementations  # type: ignore[import-untyped]

    scheme = scheme_of(url)
    if "::" in url:
        raise UsageError(f"'{redact_url(url)}' chains file systems with '::'; name the file itself")
    if scheme not in STORES or scheme not in known_implementations:
        raise UsageError(f"'{redact_url(url)}' is of no known kind{nearest(scheme, (*WEB, 'file', *STORES))}")
    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        home = known_implementations[scheme]["class"].split(".")[0]
        library = error.name if home == "fsspec" and error.name else home
        raise UsageError(f"{redact_url(url)} needs the library {library}; pip install {library}") from None
    except Exception as error:
        raise DataError(f"{redact_url(url)} cannot be reached: {one_line(error)}") from None
    return system, str(path)
