"""Loads a download spec from its origin, and parses it into validated names, URLs and checksums.

The origin also decides which host receives the token.
A spec may come from an untrusted source: it is only data, bounded in size, and no name in it leads out of the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from echelon.base.config import build, require, strict
from echelon.base.errors import DataError, UsageError, one_line
from echelon.data.download.url_source import (
    WEB,
    Access,
    RetryableDownloadError,
    backoff,
    host_of,
    is_remote,
    open_url,
    redact_url,
    scheme_of,
)

#: Byte limits. YAML takes a second per megabyte; longer lists belong in ``list``, with a microsecond per line.
SPEC_BYTES, LIST_BYTES = 8 << 20, 256 << 20
MOST_FILES = 1_000_000
#: The folder beside the data with partial files and the list of verified ones.
WORKINGS = ".echelon"
HEX = {"md5": 32, "sha256": 64}

_DIGITS = r"(?P<digits>[0-9a-fA-F]{32}|[0-9a-fA-F]{64})"
_CHECKSUM_FIRST = re.compile(rf"{_DIGITS}[ \t]+\*?(?P<name>.+)")
_NAME_FIRST = re.compile(rf"(?P<name>.+?)[ \t]+{_DIGITS}")  # the format of Fleet's filelist.txt

_FLEET_PLACE = ("fs.default.name", "fs_name")
#: Keys of Paddle Fleet's yaml: credentials and programs, and the environment variable that is read instead.
_FLEET_ENVIRONMENT = {
    "hadoop.job.ugi": "HADOOP_USER_NAME",
    "fs_ugi": "HADOOP_USER_NAME",
    "hadoop_home": "HADOOP_HOME",
    "java_home": "JAVA_HOME",
}
#: The defaults of a Fleet folder: names with their md5, names of further files, and archives to unpack.
_FLEET_FOLDER = {"list": "filelist.txt", "meta": "meta.txt", "unpack": True}
_FLEET_KEYS = ("bos_path", "data_path", *_FLEET_PLACE, *_FLEET_ENVIRONMENT)


@strict
class SpecFileEntry:
    """One file. Without ``url`` it is at the spec's ``base``; without a checksum only its size is checked."""

    name: str
    url: str | None = None
    sha256: str | None = None
    md5: str | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        for kind, digits in HEX.items():
            given = getattr(self, kind)
            good = given is None or re.fullmatch(rf"[0-9a-fA-F]{{{digits}}}", given) is not None
            require(good, self, kind, f"{digits} hexadecimal digits (in quotes, if YAML takes them for a number)")
        require(self.size is None or self.size >= 0, self, "size", "a number of bytes, 0 or more")


@strict
class Spec:
    """The contents of a spec file.

    base:     URL or folder of files without their own URL; by default that of the spec, or of its list
    files:    names, or entries with checksum, size or URL
    list:     file with lines as sha256sum or md5sum writes them, or with name before checksum, in place of ``files``
    meta:     file with names of further files, one per line; requires ``list``
    unpack:   also unpack files that end with .tar into the folder
    parallel: number of simultaneous downloads
    retries:  number of retries after attempts without progress
    timeout:  seconds to wait for a server's response
    """

    base: str | None = None
    files: tuple[str | SpecFileEntry, ...] = ()
    list: str | None = None
    meta: str | None = None
    unpack: bool = False
    parallel: int = 8
    retries: int = 5
    timeout: float = 60.0

    def __post_init__(self) -> None:
        require(1 <= self.parallel <= 256, self, "parallel", "1 to 256 files at once")
        require(0 <= self.retries <= 100, self, "retries", "0 to 100")
        require(0 < self.timeout <= 86400, self, "timeout", "seconds, more than 0")
        if (self.list is None) == (not self.files):
            both = "both 'files' and 'list'; keep one" if self.files else "neither 'files' nor 'list': nothing to fetch"
            raise UsageError(f"the spec has {both}")
        require(self.meta is None or self.list is not None, self, "meta", "None without 'list': name them in 'files'")

    @staticmethod
    def in_our_names(given: Mapping[Any, Any], label: str) -> Mapping[Any, Any]:
        """Translate the keys of Paddle Fleet's yaml: ``bos_path``, or the keys of HDFS."""
        result = {key: given[key] for key in _FLEET_KEYS if key in given}
        if not result:
            return given
        refused = {key: _FLEET_ENVIRONMENT[key] for key in result if key in _FLEET_ENVIRONMENT}
        if refused:
            variables = " and ".join(dict.fromkeys(refused.values()))
            raise UsageError(
                f"{label}: {', '.join(refused)}: a spec names no users and no programs; set {variables} in the "
                "environment, and leave it out"
            )
        if "base" in given:
            raise UsageError(f"{label} has both 'base' and '{next(iter(result))}'; keep one")
        rest = {key: value for key, value in given.items() if key not in result}
        named = {} if "files" in given or "list" in given else _FLEET_FOLDER
        return {"base": _fleet_base(result, label), **named, **rest}


@dataclass(frozen=True)
class RemoteFile:
    """One file to download. ``checksum`` is (algorithm, digits), or None."""

    name: str
    url: str
    checksum: tuple[str, str] | None = None
    size: int | None = None


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


def parse_spec(text: str, source: str) -> Spec:
    """Parse a spec in YAML or JSON."""
    try:
        plain = json.loads(text, object_pairs_hook=_without_repeats) if source.endswith(".json") else _parse_yaml(text)
    except RecursionError:
        raise UsageError(f"{redact_url(source)}: nests too deeply; a spec is a list of files") from None
    except ValueError as error:
        raise UsageError(f"{redact_url(source)} cannot be read: {one_line(error)}") from None
    return make_spec(plain, redact_url(source))


def make_spec(plain: Any, source: str = "Spec") -> Spec:
    return build(Spec, plain, source)


def files_of(spec: Spec, folder: str) -> list[RemoteFile]:
    """Return the files of a spec that lists them; ``folder`` is that of the spec, for relative names."""
    base = joined(folder, spec.base or "")
    entries = (SpecFileEntry(name=item) if isinstance(item, str) else item for item in spec.files)
    return _checked((_file(entry, base, folder) for entry in entries), folder)


def files_listed(spec: Spec, text: str, further: str, source: str, folder: str) -> list[RemoteFile]:
    """Return the files of ``list``, from lines of checksum and name, and those of ``meta``, from lines of names."""
    base = joined(folder, spec.base) if spec.base else folder_of(source)
    names = (line.strip() for line in further.splitlines())
    entries = (*_entries(text, redact_url(source)), *(SpecFileEntry(name=name) for name in names if name))
    return _checked((_file(entry, base, folder) for entry in entries), folder)


def _text(url: str, access: Access, limit: int, what: str, retries: int = Spec.retries) -> str:
    """Read a small file as text, with retries; ``limit`` in bytes guards against endless responses."""
    for failures in range(retries + 1):
        try:
            data = _read(url, access, limit, what)
            break
        except RetryableDownloadError as lost:
            if failures == retries:
                raise DataError(
                    f"{what} {redact_url(url)}: {lost} ({retries + 1} attempts); is the server there?"
                ) from None
            time.sleep(lost.pause if lost.pause is not None else backoff(failures))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{what} '{redact_url(url)}' is not text in UTF-8; is it the right file?") from None


def _read(url: str, access: Access, limit: int, what: str) -> bytes:
    data = bytearray()
    with contextlib.closing(open_url(url, access)) as opened:
        while chunk := opened.read(1 << 16):
            data += chunk
            if len(data) > limit:
                raise DataError(f"{what} '{redact_url(url)}' is larger than {limit:,} bytes; is it the right file?")
    if opened.size is not None and len(data) < opened.size:
        raise RetryableDownloadError(f"it ended after {len(data):,} of {opened.size:,} bytes")
    return bytes(data)


def _entries(text: str, source: str) -> Iterable[SpecFileEntry]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _CHECKSUM_FIRST.fullmatch(line.rstrip()) or _NAME_FIRST.fullmatch(line.rstrip())
        if match is None:
            raise DataError(
                f"{source}, line {number}: expected 'checksum  name' as sha256sum writes it, got {line[:60]!r}"
            )
        digits, name = match["digits"], match["name"]
        name = name.removeprefix("./")  # as `find . | xargs sha256sum` writes it
        yield (
            SpecFileEntry(name=name, sha256=digits)
            if len(digits) == HEX["sha256"]
            else SpecFileEntry(name=name, md5=digits)
        )


def _file(entry: SpecFileEntry, base: str, folder: str) -> RemoteFile:
    check_name(entry.name)
    url = joined(folder, entry.url) if entry.url else joined(base, entry.name, quoted=scheme_of(base) in WEB)
    if is_remote(folder) and not is_remote(url):
        raise DataError(
            f"'{entry.name}' is to come from '{url}', a path of this machine; a spec from afar may not say so"
        )
    kind = next((kind for kind in ("sha256", "md5") if getattr(entry, kind)), None)
    return RemoteFile(entry.name, url, (kind, getattr(entry, kind).lower()) if kind else None, entry.size)


def check_name(name: str) -> None:
    """Raise unless a name is a safe relative path in the folder."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\\" in name or re.match(r"[A-Za-z]:", name):
        raise DataError(f"the name {name[:100]!r} leads out of the folder; names are relative, without '..'")
    if any(part in ("", ".", WORKINGS) for part in parts) or re.search(r"[\x00-\x1f\x7f]", name):
        raise DataError(f"{name[:100]!r} is no good name for a file")
    if len(name.encode("utf-8", "replace")) > 1024 or any(len(part.encode("utf-8", "replace")) > 255 for part in parts):
        raise DataError(f"the name {name[:40]!r}... is too long: 255 bytes at most between slashes, 1024 in all")


def _checked(files: Iterable[RemoteFile], folder: str) -> list[RemoteFile]:
    result: dict[str, RemoteFile] = {}
    for file in files:
        if file.name in result:
            raise DataError(f"{redact_url(folder)}: the file '{file.name[:100]}' is listed twice; keep one")
        result[file.name] = file
        if len(result) > MOST_FILES:
            raise DataError(f"{redact_url(folder)}: more than {MOST_FILES:,} files; pack them into fewer, larger ones")
    return list(result.values())


def joined(folder: str, name: str, *, quoted: bool = False) -> str:
    """Return ``name`` relative to ``folder``; unchanged if it is a URL or an absolute path."""
    if not name or scheme_of(name):
        return name or folder
    if not is_remote(folder) and scheme_of(folder) != "file":
        return os.path.join(folder, name)
    return f"{folder.rstrip('/')}/{quote(name) if quoted else name}"


def folder_of(url: str) -> str:
    """Return the folder of a file. A query belongs to the file, not to its folder."""
    url = url.split("?", 1)[0] if scheme_of(url) in WEB else url
    return url.rpartition("/")[0] if scheme_of(url) else os.path.dirname(url)


def _fleet_base(found: Mapping[str, Any], source: str) -> Any:
    if "bos_path" in found:
        return found["bos_path"]
    place = next((str(found[key]) for key in _FLEET_PLACE if key in found), "")
    if "data_path" not in found:
        raise UsageError(f"{source}: '{next(iter(found))}' needs data_path beside it, the folder in that file system")
    return f"{place.rstrip('/')}/{str(found['data_path']).lstrip('/')}" if place else found["data_path"]


def _without_repeats(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Build a dict, and raise for duplicate names, of which YAML and JSON would silently take the last."""
    made: dict[Any, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"'{name}' is given twice; keep one")
        made[name] = value
    return made


def _parse_yaml(text: str) -> Any:
    import yaml

    class UniqueKeyLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Mapping[Any, Any]:
            _without_repeats((self.construct_object(key, deep=True), None) for key, _ in node.value)
            return super().construct_mapping(node, deep=deep)  # type: ignore[no-any-return]

    try:
        # Nested aliases can expand one line to a gigabyte when they are printed.
        if "*" in text and any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, Loader=UniqueKeyLoader)):
            raise ValueError("it has an alias ('*name'); write it out")
        return yaml.load(text, Loader=UniqueKeyLoader)
    except (yaml.YAMLError, TypeError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        raise ValueError(f"line {mark.line + 1}: {problem}" if mark else str(problem or error)) from None
