"""The token of this user's own servers on one host: made once, readable by this user alone.

Other users of a host reach its loopback ports, too. Parameter servers that were given no token therefore ask for this
one, which the user's workers find in the same file.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from echelon.base.environment import PS_TOKEN
from echelon.base.errors import UsageError


def user_token() -> str:
    """Return this user's token; the first call on a host makes it. Raises ``UsageError`` if it cannot be kept."""
    path = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "echelon" / "server-token"
    try:
        if not path.exists():
            _make(path)
        return _read(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home directory
        raise UsageError(
            f"the servers have no token, and none can be kept in {path} ({error}); set {PS_TOKEN} to the same value on "
            "servers and workers"
        ) from None


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(handle, secrets.token_hex(32).encode())
        os.link(aside, path)
    except FileExistsError:  # another process was first
        pass
    finally:
        os.close(handle)
        aside.unlink()


def _read(path: Path) -> str:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        about = os.fstat(handle)
        if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
            raise UsageError(f"{path} can be read or written by other users; remove it, and a new token is made")
        return os.read(handle, 4096).decode("ascii").strip()
    finally:
        os.close(handle)
