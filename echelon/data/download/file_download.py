"""Downloads one file: a partial file grows under a lock until it is complete and verified, and then gets its name.

The lock is a flock on the partial file: it ends with the process that holds it, for any reason. Partial files have
their own folder, so that no pattern such as ``data/**`` matches them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from echelon.base.errors import DataError
from echelon.base.formatting import size as bytes_in_words
from echelon.data.download.spec import WORKINGS, RemoteFile
from echelon.data.download.url_source import (
    Access,
    OpenRemoteFile,
    RetryableDownloadError,
    backoff,
    open_url,
    redact_url,
)

CHUNK = 1 << 18
#: Bytes after which an attempt counts as a success: a connection that breaks every few minutes can finish a large file.
PROGRESS = 1 << 20


class DownloadStopped(Exception):
    """Another file or another host failed, so this download is stopped."""


class FileFetcher:
    """Downloads files into ``folder``, from several threads.

    came:  called with the number of bytes of each received chunk
    stop:  event that ends all downloads
    """

    def __init__(
        self, folder: Path, access: Access, retries: int, came: Callable[[int], None], stop: threading.Event
    ) -> None:
        self._folder, self._access, self._retries = folder, access, retries
        self._came, self._stop = came, stop
        self._workings = folder / WORKINGS
        with explain_os_errors(folder):
            self._workings.mkdir(parents=True, exist_ok=True)
        self._verified = VerifiedFiles(self._workings / "verified.jsonl")

    def fetch(self, file: RemoteFile) -> None:
        """Return when the file is in its place, downloaded by this or another process."""
        target = self._folder / file.name
        with explain_os_errors(target):
            if self._verified.is_verified(file, target):
                return
            target.parent.mkdir(parents=True, exist_ok=True)
            part = self._workings / f"{hashlib.sha256(file.name.encode()).hexdigest()[:24]}.part"
            with self._locked(part) as handle:
                if self._verified.learn(file, target):
                    _remove(part)
                    return
                self._fetch_twice_if_damaged(file, target, part, handle)

    def _fetch_twice_if_damaged(self, file: RemoteFile, target: Path, part: Path, handle: FileIO) -> None:
        for attempt in range(2):
            if not self._complete(file, target, part, handle):
                _remove(part)
                return
            found = digest(part, file.checksum[0]) if file.checksum else ""
            if not file.checksum or found == file.checksum[1]:
                self._put_in_place(file, target, part, handle)
                return
            handle.truncate(0)
            if attempt:
                _remove(part)
                raise DataError(
                    f"'{file.name}' from {redact_url(file.url)} came twice with {file.checksum[0]} {found}, but the "
                    f"spec says {file.checksum[1]}; the file or the spec is damaged or out of date"
                )

    def _put_in_place(self, file: RemoteFile, target: Path, part: Path, handle: FileIO) -> None:
        os.fsync(handle.fileno())
        part.replace(target)
        _version_file(part).unlink(missing_ok=True)
        _sync_folder(target.parent)
        self._verified.add(file, target)

    def _complete(self, file: RemoteFile, target: Path, part: Path, handle: FileIO) -> bool:
        """Fill the partial file, with retries. Returns False if the file in place is already the one to download."""
        failures = 0
        while True:
            had = _length(handle)
            try:
                return self._attempt(file, target, part, handle)
            except RetryableDownloadError as lost:
                failures = 0 if _length(handle) - had >= PROGRESS else failures + 1
                if failures > self._retries:
                    raise DataError(
                        f"{redact_url(file.url)}: {lost} ({failures} attempts, {_length(handle):,} bytes are here); "
                        "run it again to go on from there"
                    ) from None
                self._pause(lost.pause if lost.pause is not None else backoff(failures))

    def _attempt(self, file: RemoteFile, target: Path, part: Path, handle: FileIO) -> bool:
        version = _version_file(part).read_text() if _version_file(part).exists() else ""
        # One byte less than we have: a server refuses a range that begins at the end of the file.
        start = max(0, _length(handle) - 1) if version or file.checksum else 0
        opened = open_url(file.url, self._access, start, version)
        try:
            size = _agreed_size(file, opened)
            if file.checksum is None and target.is_file() and target.stat().st_size == size:
                self._verified.add(file, target)  # without a checksum only the size can be compared, and it is equal
                return False
            if opened.start == 0:
                handle.truncate(0)
                _version_file(part).write_text(opened.version)
            _check_room(self._folder, size, opened.start)
            self._pour(opened, file, size, handle)
        finally:
            opened.close()
        return True

    def _pour(self, opened: OpenRemoteFile, file: RemoteFile, size: int | None, handle: FileIO) -> None:
        handle.truncate(opened.start)
        done = handle.seek(opened.start)
        while chunk := opened.read(CHUNK):
            done += len(chunk)
            if size is not None and done > size:
                handle.truncate(0)
                raise DataError(
                    f"{redact_url(file.url)} sends more than the {size:,} bytes it should have; nothing is kept"
                )
            _write(handle, chunk)
            self._came(len(chunk))
            if self._stop.is_set():
                raise DownloadStopped
        if size is not None and done < size:
            raise RetryableDownloadError(f"the connection ended after {done:,} of {size:,} bytes")

    @contextlib.contextmanager
    def _locked(self, part: Path) -> Iterator[FileIO]:
        """Open and lock the partial file. If the previous holder has moved it into place, it is created again."""
        while True:
            with open(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as handle:
                while not _try_lock(handle):
                    self._pause(0.05)
                if _is_still(part, handle):
                    yield handle
                    return

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise DownloadStopped


@contextlib.contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Convert OS errors of the disk to a one-line ``DataError``. Network errors were converted before."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "check the folder and its owner"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = "make room, and run it again to go on from there"
        elif error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENOTEMPTY):
            hint = "a file is in the way of a folder, or the other way round"
        raise DataError(f"'{path}' cannot be written: {reason}; {hint}") from None


def _agreed_size(file: RemoteFile, opened: OpenRemoteFile) -> int | None:
    if file.size is not None and opened.size is not None and file.size != opened.size:
        raise DataError(
            f"{redact_url(file.url)} has {opened.size:,} bytes, but the spec says {file.size:,}; "
            "the file or the spec is out of date"
        )
    return file.size if file.size is not None else opened.size


def _check_room(folder: Path, size: int | None, start: int) -> None:
    """Raise if the disk has too little free space for the rest of the file, if its size is known."""
    free = shutil.disk_usage(folder).free
    if size is not None and size - start > free:
        needs = f"{bytes_in_words(size - start)} more are needed, {bytes_in_words(free)} are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {needs}")


def _write(handle: FileIO, chunk: bytes) -> None:
    """Write all bytes: a disk that becomes full accepts a part first, and refuses the rest."""
    left = memoryview(chunk)
    while left:
        left = left[handle.write(left) :]


def _try_lock(handle: FileIO) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(path: Path, handle: FileIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle.fileno()))
    except FileNotFoundError:
        return False


def _length(handle: FileIO) -> int:
    return os.fstat(handle.fileno()).st_size


def _version_file(part: Path) -> Path:
    """Return the path of the file with the version to which the partial file belongs."""
    return part.with_suffix(".version")


def _remove(part: Path) -> None:
    part.unlink(missing_ok=True)
    _version_file(part).unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class VerifiedFiles:
    """A file with one line per verified file. Lines that are invalid or out of date are ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_to = 0
        self._known: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._hear()

    def is_verified(self, file: RemoteFile, target: Path) -> bool:
        """Return True if the file in place is the one that was verified, and still matches the spec."""
        known = self._known.get(file.name)
        return known is not None and target.is_file() and known == _facts(file, target)

    def learn(self, file: RemoteFile, target: Path) -> bool:
        """Return True if the file in place matches the spec, as far as that is known without a request; remember it."""
        if not target.is_file() or (file.size is not None and target.stat().st_size != file.size):
            return False
        self._hear()  # another process may have downloaded it while this one waited for the lock
        if self.is_verified(file, target):
            return True
        good = digest(target, file.checksum[0]) == file.checksum[1] if file.checksum else file.size is not None
        if good:
            self.add(file, target)
        return good

    def add(self, file: RemoteFile, target: Path) -> None:
        line = json.dumps([file.name, *_facts(file, target)]) + "\n"
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, line.encode())  # in one write, because other processes append too
        finally:
            os.close(handle)

    def _hear(self) -> None:
        """Read the lines that this or other processes have appended since the last call."""
        with self._lock, contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read_to)
            for line in file:
                self._read_to += len(line)
                with contextlib.suppress(ValueError, TypeError):
                    name, *facts = json.loads(line)
                    self._known[name] = facts


def digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _facts(file: RemoteFile, target: Path) -> list[Any]:
    result = target.stat()
    wanted = ":".join(file.checksum) if file.checksum else file.url.split("?", 1)[0]
    return [result.st_size, result.st_mtime_ns, wanted]
