"""Recovery of a starting server: finds the job that it held before, on its own disk or on its neighbor's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.base.errors import EchelonError
from echelon.parameter_server.persistence.persistence import home_of
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
    home = _newest_home(state, server)
    if home is None and ask is not None:
        home = _fetched_home(state, server, ask)
    return None if home is None else _job_in(home)


def _newest_home(state: Path, server: int) -> Path | None:
    """Return the directory of the session that was written to last; None if there is none."""
    homes = [manifest.parent for manifest in state.glob(f"*/{home_of(state, '', server).name}/{MANIFEST}")]
    return max(homes, key=lambda home: max(path.stat().st_mtime for path in home.iterdir()), default=None)


def _fetched_home(state: Path, server: int, ask: Callable[[WireMessage], WireMessage]) -> Path | None:
    try:
        session = ask(WireMessage({"op": SESSION, "worker": -1})).head.get(SESSION)
    except EchelonError:  # the neighbor is down; if it had a replica, the workers will report the lost state
        return None
    if not isinstance(session, str):
        return None
    home = home_of(state, session, server)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return home if RemoteReplica(ask, server, home).fetch() else None


def _job_in(home: Path) -> dict[str, Any] | None:
    manifest = Manifest.read(home)
    if manifest is None:
        return None
    newest = manifest.chain[-1]
    with SnapshotFile(home / newest.file, newest.bytes, newest.index) as file:
        job: dict[str, Any] = file.about["job"]
        return job
