"""A lease on a directory: a file with its holder's token, which the holder renews and looks at before it writes.

It keeps processes apart on file systems without locks. A process that finds a renewed file is refused; a file that has
not been renewed for a while is taken over, and its holder, if it still runs, finds another token and writes nothing
more. Between that look and a write some milliseconds remain.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from pathlib import Path

#: Seconds between two renewals, and without any until the holder counts as lost.
RENEWAL, EXPIRY = 2.0, 10.0
#: Seconds until a look shows which of two processes has taken a lease that both found free.
_SETTLING = 0.5
_LOOK = 0.1
_BYTES = 512  # a file of one length is replaced by one write, so that a reader never sees half of it


class DirectoryLease:
    """A claim to the directory of ``path``.

    host, pid:  this process, for the message of others
    """

    def __init__(self, path: Path, host: str, pid: int) -> None:
        self._path, self._token, self._renewals = path, uuid.uuid4().hex, 0
        self._holder = {"host": host, "pid": pid, "token": self._token}
        self._stopped = threading.Event()

    def content(self) -> bytes:
        """Return the next content of the file."""
        self._renewals += 1
        return json.dumps({**self._holder, "renewals": self._renewals}).encode().ljust(_BYTES)

    def is_taken(self) -> bool:
        """Return True if another process renews the file; False needs ``EXPIRY`` seconds unless there is no file."""
        first, until = self._read(), time.monotonic() + EXPIRY
        while first is not None and time.monotonic() < until:
            time.sleep(_LOOK)
            if (now := self._read()) != first:
                return now is not None
        return False

    def take(self) -> bool:
        """Write this process's token, and renew it from now on; return False if another process was faster."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write()
        time.sleep(_SETTLING)
        if self.is_lost():
            return False
        threading.Thread(target=self._renew, name="directory lease", daemon=True).start()
        return True

    def write_over(self) -> None:
        """Write this process's token in place of a holder's that counts as lost, without renewals."""
        self._write()

    def is_lost(self) -> bool:
        """Return True if the file has another process's token."""
        content = self._read()
        try:
            return content is not None and json.loads(content)["token"] != self._token
        except (ValueError, TypeError, KeyError):
            return False

    def release(self) -> None:
        self._stopped.set()
        if not self.is_lost():
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _renew(self) -> None:
        while not self._stopped.wait(RENEWAL) and not self.is_lost():
            with contextlib.suppress(OSError):  # a server that is away for a while
                self._write()

    def _write(self) -> None:
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            os.pwrite(handle, self.content(), 0)
        finally:
            os.close(handle)

    def _read(self) -> bytes | None:
        """Return the file's content; None if there is none. Opening it anew shows what other hosts have written."""
        try:
            return self._path.read_bytes()
        except OSError:
            return None
