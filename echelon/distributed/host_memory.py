"""Memory that the ranks of one host share, and bells by which they tell each other what lies in it.

Each rank writes into memory files of its own (memfd: no name, and freed with the processes) and rings the others over
Unix sockets. A rank that ends closes its sockets, which the others notice at once.
"""

from __future__ import annotations

import mmap
import os
import select
import shutil
import socket
import struct
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from echelon.base.errors import PeerLost
from echelon.distributed.collectives import gather_json

Bytes = NDArray[np.uint8]

#: Seconds in which ranks of one host find each other; after that they use torch.distributed.
MEETING = 10.0
#: First size of a memory file. It grows with what lies in it.
FIRST = 1 << 20


class MemoryFile:
    """A memory file of this rank or of another one, mapped as far as it has been needed."""

    def __init__(self, handle: int) -> None:
        self._handle, self._size = handle, 0
        self._bytes: Bytes = np.empty(0, np.uint8)

    @classmethod
    def create(cls) -> MemoryFile:
        made = cls(_memory_file())
        made.grow(FIRST)
        return made

    def fileno(self) -> int:
        return self._handle

    def reserve(self, size: int) -> None:
        """Make the file at least this long."""
        if size > os.fstat(self._handle).st_size:
            self.grow(size)

    def grow(self, size: int) -> None:
        os.ftruncate(self._handle, max(size, 2 * self._size))

    def at(self, offset: int, length: int) -> Bytes:
        """Return a part of the file; an earlier, shorter mapping lasts as long as arrays that lie in it."""
        if offset + length > self._size:
            self._size = os.fstat(self._handle).st_size
            if offset + length > self._size:
                raise PeerLost("a message of another rank lies beyond its memory file")
            self._bytes = np.frombuffer(mmap.mmap(self._handle, self._size), np.uint8)
        return self._bytes[offset : offset + length]

    def close(self) -> None:
        os.close(self._handle)


class HostMemory:
    """The memory files of all ranks of a group on one host, and a socket to each other rank.

    rank:    this rank's index in the group
    noun:    word for a rank in messages
    what:    the exchange that a rank may be missing from
    timeout: seconds that another rank may stay away
    """

    def __init__(
        self,
        rank: int,
        bells: dict[int, socket.socket],
        files: dict[int, Sequence[MemoryFile]],
        timeout: float,
        noun: str,
        what: str,
    ) -> None:
        self.rank, self.bells, self.files = rank, bells, files
        self._timeout, self._noun, self._what = timeout, noun, what
        limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
        for bell in bells.values():
            bell.setblocking(True)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                bell.setsockopt(socket.SOL_SOCKET, option, limit)

    @property
    def ranks(self) -> int:
        return len(self.files)

    def ring(self, rank: int, note: bytes) -> None:
        """Send a note to another rank. Raises ``PeerLost`` if it has ended."""
        try:
            self.bells[rank].sendall(note)
        except BlockingIOError:
            raise self._away(rank) from None
        except OSError:
            raise self._lost(rank) from None

    def try_to_ring(self, rank: int, note: bytes) -> bool:
        """Send a short note unless too many of them wait for the other rank. Raises ``PeerLost`` if it has ended."""
        try:
            return self.bells[rank].send(note, socket.MSG_DONTWAIT) == len(note)
        except BlockingIOError:
            return False
        except OSError:
            raise self._lost(rank) from None

    def wait_for_room(self, rank: int) -> list[int]:
        """Wait until another rank has room for a note, and return the ranks that have sent some in the meantime."""
        poll = select.poll()
        for other, bell in self.bells.items():
            poll.register(bell, select.POLLIN | (select.POLLOUT if other == rank else 0))
        ready = dict(poll.poll(1e3 * self._timeout))
        if not ready:
            raise self._away(rank)
        return [other for other, bell in self.bells.items() if ready.get(bell.fileno(), 0) & ~select.POLLOUT]

    def heard(self, rank: int, size: int) -> bytes:
        """Wait for a note of ``size`` bytes. Raises ``PeerLost`` if the other rank has ended or does not come."""
        try:
            note = self.bells[rank].recv(size, socket.MSG_WAITALL)
        except BlockingIOError:
            raise self._away(rank) from None
        except OSError:
            raise self._lost(rank) from None
        if len(note) < size:
            raise self._lost(rank)
        return note

    def _away(self, rank: int) -> PeerLost:
        noun = self._noun
        return PeerLost(
            f"{noun} {self.rank}: {noun} {rank} has not come to the {self._what} for {self._timeout:.0f} s; it stands "
            "still, or does something that the others do not: see its log"
        )

    def _lost(self, rank: int) -> PeerLost:
        noun = self._noun
        return PeerLost(f"{noun} {self.rank}: lost contact with {noun} {rank}, which has ended; see its log")

    def close(self) -> None:
        for bell in self.bells.values():
            bell.close()
        for files in self.files.values():
            for file in files:
                file.close()
        self.bells, self.files = {}, {}


def share_host_memory(group: dist.ProcessGroup, files: int, timeout: float, noun: str, what: str) -> HostMemory | None:
    """Return memory of all ranks of a Gloo group if they are on one host and can share it; else None, on all of them.

    files: number of memory files of each rank; ``timeout``, ``noun`` and ``what`` are those of ``HostMemory``
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.settimeout(MEETING)
        place = ""
        with suppress(OSError):
            os.close(_memory_file())
            folder = tempfile.mkdtemp(prefix="echelon-")  # of this user alone
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            listener.bind(f"{folder}/bell")
            listener.listen(ranks)
            place = f"{folder}/bell"
        hosts_and_places: list[list[str]] = gather_json([_host(), place], group)
        places = [place for _, place in hosts_and_places]
        alike = all(host == hosts_and_places[0][0] for host, _ in hosts_and_places)
        made = None
        if all(gather_json(alike and all(os.access(each, os.W_OK) for each in places), group)):
            made = _met(rank, listener, places, files)
        found = None if made is None else HostMemory(rank, *made, timeout, noun, what)
        if all(gather_json(found is not None, group)):
            return found
    if found is not None:
        found.close()
    return None


def _memory_file() -> int:
    """Return a new memory file. Raises ``OSError`` if this system has none."""
    if not hasattr(os, "memfd_create"):  # it is Linux's own
        raise OSError("no memory files on this system")
    return os.memfd_create("echelon", os.MFD_CLOEXEC)


def _host() -> str:
    """Return what ranks of one host have in common: the boot of the system, and the network that they see."""
    try:
        network = os.readlink("/proc/self/ns/net")
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {network}"
    except OSError:
        return socket.gethostname()


def _met(
    rank: int, listener: socket.socket, places: Sequence[str], count: int
) -> tuple[dict[int, socket.socket], dict[int, Sequence[MemoryFile]]] | None:
    """Connect with every other rank and swap memory files with it; None if that fails."""
    bells: dict[int, socket.socket] = {}
    files: dict[int, Sequence[MemoryFile]] = {}
    try:
        files[rank] = [MemoryFile.create() for _ in range(count)]
        for other in range(rank):
            bells[other] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            bells[other].settimeout(MEETING)
            bells[other].connect(places[other])
            bells[other].sendall(struct.pack("q", rank))
        for _ in range(rank + 1, len(places)):
            bell, _ = listener.accept()
            bell.settimeout(MEETING)
            bells[struct.unpack("q", bell.recv(8, socket.MSG_WAITALL))[0]] = bell
        for bell in bells.values():
            socket.send_fds(bell, [b"f"], [file.fileno() for file in files[rank]])
        for other, bell in bells.items():
            _, handles, _, _ = socket.recv_fds(bell, 1, count)
            files[other] = [MemoryFile(handle) for handle in handles]
        if all(len(each) == count for each in files.values()):
            return bells, files
    except (OSError, struct.error):
        pass
    for bell in bells.values():
        bell.close()
    for file in (file for of_rank in files.values() for file in of_rank):
        file.close()
    return None
