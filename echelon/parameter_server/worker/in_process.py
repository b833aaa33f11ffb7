"""A server inside this process: what a job without servers trains its tables on."""

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


class InProcessChannel:
    """Stands where a Link to a server would; frames are handled at once, by the caller's own thread."""

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
        """There is nothing to hang up."""


class OnDemandPersistence(ShardPersistence):
    """Checkpoints when they are asked for, and nothing between: tables inside a process live and die with it."""

    def start(self) -> bool:
        return False


def own_shard() -> ServerShard:
    """A shard that holds everything; files of tables with a disk tier go to a directory that ends with the process."""
    scratch = tempfile.TemporaryDirectory(prefix="echelon-tables-")
    place = Path(scratch.name)
    shard = ServerShard(
        0, 1, directory=place, keep=lambda shard: OnDemandPersistence(shard, place, PersistenceSettings(journal=False))
    )
    weakref.finalize(shard, scratch.cleanup)
    return shard


def answered(answer: WireMessage) -> WireMessage:
    """An answer, or the error that it is."""
    line: Any = answer.head.get("error")
    if line is not None:
        raise EchelonError(str(line))
    return answer
