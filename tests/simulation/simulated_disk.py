"""Disks that fail as real ones do: a process dies in the middle of a write, a host loses power, space runs out.

Files lie in a real directory, one folder for each host. Calls of ``os`` and ``open`` that change them are counted for
the calling process and may be made to fail: the process dies at the operation, with part of the bytes written, or the
operation raises EIO or ENOSPC. For a power cut the disk knows, beside the present files, what is certain to survive:
the bytes of each file at its last fsync, and the names of each directory at its last fsync. Everything later survives
in part, as the random generator decides.
"""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler import Killed, Scheduler, SimulatedProcess

WRITING = os.O_WRONLY | os.O_RDWR


@dataclass
class Inode:
    """A file. ``synced``: its bytes at the last fsync; ``last``: its bytes when its last name went, if none is left."""

    synced: bytes = b""
    last: bytes | None = None


@dataclass
class NameChange:
    """A change of names that is not certain to survive: paths get files or directories, or (None) lose them."""

    directory: str
    names: dict[str, Inode | None]


#: The inode of every directory.
DIRECTORY = Inode()


@dataclass
class DiskFaults:
    """The faults that are in store for one process. Counts are of its operations; 0 is none.

    die_at:    the process dies at this operation
    fail_at:   this operation, and the next ``fail_count - 1``, raise an OSError with ``code``
    full:      every operation that needs space raises ENOSPC
    """

    die_at: int = 0
    fail_at: int = 0
    fail_count: int = 1
    code: int = errno.EIO
    full: bool = False


@dataclass
class OpenFile:
    process: SimulatedProcess | None
    path: str
    inode: Inode | None  # None: a directory, or a file that is only read


class RealFunctions:
    """The real functions, which stay reachable while simulated ones are in their place."""

    open, close, write, writev, pwrite = os.open, os.close, os.write, os.writev, os.pwrite
    fsync, ftruncate, rename, unlink = os.fsync, os.ftruncate, os.rename, os.unlink
    mkdir, rmdir, stream = os.mkdir, os.rmdir, io.open


class SimulatedDisk:
    """The disks of all hosts, below ``root``; ``root/NAME`` is the disk of host NAME."""

    def __init__(self, root: Path, scheduler: Scheduler, rng: random.Random) -> None:
        self.root = os.path.realpath(root)
        self._prefix = self.root + os.sep
        self._scheduler, self._rng = scheduler, rng
        self.real = RealFunctions
        self.on_death: Callable[[SimulatedProcess], None] = lambda process: None
        self.faults: dict[SimulatedProcess, DiskFaults] = {}
        self.counts: dict[SimulatedProcess, int] = {}
        self.operations = 0
        self.slowness = 0.0  #: probability, for each operation, that it takes a millisecond or so
        self._open: dict[int, OpenFile] = {}
        self._inodes: dict[str, Inode] = {}
        self._durable: dict[str, Inode] = {}
        self._pending: list[NameChange] = []

    # ---- what code under simulation calls ----

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        name = self._at(path, dir_fd)
        if name is None:
            return int(self.real.open(path, flags, mode, dir_fd=dir_fd))
        process = self._alive()
        writes = bool(flags & (WRITING | os.O_CREAT))
        fresh = bool(flags & os.O_CREAT) and not os.path.exists(name)
        if fresh or flags & os.O_TRUNC:
            self._operation("open", name, space=fresh)
        handle = int(self.real.open(name, flags, mode))
        inode = None
        if writes:
            inode = self._inodes.setdefault(name, Inode())
            if fresh:
                self._inodes[name] = inode = Inode()
                self._pending.append(NameChange(os.path.dirname(name), {name: inode}))
        self._open[handle] = OpenFile(process, name, inode)
        return handle

    def close(self, handle: int) -> None:
        if self._is_dead():
            return  # the kernel has closed it, and the number may be another file's by now
        if handle in self._open:
            del self._open[handle]
        self.real.close(handle)

    def write(self, handle: int, data: Any) -> int:
        if handle not in self._open:
            return int(self.real.write(handle, data))
        return self._write(handle, [data], self.real.writev)

    def writev(self, handle: int, buffers: Any) -> int:
        if handle not in self._open:
            return int(self.real.writev(handle, buffers))
        return self._write(handle, buffers, self.real.writev)

    def pwrite(self, handle: int, data: Any, offset: int) -> int:
        if handle not in self._open:
            return int(self.real.pwrite(handle, data, offset))
        return self._write(handle, [data], lambda h, b: self.real.pwrite(h, b"".join(map(bytes, b)), offset))

    def _write(self, handle: int, buffers: Any, write: Callable[[int, Any], int]) -> int:
        whole = b"".join(bytes(memoryview(buffer).cast("B")) for buffer in buffers)

        def part() -> None:
            if whole:
                write(handle, [whole[: self._rng.randrange(len(whole) + 1)]])

        self._operation("write", self._open[handle].path, space=True, partly=part)
        if len(whole) > 1 and self._rng.random() < 0.05:  # a short write, as the system may make it
            whole = whole[: self._rng.randrange(1, len(whole))]
        return int(write(handle, [whole]))

    def fsync(self, handle: int) -> None:
        opened = self._open.get(handle)
        if opened is None:
            self.real.fsync(handle)
            return
        self._operation("fsync", opened.path)
        if opened.inode is not None:
            opened.inode.synced = self._content(handle)
        elif os.path.isdir(opened.path):
            self._settle(opened.path)

    def ftruncate(self, handle: int, length: int) -> None:
        if handle in self._open:
            self._operation("ftruncate", self._open[handle].path)
        self.real.ftruncate(handle, length)

    def rename(self, source: Any, target: Any, **more: Any) -> None:
        old, new = self._at(source), self._at(target)
        if old is None or new is None:
            self.real.rename(source, target, **more)
            return
        self._operation("rename", new)
        if os.path.isdir(old):
            self._rename_directory(old, new)
            return
        self._keep_content(new)
        self.real.rename(old, new)
        inode = self._inodes.pop(old, Inode())
        self._inodes[new] = inode
        self._pending.append(NameChange(os.path.dirname(new), {old: None, new: inode}))

    def _rename_directory(self, old: str, new: str) -> None:
        """Rename a directory: all names below it move at once."""
        self.real.rename(old, new)
        below = [entry[0] for entry in os.walk(new)]
        names: dict[str, Inode | None] = {old + path[len(new) :]: None for path in below}
        names |= dict.fromkeys(below, DIRECTORY)
        for path in [path for path in self._inodes if path.startswith(old + os.sep)]:
            inode = self._inodes.pop(path)
            moved = new + path[len(old) :]
            self._inodes[moved] = inode
            names |= {path: None, moved: inode}
        self._pending.append(NameChange(os.path.dirname(new), names))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        name = self._at(path, dir_fd)
        if name is None:
            self.real.unlink(path, dir_fd=dir_fd)
            return
        if os.path.lexists(name):
            self._operation("unlink", name)
            self._keep_content(name)
        self.real.unlink(name)
        self._inodes.pop(name, None)
        self._pending.append(NameChange(os.path.dirname(name), {name: None}))

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        name = self._at(path, dir_fd)
        if name is not None and not os.path.exists(name):
            self._operation("mkdir", name, space=True)
        self.real.mkdir(path if name is None else name, mode, **({"dir_fd": dir_fd} if name is None else {}))
        if name is not None:
            self._pending.append(NameChange(os.path.dirname(name), {name: DIRECTORY}))

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        name = self._at(path, dir_fd)
        if name is not None:
            self._operation("rmdir", name)
        self.real.rmdir(path if name is None else name, **({"dir_fd": dir_fd} if name is None else {}))
        if name is not None:
            self._pending.append(NameChange(os.path.dirname(name), {name: None}))

    def open_stream(self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **more: Any) -> Any:
        """Open a file as ``open`` does; writes of a simulated one go through ``write``."""
        name = self._at(file) if isinstance(file, str | os.PathLike) else None
        if isinstance(file, int) and "r" in mode:
            self._open.pop(file, None)  # the stream closes it
        if name is None or not set(mode) & set("wax+"):
            if name is not None:
                self._alive()
            return self.real.stream(file, mode, buffering, *args, **more)
        flags = os.O_CREAT | (os.O_RDWR if "+" in mode else os.O_WRONLY)
        flags |= os.O_TRUNC if "w" in mode else os.O_APPEND if "a" in mode else os.O_EXCL if "x" in mode else 0
        raw = io.BufferedWriter(SimulatedFile(self, self.open(name, flags, 0o666)))
        return raw if "b" in mode else io.TextIOWrapper(raw, *args[:1], **more)

    # ---- faults ----

    def _operation(
        self, kind: str, path: str, *, space: bool = False, partly: Callable[[], None] | None = None
    ) -> None:
        """Count an operation of the present process, and let its faults come true."""
        if self._rng.random() < self.slowness:
            self._scheduler.sleep(self._rng.expovariate(1 / 0.001))
        process = self._alive()
        self.operations += 1
        if process is None:
            return
        count = self.counts[process] = self.counts.get(process, 0) + 1
        faults = self.faults.get(process)
        if faults is None:
            return
        if faults.die_at and count >= faults.die_at:
            if partly is not None:
                partly()
            self._scheduler.log(f"dies at {kind} {path[len(self._prefix) :]}")
            self.on_death(process)
            raise Killed
        fails = faults.fail_at and faults.fail_at <= count < faults.fail_at + faults.fail_count
        if fails or (faults.full and space):
            code = errno.ENOSPC if faults.full else faults.code
            if code == errno.ENOSPC and not space:
                return
            if partly is not None:
                partly()
            self._scheduler.log(f"{errno.errorcode[code]} at {kind} {path[len(self._prefix) :]}")
            raise OSError(code, os.strerror(code), path)

    def release(self, process: SimulatedProcess) -> None:
        """Close the files of a dead process, as the kernel does; its locks go with them."""
        for handle in [handle for handle, opened in self._open.items() if opened.process is process]:
            del self._open[handle]
            self.real.close(handle)
        self.faults.pop(process, None)

    def cut_power(self, host: str) -> None:
        """Leave on a host's disk what survives a power cut. Its processes are dead already."""
        home = os.path.join(self.root, host)
        below = home + os.sep
        survivors = {path: inode for path, inode in self._durable.items() if path.startswith(below)}
        later = [change for change in self._pending if any(path.startswith(below) for path in change.names)]
        kept = self._rng.choice((0, len(later), self._rng.randint(0, len(later))))
        for change in later[:kept]:  # a journaling file system keeps the order of changes of names
            _apply(change, survivors)
        directories = [path for path, inode in survivors.items() if inode is DIRECTORY]
        contents = {path: self._surviving(path, file) for path, file in survivors.items() if file is not DIRECTORY}
        shutil.rmtree(home)
        for directory in [home, *directories]:
            os.makedirs(directory, exist_ok=True)
        for path, content in contents.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            Path(path).write_bytes(content)
        self._forget(below)
        for path, content in contents.items():
            self._inodes[path] = self._durable[path] = Inode(content)
        self._durable |= dict.fromkeys(directories, DIRECTORY)

    def lose(self, host: str) -> None:
        """Remove a host's disk with all its files."""
        home = os.path.join(self.root, host)
        shutil.rmtree(home, ignore_errors=True)
        os.makedirs(home, exist_ok=True)
        self._forget(home + os.sep)

    def _forget(self, below: str) -> None:
        for known in (self._inodes, self._durable):
            for path in [path for path in known if path.startswith(below)]:
                del known[path]
        self._pending = [change for change in self._pending if not any(path.startswith(below) for path in change.names)]

    def _surviving(self, path: str, inode: Inode) -> bytes:
        """Return bytes that a file may have after a power cut."""
        now = inode.last if inode.last is not None else self._present_content(path, inode)
        if now == inode.synced:
            return now
        if not now.startswith(inode.synced):
            return self._rng.choice((now, inode.synced))
        more = now[len(inode.synced) :]
        written = more[: self._rng.choice((0, len(more), self._rng.randint(0, len(more))))]
        zeros = b"\0" * (len(more) - len(written)) if self._rng.random() < 0.25 else b""
        return inode.synced + written + zeros

    # ---- internal ----

    def _present_content(self, path: str, inode: Inode) -> bytes:
        """Return the bytes of a file that still has a name, which need not be the one that survives."""
        name = next((name for name, known in self._inodes.items() if known is inode), path)
        return Path(name).read_bytes() if os.path.isfile(name) else inode.synced

    def _content(self, handle: int) -> bytes:
        readable = self.real.open(f"/proc/self/fd/{handle}", os.O_RDONLY)
        try:
            return os.pread(readable, os.fstat(readable).st_size, 0)
        finally:
            self.real.close(readable)

    def _keep_content(self, path: str) -> None:
        inode = self._inodes.get(path)
        if inode is not None and os.path.isfile(path):
            inode.last = Path(path).read_bytes()

    def _settle(self, directory: str) -> None:
        """Make the names in a directory certain, and those that were changed earlier in others on the same host."""
        host = self._host(directory)
        places = [at for at, change in enumerate(self._pending) if change.directory == directory]
        last = places[-1] if places else -1
        for change in self._pending[: last + 1]:
            if self._host(change.directory) == host:
                _apply(change, self._durable)
        self._pending = [
            change for at, change in enumerate(self._pending) if at > last or self._host(change.directory) != host
        ]

    def _host(self, path: str) -> str:
        return path[len(self._prefix) :].split(os.sep, 1)[0]

    def _at(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return the absolute path if it lies on a simulated disk; else None."""
        if isinstance(path, int):
            return None
        name = os.fsdecode(path)
        if dir_fd is not None:
            opened = self._open.get(dir_fd)
            return None if opened is None else os.path.join(opened.path, name)
        return name if name.startswith(self._prefix) else None

    def _alive(self) -> SimulatedProcess | None:
        process = self._scheduler.current.process
        if process is not None and process.dead:
            raise Killed
        return process

    def _is_dead(self) -> bool:
        process = self._scheduler.current.process
        return process is not None and process.dead


class SimulatedFile(io.RawIOBase):
    """A file opened for writing with ``open``."""

    def __init__(self, disk: SimulatedDisk, handle: int) -> None:
        self._disk, self._handle = disk, handle
        self._opened = disk._open[handle]

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._handle

    def tell(self) -> int:
        return os.lseek(self._handle, 0, os.SEEK_CUR)

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return os.lseek(self._handle, offset, whence)

    def write(self, data: Any) -> int:
        if self._opened.process is not None and self._opened.process.dead:
            return len(data)  # what is left in a dead process's buffer goes nowhere
        return self._disk.write(self._handle, bytes(data))

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._disk._open.get(self._handle) is self._opened:  # else the number may be another file's by now
                self._disk.close(self._handle)


def _apply(change: NameChange, names: dict[str, Inode]) -> None:
    for path, inode in change.names.items():
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode
