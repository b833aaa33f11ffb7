"""Memory that a worker and a server on one host share, for the arrays of long messages; the head goes by the socket.

The caller makes a memory file (memfd: no name, freed with the processes) and offers it on a connection on which both
ends have proven the token. The server opens it through ``/proc``, which the system allows to the same user only. The
file is sealed against becoming shorter, so that neither end can make the other fail.

Each end writes into a half of its own. The receiver's long arrays lie there, without a copy. When none of them is used
any more, the next message of the receiver says so, and the writer may use their place again.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.parameter_server.protocol.message import WireMessageError

#: Bytes of each end's half. Messages for which it has no room go through the socket.
HALF = 1 << 23
#: Arrays of fewer bytes go through the socket, which takes no longer for them.
LEAST = 1 << 15
_NONCE = 32
_START = 64  #: bytes before the halves
_LINE = 64
_NAME = "echelon-frames"
_CALLER, _CALLED = 0, 1
_NOTHING: NDArray[np.uint8] = np.empty(0, np.uint8)


class FrameMemory:
    """One end's view of the memory."""

    def __init__(self, handle: int, side: int) -> None:
        """Map the memory file, and close the handle."""
        try:
            self._map = mmap.mmap(handle, _START + 2 * HALF)
        finally:
            os.close(handle)
        self._own: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, HALF, _START + side * HALF)
        self._others = _START + (1 - side) * HALF
        self._held: deque[tuple[int, int]] = deque()  # begin and end of what is written and may be in use
        self._put = self._released = 0
        self._taken = self._done = 0
        self._unused: set[int] = set()  # numbers of messages that were taken and are not in use any more

    def put(self, bodies: Sequence[Any]) -> int:
        """Write arrays, and return the offset; -1 if they are short or there is no room for them."""
        sizes = [memoryview(body).nbytes for body in bodies]
        needed = sum(map(_aligned, sizes))
        if needed < LEAST or (begin := self._room(needed)) < 0:
            return -1
        at = begin
        for body, size in zip(bodies, sizes, strict=True):
            self._own[at : at + size] = np.frombuffer(body, np.uint8)
            at += _aligned(size)
        self._held.append((begin, at))
        self._put += 1
        return begin

    def _room(self, needed: int) -> int:
        """Return the offset of free memory: at the beginning where possible, because that is in the caches; or -1."""
        held = tuple(self._held)  # of one moment: another thread may release at the same time
        if not held:
            return 0 if needed <= HALF else -1
        first, last = held[0][0], held[-1][1]
        if first < last:
            if needed <= first:
                return 0
            return last if needed <= HALF - last else -1
        return last if needed <= first - last else -1

    def release(self, done: int) -> None:
        """Free the first ``done`` messages. Raises ``WireMessageError`` if there are fewer, or were more before."""
        if not self._released <= done <= self._put:
            raise WireMessageError(f"{done} messages in shared memory are said to be done with, of {self._put}")
        while self._released < done:
            self._held.popleft()
            self._released += 1

    def take(self, offset: int, sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Return the arrays that the other end has written at ``offset``; they last as long as they are used."""
        if offset < 0 or offset + sum(map(_aligned, sizes)) > HALF:
            raise WireMessageError(f"a message of {sum(sizes)} bytes at {offset} lies outside the shared memory")
        found, used = [], _Use(self._unused, self._taken)
        for size in sizes:
            array = np.frombuffer(self._map, np.uint8, size, self._others + offset) if size else _NOTHING
            if size < LEAST:
                array = array.copy()  # such as a worker's state, which a server keeps
            else:
                weakref.finalize(array, used.end).atexit = False  # views of it keep it alive
                used.arrays += 1
            found.append(array)
            offset += _aligned(size)
        if not used.arrays:
            self._unused.add(self._taken)
        self._taken += 1
        return found

    def done(self) -> int:
        """Return the number of messages of the other end, from the first on, that are not in use any more."""
        while self._done in self._unused:
            self._unused.remove(self._done)
            self._done += 1
        return self._done


class _Use:
    """The arrays of one message that are in use. Any thread may drop the last one."""

    def __init__(self, unused: set[int], number: int) -> None:
        self._unused, self._number, self.arrays = unused, number, 0
        self._ended: list[None] = []  # one entry for each array: appending is atomic, counting is not

    def end(self) -> None:
        self._ended.append(None)
        if len(self._ended) == self.arrays:
            self._unused.add(self._number)


class FrameMemoryOffer:
    """A new memory file of this process, which the server may open until ``close``."""

    def __init__(self) -> None:
        self._handle = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        nonce = secrets.token_bytes(_NONCE)
        os.ftruncate(self._handle, _START + 2 * HALF)
        os.pwrite(self._handle, nonce, 0)
        fcntl.fcntl(self._handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.head = {"op": "share_memory", "pid": os.getpid(), "file": self._handle, "nonce": nonce.hex()}

    def accepted(self) -> FrameMemory:
        return FrameMemory(os.dup(self._handle), _CALLER)

    def close(self) -> None:
        os.close(self._handle)


def offer_memory() -> FrameMemoryOffer | None:
    """Return a memory file for a server on this host; None if this system has none."""
    with contextlib.suppress(OSError, AttributeError):
        return FrameMemoryOffer()
    return None


def open_offered(head: dict[str, Any]) -> FrameMemory | None:
    """Return the memory that a caller has offered; None if it is not here, or not as it should be."""
    pid, file, nonce = head.get("pid"), head.get("file"), head.get("nonce")
    if type(pid) is not int or type(file) is not int or pid <= 0 or file < 0 or not isinstance(nonce, str):
        return None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        path = f"/proc/{pid}/fd/{file}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # nothing else is ever opened
            return None
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        if not _is_sound(handle, bytes.fromhex(nonce)):
            os.close(handle)
            return None
        return FrameMemory(handle, _CALLED)
    return None


def _is_sound(handle: int, nonce: bytes) -> bool:
    """Return True for a file of this user, of the right size, that stays so, and that holds what its maker has said."""
    about = os.fstat(handle)
    sealed = fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    same = len(nonce) == _NONCE and secrets.compare_digest(os.pread(handle, _NONCE, 0), nonce)
    return bool(sealed) and about.st_uid == os.geteuid() and about.st_size == _START + 2 * HALF and same


def _aligned(size: int) -> int:
    return -(-size // _LINE) * _LINE
