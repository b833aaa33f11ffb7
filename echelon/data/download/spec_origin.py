"""Loads a spec from its origin, which decides the list of files, their URLs, and the host that receives the token."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echelon.base.errors import DataError, UsageError
from echelon.data.download.http import host_of
from echelon.data.download.spec import (
    LIST_BYTES,
    SPEC_BYTES,
    RemoteFile,
    Spec,
    files_listed,
    files_of,
    folder_of,
    joined,
    make_spec,
    parse_spec,
)
from echelon.data.download.url_source import (
    WEB,
    Access,
    RetryableDownloadError,
    backoff,
    is_remote,
    read_text,
    redact_url,
    scheme_of,
)


@dataclass(frozen=True)
class ResolvedSpec:
    """A spec with its list of files."""

    files: list[RemoteFile]
    spec: Spec
    access: Access


class Origin:
    """A spec as given. A local spec is read and validated at once, a remote one when it is needed."""

    def __init__(self, given: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        self.url = "" if isinstance(given, Mapping) else os.fspath(given)
        self._folder = folder_of(self.url)
        self._spec = make_spec(dict(given)) if isinstance(given, Mapping) else None
        if self.url and not is_remote(self.url):
            self._spec = parse_spec(_text(self.url, Access(), SPEC_BYTES, "spec"), self.url)

    def wanted(self, token: str = "") -> ResolvedSpec:
        spec = self._spec or parse_spec(
            _text(self.url, Access(60.0, token, host_of(self.url)), SPEC_BYTES, "spec"), self.url
        )
        base = joined(self._folder, spec.base or "")
        listed = joined(base, spec.list) if spec.list else ""
        access = Access(spec.timeout, token, self._trusted(listed or base) if token else "")
        if not listed:
            return ResolvedSpec(files_of(spec, self._folder), spec, access)
        text = _text(listed, access, LIST_BYTES, "file list", spec.retries)
        meta = joined(base, spec.meta) if spec.meta else ""
        further = _text(meta, access, LIST_BYTES, "file list", spec.retries) if meta else ""
        return ResolvedSpec(files_listed(spec, text, further, listed, self._folder), spec, access)

    def _trusted(self, home: str) -> str:
        """Return the host that receives the token. A remote spec cannot choose it: it is the spec's own host."""
        home = self.url if is_remote(self.url) else home
        if scheme_of(home) not in WEB:
            raise UsageError(
                f"a token is for http(s), but the files are at '{redact_url(home)}'; leave it out, or give a base"
            )
        return host_of(home)


def _text(url: str, access: Access, limit: int, what: str, retries: int = Spec.retries) -> str:
    for failures in range(retries + 1):
        try:
            return read_text(url, access, limit, what)
        except RetryableDownloadError as lost:
            if failures == retries:
                raise DataError(
                    f"{what} {redact_url(url)}: {lost} ({retries + 1} attempts); is the server there?"
                ) from None
            time.sleep(lost.pause if lost.pause is not None else backoff(failures))
    raise AssertionError("unreachable")
