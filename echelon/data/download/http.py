"""Downloads by http and https with the standard library: ranges, verified certificates, no redirect from https to http.

fsspec would need aiohttp for it, and does not tell the version of the file to which a range belongs.
"""

from __future__ import annotations

import functools
import http.client
import json
import re
import ssl
import urllib.error
import urllib.request
from http.client import HTTPMessage
from typing import IO, Any
from urllib.parse import urlsplit

from echelon.base.errors import DataError, UsageError, one_line
from echelon.data.download.url_source import WEB, Access, OpenRemoteFile, RetryableDownloadError, redact_url

BUSY = {408, 425, 429, 500, 502, 503, 504}
PASSING = (OSError, http.client.HTTPException)
LOOPBACKS = ("127.0.0.1", "localhost", "::1")
LONGEST_PAUSE = 60.0


def open_web(url: str, access: Access, start: int, version: str) -> OpenRemoteFile:
    check_web(url)
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
            return open_web(url, access, 0, "")
        raise _refusal(url, error) from None
    except urllib.error.URLError as error:
        raise _unreachable(url, error.reason) from None
    except PASSING as error:
        raise _unreachable(url, error) from None
    opened = _opened(response, start)
    if opened.start and opened.version != version:
        opened.close()
        return open_web(url, access, 0, "")
    return opened


def check_web(url: str) -> None:
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


def _opened(response: Any, asked: int) -> OpenRemoteFile:
    length = response.headers.get("Content-Length")
    start, size = 0, int(length) if length and length.isdigit() else None
    if response.status == 206:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", "").strip())
        if found is None or int(found[1]) != asked:
            response.close()
            raise RetryableDownloadError("the server answered with another part of the file than was asked for")
        start, size = int(found[1]), int(found[2])
    return OpenRemoteFile(
        functools.partial(_read, response), response.close, start, size, _version(response.headers, size)
    )


def _read(response: Any, count: int) -> bytes:
    try:
        return bytes(response.read1(count))  # returns what has arrived, so that a broken connection loses less
    except PASSING as error:
        raise RetryableDownloadError(one_line(error)) from error


def _version(headers: HTTPMessage, size: int | None) -> str:
    """Return a version of the file. Weak ETags and dates are less reliable, but with the size they reveal a change."""
    etag, modified = headers.get("ETag"), headers.get("Last-Modified")
    return json.dumps([etag, modified, size]) if etag or modified else ""


def _refusal(url: str, error: urllib.error.HTTPError) -> Exception:
    if error.code in BUSY:
        pause = error.headers.get("Retry-After", "")
        return RetryableDownloadError(
            f"HTTP {error.code}", min(float(pause), LONGEST_PAUSE) if pause.isdecimal() else None
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
    if isinstance(reason, _BadRedirect):
        return DataError(str(reason))
    if isinstance(reason, http.client.InvalidURL | UnicodeError):
        return UsageError(f"'{redact_url(url)}' is no URL: {one_line(reason)}")
    return RetryableDownloadError(one_line(reason) if isinstance(reason, BaseException) else str(reason))


class _BadRedirect(OSError):
    pass


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Allows redirects from https to https only, and passes a token to the same host only."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        to = urlsplit(newurl).scheme.lower()
        if to not in WEB or (urlsplit(req.full_url).scheme == "https" and to != "https"):
            fp.close()
            raise _BadRedirect(
                f"{redact_url(req.full_url)} sends us on to {redact_url(newurl)}, which is not safe; ask its owner"
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
