"""Replication of a server's files to the next server, byte for byte and record by record.

``RemoteReplica`` is the owner's side, ``ReplicaHost`` the storing side. Journal records are sent before a push is
answered; snapshots are sent when they are complete, then the manifest, and then files that the manifest does not need
are removed. A neighbor that does not answer, or lacks earlier bytes, does not stop training: the replica is behind, one
line is printed, and the next snapshot brings the replica up to date.

A server without state of its own waits for its neighbor: only the neighbor knows if there is a replica. The neighbor
keeps a replica against an older one: it refuses files of an earlier process (a lower epoch) and a manifest of an
earlier change (a lower LSN).
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.base.console import say
from echelon.base.errors import CheckpointError, EchelonError, PeerLost, first_line
from echelon.base.wait_notice import WaitNotice
from echelon.checkpoint.os_errors import cannot_write
from echelon.parameter_server.persistence.journal import segment_number, segment_path, sound_size
from echelon.parameter_server.persistence.restore import MANIFEST, Manifest, read_json
from echelon.parameter_server.protocol.message import MAX_ARRAYS, WireMessage

#: Names of files that a peer may write or read on this server.
_NAME = re.compile(r"journal-\d{8,12}\.seg|snapshot-\d{8,12}\.rec|manifest\.json")
_PIECE = 8 << 20
#: Seconds that a server without state waits for the neighbor that may hold its replica, and between two questions.
PATIENCE, _PAUSE = 300.0, 0.2
#: Largest number of a server in a request.
_MOST_SERVERS = 1 << 16


class ReplicaHost:
    """The files of other servers that this server stores, under ``directory``/mirror-of-N."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._epochs: dict[int, int] = {}  # of the process that wrote last, by server

    def handle(self, frame: WireMessage) -> WireMessage:
        """Answer ``mirror`` and ``mirrored``. This takes no lock of the shard, as two servers may mirror each other."""
        head = frame.head
        server = head.get("server")
        if type(server) is not int or not 0 <= server < _MOST_SERVERS:
            raise EchelonError(f"a replica of server {server!r} was requested; servers are numbered from 0")
        home = self._directory / f"mirror-of-{server}"
        try:
            if head["op"] == "mirrored":
                return self._read(home, head)
            return self._write(home, head, frame.arrays)
        except OSError as error:
            raise CheckpointError(cannot_write(home, error)) from None

    def _write(self, home: Path, head: dict[str, Any], pieces: Sequence[Any]) -> WireMessage:
        self._check_epoch(home, head)
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if "keep" in head:
            _trim(home, _names(head["keep"]), _count(head, "segment"))
            return WireMessage({"ok": True})
        path, offset = home / _checked(head.get("file")), _count(head, "offset")
        aside = path.with_name(f".{path.name}.writing") if path.name == MANIFEST else path
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            size = os.fstat(handle).st_size
            if size < offset:
                return WireMessage({"ok": True, "behind": size})
            if pieces:  # without, the request only creates the file
                os.ftruncate(handle, offset)
            os.lseek(handle, offset, os.SEEK_SET)
            for piece in pieces:
                _write_piece(handle, memoryview(piece).cast("B"))
        finally:
            os.close(handle)
        if aside is not path:
            _check_newer(aside, home)
            _check_complete(aside, home)
            aside.replace(path)
        return WireMessage({"ok": True})

    def _check_epoch(self, home: Path, head: dict[str, Any]) -> None:
        """Raise if a later process of this server has written here."""
        server, epoch = head["server"], _count(head, "epoch")
        if server not in self._epochs:
            own = Manifest.read(home)
            self._epochs[server] = own.epoch if own is not None else 0
        if epoch < self._epochs[server]:
            raise EchelonError(
                f"the replica of server {server} belongs to a later process of it (epoch {self._epochs[server]}) than "
                f"the one that writes (epoch {epoch})"
            )
        self._epochs[server] = epoch

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

    def __init__(
        self, call: Callable[[WireMessage], WireMessage], server: int, directory: Path, session: str, epoch: int = 0
    ) -> None:
        self._call, self._server, self._directory = call, server, directory
        self._session, self.epoch = session, epoch
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

    def fetch(self, stopped: threading.Event | None = None) -> bool:
        """Fetch this server's lost files from the neighbor, and return True if there were any.

        A server without state waits for an answer, up to ``PATIENCE`` seconds, and raises ``PeerLost`` without one: if
        it began anew, it would replace its only replica by nothing.

        stopped:  ends the wait when it is set
        """
        try:
            there: dict[str, int] = self._listed(stopped)
        except (EchelonError, KeyError) as error:
            if isinstance(error, PeerLost) and Manifest.read(self._directory) is None:
                raise
            self._say(f"cannot ask for the replica of server {self._server} ({first_line(error, typed=True)})")
            return False
        lost = self._lost(there)
        for name in sorted(lost, key=lambda name: name == MANIFEST):
            self._fetch(name, there[name])
        return bool(lost)

    def _listed(self, stopped: threading.Event | None) -> dict[str, int]:
        """Return the sizes of the files in the replica."""
        deadline, trouble = time.monotonic() + PATIENCE, ""
        notice = WaitNotice(f"server {self._server}, which has no state", PATIENCE, component="ps")
        with notice.during(lambda: f"the next server, which may hold its replica ({trouble})"):
            while True:
                try:
                    files: dict[str, int] = self._ask({"op": "mirrored"}).head["files"]
                    return files
                except PeerLost as error:
                    trouble = first_line(error)
                    if Manifest.read(self._directory) is not None or (stopped is not None and stopped.is_set()):
                        raise
                    if time.monotonic() > deadline:
                        raise PeerLost(
                            f"server {self._server} has no state, and the next server, which may hold its replica, has "
                            f"not answered for {PATIENCE:g} s ({trouble}); start that server"
                        ) from None
                time.sleep(_PAUSE)

    def _lost(self, there: dict[str, int]) -> list[str]:
        """Return the files that this server needs from the neighbor.

        Without a manifest of its own it needs all of them; else those that the manifest needs and the disk lacks. After
        a power cut a segment may have its length, but zeros in place of its last records.
        """
        own = Manifest.read(self._directory)
        if own is None:
            return list(there)
        needed = {part.file for part in own.chain}
        lost = []
        for name, size in there.items():
            path = self._directory / name
            later = (segment := segment_number(name)) is not None and segment >= own.segment
            if later or name in needed:
                present = 0 if not path.exists() else sound_size(path) if later else path.stat().st_size
                if not path.exists() or present < size:
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
        self._send(segment_path(self._directory, manifest.segment).name, 0, [])  # it must exist, even if it is empty
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
        about = {"worker": -1, "server": self._server, "session": self._session, "epoch": self.epoch}
        answer = self._call(WireMessage({**head, **about}, list(pieces)))
        if "error" in answer.head:
            raise (PeerLost if answer.head.get("lost") else EchelonError)(str(answer.head["error"]))
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


def _check_newer(aside: Path, home: Path) -> None:
    """Raise, and remove the file, if a received manifest is of an earlier change than the stored one."""
    stored = Manifest.read(home)
    received = read_json(aside)
    if stored is not None and int(received["lsn"]) < stored.lsn:
        aside.unlink()
        raise EchelonError(
            f"the replica has all changes up to {stored.lsn}, and is not replaced by one up to {received['lsn']}"
        )


def _check_complete(aside: Path, home: Path) -> None:
    """Raise if a snapshot of the received manifest is not here: this disk may have been replaced while it was sent."""
    for part in Manifest.of_file(aside).chain:
        path = home / part.file
        if not path.exists() or path.stat().st_size != part.bytes:
            raise EchelonError(f"the replica lacks {part.file}, which its manifest needs")


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
