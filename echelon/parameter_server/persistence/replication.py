"""Replication of a server's files to the next server, byte for byte and record by record.

``RemoteReplica`` is the owner's side, ``ReplicaHost`` the storing side. Journal records are sent before a push is
answered; snapshots are sent when they are complete, then the manifest, and then files that the manifest does not need
are removed. A neighbor that does not answer, or lacks earlier bytes, does not stop training: the replica is behind, one
line is printed, and the next snapshot brings the replica up to date.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.base.console import say
from echelon.base.errors import CheckpointError, EchelonError, first_line
from echelon.checkpoint.os_errors import cannot_write
from echelon.parameter_server.persistence.journal import segment_number
from echelon.parameter_server.persistence.restore import MANIFEST, Manifest
from echelon.parameter_server.protocol.message import MAX_ARRAYS, WireMessage

#: Names of files that a peer may write or read on this server.
_NAME = re.compile(r"journal-\d{8,12}\.seg|snapshot-\d{8,12}\.rec|manifest\.json")
_PIECE = 8 << 20


class ReplicaHost:
    """The files of other servers that this server stores, under ``directory``/mirror-of-N."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def handle(self, frame: WireMessage) -> WireMessage:
        """Answer ``mirror`` and ``mirrored``. This takes no lock of the shard, as two servers may mirror each other."""
        head = frame.head
        server = head.get("server")
        if type(server) is not int or server < 0:
            raise EchelonError(f"a replica of server {server!r} was requested; servers are numbered from 0")
        home = self._directory / f"mirror-of-{server}"
        try:
            if head["op"] == "mirrored":
                return self._read(home, head)
            return self._write(home, head, frame.arrays)
        except OSError as error:
            raise CheckpointError(cannot_write(home, error)) from None

    def _write(self, home: Path, head: dict[str, Any], pieces: Sequence[Any]) -> WireMessage:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if "keep" in head:
            _trim(home, _names(head["keep"]), _count(head, "segment"))
            return WireMessage({"ok": True})
        path, offset = home / _checked(head.get("file")), _count(head, "offset")
        aside = path.with_name(f".{path.name}.writing") if path.name == MANIFEST else path
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            size = os.fstat(handle).st_size
            if size < offset:
                return WireMessage({"ok": True, "behind": size})
            os.ftruncate(handle, offset)
            os.lseek(handle, offset, os.SEEK_SET)
            for piece in pieces:
                _write_piece(handle, memoryview(piece).cast("B"))
        finally:
            os.close(handle)
        if aside is not path:
            aside.replace(path)
        return WireMessage({"ok": True})

    def _read(self, home: Path, head: dict[str, Any]) -> WireMessage:
        if "file" not in head:
            found = list(home.iterdir()) if home.is_dir() else []
            return WireMessage(
                {"ok": True, "files": {p.name: p.stat().st_size for p in found if _NAME.fullmatch(p.name)}}
            )
        with (home / _checked(head["file"])).open("rb") as file:
            file.seek(_count(head, "offset"))
            return WireMessage({"ok": True}, [np.frombuffer(file.read(_PIECE), np.uint8)])


class RemoteReplica:
    """The copy of this server's files on the next server."""

    def __init__(self, call: Callable[[WireMessage], WireMessage], server: int, directory: Path) -> None:
        self._call, self._server, self._directory = call, server, directory
        self.behind = True  #: the neighbor lacks data; sending resumes with the next segment
        self._said = False

    def begin(self) -> None:
        """Resume sending, because a new segment begins."""
        self.behind = False

    def append(self, file: str, offset: int, buffers: Sequence[Any]) -> None:
        """Send a record that was just written; return when the neighbor has it or is known to be behind."""
        if self.behind:
            return
        pieces = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        if len(pieces) > MAX_ARRAYS:
            pieces = [np.concatenate(pieces)]
        self._guarded(lambda: self._send(file, offset, pieces))

    def follow(self, manifest: Manifest) -> None:
        """Send the files of a complete snapshot, then remove the replaced ones from the replica."""
        if not self.behind:
            self._guarded(lambda: self._follow(manifest))

    def fetch(self) -> bool:
        """Fetch this server's lost files from the neighbor, and return True if there were any."""
        try:
            there: dict[str, int] = self._ask({"op": "mirrored"}).head["files"]
        except (EchelonError, KeyError) as error:
            self._say(f"cannot ask for the replica of server {self._server} ({first_line(error, typed=True)})")
            return False
        lost = self._lost(there)
        for name in sorted(lost, key=lambda name: name == MANIFEST):
            self._fetch(name, there[name])
        return bool(lost)

    def _lost(self, there: dict[str, int]) -> list[str]:
        """Return the files that this server needs from the neighbor.

        Without a manifest of its own it needs all of them; else those that the manifest needs and the disk lacks.
        """
        own = Manifest.read(self._directory)
        if own is None:
            return list(there)
        needed = {part.file for part in own.chain}
        lost = []
        for name, size in there.items():
            path = self._directory / name
            later = (segment := segment_number(name)) is not None and segment >= own.segment
            if (later or name in needed) and (not path.exists() or path.stat().st_size < size):
                lost.append(name)
        return lost

    def _fetch(self, name: str, size: int) -> None:
        path = self._directory / _checked(name)
        aside = path.with_name(f".{name}.writing")
        with aside.open("wb") as file:
            while file.tell() < size:
                piece = self._ask({"op": "mirrored", "file": name, "offset": file.tell()}).arrays[0]
                if not piece.size:
                    raise CheckpointError(
                        f"the replica of {path.name} is shorter than announced; start the server again"
                    )
                file.write(piece.tobytes())
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)

    def _follow(self, manifest: Manifest) -> None:
        there: dict[str, int] = self._ask({"op": "mirrored"}).head["files"]
        for part in manifest.chain:
            if there.get(part.file) != part.bytes:
                self._send_file(part.file)
        self._send_file(MANIFEST)
        keep = [MANIFEST, *(part.file for part in manifest.chain)]
        self._ask({"op": "mirror", "keep": keep, "segment": manifest.segment})

    def _send_file(self, name: str) -> None:
        offset = 0
        for piece in _pieces(self._directory / name):
            self._send(name, offset, [np.frombuffer(piece, np.uint8)])
            offset += len(piece)

    def _send(self, file: str, offset: int, pieces: Sequence[Any]) -> None:
        answer = self._ask({"op": "mirror", "file": file, "offset": offset}, pieces)
        if "behind" in answer.head:
            raise CheckpointError(f"it lacks {file} from byte {answer.head['behind']} on")

    def _ask(self, head: dict[str, Any], pieces: Sequence[Any] = ()) -> WireMessage:
        answer = self._call(WireMessage({**head, "worker": -1, "server": self._server}, list(pieces)))
        if "error" in answer.head:
            raise EchelonError(str(answer.head["error"]))
        return answer

    def _guarded(self, send: Callable[[], None]) -> None:
        try:
            send()
            self._said = False
        except (EchelonError, OSError) as error:
            self.behind = True
            self._say(f"goes on without its replica on the next server ({first_line(error, typed=True)})")

    def _say(self, what: str) -> None:
        if not self._said:
            say(f"server {self._server} {what}")
        self._said = True


def _checked(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise EchelonError(f"{name!r} is not the name of a journal, a snapshot or a manifest")
    return name


def _names(names: Any) -> list[str]:
    if not isinstance(names, list):
        raise EchelonError(f"keep={str(names)[:40]!r} of a replica; it must be a list of names")
    return [_checked(name) for name in names]


def _count(head: dict[str, Any], name: str) -> int:
    value = head.get(name, 0)
    if type(value) is not int or value < 0:
        raise EchelonError(f"{name}={value!r} of a replicated file; it must be 0 or more")
    return value


def _trim(home: Path, keep: Sequence[str], segment: int) -> None:
    """Remove segments before ``segment``, and other files that are not in ``keep``."""
    for path in home.iterdir():
        number = segment_number(path.name)
        if path.name not in keep if number is None else number < segment:
            path.unlink()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece


def _write_piece(handle: int, view: memoryview) -> None:
    while view.nbytes:
        view = view[os.write(handle, view) :]
