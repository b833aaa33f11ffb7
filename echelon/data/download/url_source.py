"""Opens a URL at an offset: from a web server, a path, or any file system that fsspec supports."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from echelon.base.errors import DataError, UsageError, nearest, one_line

WEB = ("http", "https")
#: Schemes that are opened with fsspec. It has more, but some of those give access to this machine's own files.
STORES = (
    *("s3", "s3a", "gs", "gcs", "hdfs", "webhdfs", "abfs", "abfss", "az", "adl", "oss", "oci", "tos"),
    *("hf", "sftp", "ssh", "ftp", "smb", "webdav", "memory"),
)
LONGEST_PAUSE = 30.0


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
        from echelon.data.download.http import open_web

        return open_web(url, access, start, version)
    return _open_path(url, start, version) if scheme in ("", "file") else _open_elsewhere(url, start, version)


def backoff(failures: int) -> float:
    """Return the seconds to wait before a retry, randomized so that machines do not retry at the same time."""
    return min(0.25 * 2.0**failures, LONGEST_PAUSE) * random.uniform(0.5, 1.0)


def read_text(url: str, access: Access, limit: int, what: str) -> str:
    """Return a small file as text; ``limit`` in bytes guards against endless responses."""
    opened = open_url(url, access)
    data = bytearray()
    try:
        while chunk := opened.read(1 << 16):
            data += chunk
            if len(data) > limit:
                raise DataError(f"{what} '{redact_url(url)}' is larger than {limit:,} bytes; is it the right file?")
    finally:
        opened.close()
    if opened.size is not None and len(data) < opened.size:
        raise RetryableDownloadError(f"it ended after {len(data):,} of {opened.size:,} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{what} '{redact_url(url)}' is not text in UTF-8; is it the right file?") from None


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


def _open_path(url: str, start: int, version: str) -> OpenRemoteFile:
    path = path_of(url)
    try:
        file = path.open("rb")
        facts = path.stat()
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}; check the path") from None
    found = f"{facts.st_size}-{facts.st_mtime_ns}"
    start = start if found == version and start <= facts.st_size else 0
    file.seek(start)
    return OpenRemoteFile(_guarded(file.read), file.close, start, facts.st_size, found)


def _open_elsewhere(url: str, start: int, version: str) -> OpenRemoteFile:
    system, path = _file_system(url)
    try:
        size = system.info(path).get("size")
        found = str(system.ukey(path))
        file = system.open(path, "rb")
        start = start if found == version and start <= (size or 0) else 0
        file.seek(start)
    except FileNotFoundError:
        raise DataError(f"{redact_url(url)}: there is no such file; check the spec") from None
    except PermissionError as error:
        raise DataError(f"{redact_url(url)}: not allowed ({one_line(error)}); check the credentials") from None
    except Exception as error:  # libraries have their own errors, and which of them are temporary is unknown here
        raise RetryableDownloadError(one_line(error)) from error
    return OpenRemoteFile(_guarded(file.read), file.close, start, size, found)


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
