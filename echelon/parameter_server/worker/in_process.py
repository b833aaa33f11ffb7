"""A server inside this process, for the tables of a job without servers."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from echelon.base.errors import EchelonError
from echelon.parameter_server.persistence.persistence import ShardPersistence
from echelon.parameter_server.protocol.job_spec import PersistenceSettings
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.shard import ServerShard
from echelon.parameter_server.table.row_table import TableMaker, host_table


class InProcessChannel:
    """A replacement for ServerChannel; messages are handled at once, in the caller's thread."""

    reconnects = 0

    def __init__(self, handle: Callable[[WireMessage, Callable[[], bool]], WireMessage]) -> None:
        self._handle = handle

    def send(self, frame: WireMessage) -> Future[WireMessage]:
        future: Future[WireMessage] = Future()
        try:
            future.set_result(answered(self._handle(frame, lambda: False)))
        except EchelonError as error:
            future.set_exception(error)
        return future

    def call(self, frame: WireMessage) -> WireMessage:
        return self.send(frame).result()

    def close(self) -> None:
        """Do nothing: there is no connection."""


class OnDemandPersistence(ShardPersistence):
    """Persistence by explicit checkpoints only, because tables inside a process end with it."""

    def start(self) -> bool:
        return False


def own_shard(index: int = 0, servers: int = 1, make_table: TableMaker = host_table) -> ServerShard:
    """Return a shard in this process, by default of all buckets; its disk tier is in a temporary directory."""
    scratch = tempfile.TemporaryDirectory(prefix="echelon-tables-")
    place = Path(scratch.name)
    shard = ServerShard(
        index,
        servers,
        directory=place,
        make_table=make_table,
        keep=lambda shard: OnDemandPersistence(shard, place, PersistenceSettings(journal=False)),
    )
    weakref.finalize(shard, scratch.cleanup)
    return shard


def answered(answer: WireMessage) -> WireMessage:
    """Return the answer. Raises ``EchelonError`` if the answer is an error."""
    line: Any = answer.head.get("error")
    if line is not None:
        raise EchelonError(str(line))
    return answer
