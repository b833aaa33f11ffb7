"""``SharedMemoryExchange``: messages between the workers of one host lie in memory that they share.

Each worker writes into two memory files of its own in turn (memfd: no name, and freed with the processes), and tells
every other worker over a Unix socket where its message lies. A worker that ends closes its sockets, which the others
notice at once.
"""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import torch.distributed as dist

from echelon.base.errors import PeerLost
from echelon.distributed.activity import waiting
from echelon.distributed.collectives import gather_json
from echelon.parameter_server.worker.row_exchange import Bytes, aligned

#: Seconds in which workers of one host find each other; after that they use torch.distributed.
MEETING = 10.0
#: First size of a memory file. It grows with the messages.
FIRST = 1 << 20
_NOTE = struct.Struct("qq")  # offset and length of a message


class MemoryFile:
    """A memory file of this worker or of another one, mapped as far as it has been needed."""

    def __init__(self, handle: int) -> None:
        self._handle, self._size = handle, 0
        self._bytes: Bytes = np.empty(0, np.uint8)

    @classmethod
    def create(cls) -> MemoryFile:
        made = cls(os.memfd_create("echelon-rows", os.MFD_CLOEXEC))
        made.grow(FIRST)
        return made

    def fileno(self) -> int:
        return self._handle

    def grow(self, size: int) -> None:
        os.ftruncate(self._handle, max(size, 2 * self._size))

    def at(self, offset: int, length: int) -> Bytes:
        """Return a part of the file; an earlier, shorter mapping lasts as long as arrays that lie in it."""
        if offset + length > self._size:
            self._size = os.fstat(self._handle).st_size
            if offset + length > self._size:
                raise PeerLost("a message of another worker lies beyond its memory file")
            self._bytes = np.frombuffer(mmap.mmap(self._handle, self._size), np.uint8)
        return self._bytes[offset : offset + length]

    def close(self) -> None:
        os.close(self._handle)


class SharedMemoryExchange:
    """An exchange between the workers of one host.

    bells:  a socket to each other worker
    files:  two memory files of each worker
    """

    how = "shared memory"

    def __init__(
        self, rank: int, bells: dict[int, socket.socket], files: dict[int, Sequence[MemoryFile]], timeout: float
    ) -> None:
        self._rank, self._bells, self._files, self._timeout = rank, bells, files, timeout
        self._turn = 0
        self._notes: list[tuple[int, int]] = []
        for bell in bells.values():
            bell.setblocking(True)
            bell.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
            )

    def outgoing(self, sizes: Sequence[int]) -> list[Bytes]:
        own, needed = self._files[self._rank][self._turn], sum(map(aligned, sizes))
        if needed > os.fstat(own.fileno()).st_size:
            own.grow(needed)
        self._notes, offset = [], 0
        for size in sizes:
            self._notes.append((offset, size))
            offset += aligned(size)
        own.at(0, offset)  # mapped at once
        return [own.at(*note) for note in self._notes]

    def swap(self, kind: int) -> list[Bytes]:
        turn, self._turn = self._turn, 1 - self._turn
        with waiting("rows of tables", "", None):
            for worker, bell in self._bells.items():
                self._ring(worker, bell)
            notes = {worker: self._heard(worker, bell) for worker, bell in self._bells.items()}
        notes[self._rank] = self._notes[self._rank]
        return [self._files[worker][turn].at(*notes[worker]) for worker in sorted(notes)]

    def _ring(self, worker: int, bell: socket.socket) -> None:
        try:
            bell.sendall(_NOTE.pack(*self._notes[worker]))
        except OSError:
            raise self._lost(worker) from None

    def _heard(self, worker: int, bell: socket.socket) -> tuple[int, int]:
        try:
            note = bell.recv(_NOTE.size, socket.MSG_WAITALL)
        except BlockingIOError:
            raise PeerLost(
                f"worker {self._rank}: worker {worker} has not come to the exchange of rows of sparse tables for "
                f"{self._timeout:.0f} s; it stands still, or does something that the others do not: see its log"
            ) from None
        except OSError:
            raise self._lost(worker) from None
        if len(note) < _NOTE.size:
            raise self._lost(worker)
        offset, length = _NOTE.unpack(note)
        return offset, length

    def _lost(self, worker: int) -> PeerLost:
        return PeerLost(f"worker {self._rank}: lost contact with worker {worker}, which has ended; see its log")

    def close(self) -> None:
        for bell in self._bells.values():
            bell.close()
        for files in self._files.values():
            for file in files:
                file.close()


def share_memory(rank: int, ranks: int, control: dist.ProcessGroup, timeout: float) -> SharedMemoryExchange | None:
    """Return an exchange if all workers are on one host and can share memory; else None, on all of them."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.settimeout(MEETING)
        place = ""
        with suppress(OSError):
            folder = tempfile.mkdtemp(prefix="echelon-rows-")  # of this user alone
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            listener.bind(f"{folder}/bell")
            listener.listen(ranks)
            place = f"{folder}/bell"
        places: list[list[str]] = gather_json([_host(), place], control)
        made = None
        if all(host == places[0][0] and place for host, place in places):
            made = _met(rank, listener, [place for _, place in places], timeout)
        if all(gather_json(made is not None, control)):
            return made
    if made is not None:
        made.close()
    return None


def _host() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _met(rank: int, listener: socket.socket, places: Sequence[str], timeout: float) -> SharedMemoryExchange | None:
    """Connect with every other worker and swap memory files with it; None if that fails."""
    bells: dict[int, socket.socket] = {}
    files: dict[int, Sequence[MemoryFile]] = {}
    try:
        files[rank] = [MemoryFile.create(), MemoryFile.create()]
        for worker in range(rank):
            bells[worker] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            bells[worker].settimeout(MEETING)
            bells[worker].connect(places[worker])
            bells[worker].sendall(struct.pack("q", rank))
        for _ in range(rank + 1, len(places)):
            bell, _ = listener.accept()
            bell.settimeout(MEETING)
            bells[struct.unpack("q", bell.recv(8, socket.MSG_WAITALL))[0]] = bell
        for bell in bells.values():
            socket.send_fds(bell, [b"f"], [file.fileno() for file in files[rank]])
        for worker, bell in bells.items():
            _, handles, _, _ = socket.recv_fds(bell, 1, 2)
            files[worker] = [MemoryFile(handle) for handle in handles]
        return SharedMemoryExchange(rank, bells, files, timeout)
    except (OSError, struct.error):
        SharedMemoryExchange(rank, bells, files, timeout).close()
        return None
