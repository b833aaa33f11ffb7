"""Recovery of a starting server: finds the job that it held before, on its own disk or on its neighbor's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.base.errors import CheckpointError, EchelonError
from echelon.parameter_server.persistence.persistence import home_of, make_home
from echelon.parameter_server.persistence.replication import RemoteReplica
from echelon.parameter_server.persistence.restore import MANIFEST, Manifest
from echelon.parameter_server.persistence.snapshot import SnapshotFile
from echelon.parameter_server.protocol.message import WireMessage

#: Request between servers for the open session. A server answers it even while it is starting.
SESSION = "session"


def find_job(state: Path, server: int, ask: Callable[[WireMessage], WireMessage] | None) -> dict[str, Any] | None:
    """Return the JSON form of the job whose state this server has or can fetch; None if there is none.

    ask:  function that sends a message to the next server, which may hold a replica
    """
    home = max(_homes(state, server), key=_order, default=None)
    if home is None and ask is not None:
        home = _fetched_home(state, server, ask)
    return None if home is None else _job_in(home)


def next_epoch(state: Path, server: int) -> int:
    """Return a number above those of all processes that have kept a session's state here."""
    return 1 + max((_order(home)[0] for home in _homes(state, server)), default=0)


def _homes(state: Path, server: int) -> list[Path]:
    return [manifest.parent for manifest in state.glob(f"*/{home_of(state, '', server).name}/{MANIFEST}")]


def _order(home: Path) -> tuple[int, float]:
    """Return the sort key of sessions: the epoch, because dates of files are wrong after the clock was set back."""
    try:
        manifest = Manifest.read(home)
    except CheckpointError:  # if this session is revived, its damage is reported then
        manifest = None
    return manifest.epoch if manifest is not None else 0, max(path.stat().st_mtime for path in home.iterdir())


def _fetched_home(state: Path, server: int, ask: Callable[[WireMessage], WireMessage]) -> Path | None:
    try:
        session = ask(WireMessage({"op": SESSION, "worker": -1})).head.get(SESSION)
    except EchelonError:  # the neighbor is down; if it had a replica, the workers will report the lost state
        return None
    if not isinstance(session, str):
        return None
    home = home_of(state, session, server)
    make_home(home)
    return home if RemoteReplica(ask, server, home, session).fetch() else None


def _job_in(home: Path) -> dict[str, Any] | None:
    manifest = Manifest.read(home)
    if manifest is None:
        return None
    newest = manifest.chain[-1]
    with SnapshotFile(home / newest.file, newest.bytes, newest.index) as file:
        job: dict[str, Any] = file.about["job"]
        return job
