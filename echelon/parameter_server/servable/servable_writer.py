"""``ServableWriter``: writes a servable of a model in training, and deltas to it while training goes on."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from echelon.base.console import say
from echelon.base.errors import CheckpointError, EchelonError, PeerLost, UsageError
from echelon.checkpoint import dtypes, tensorfile
from echelon.checkpoint.directory import remove_tree
from echelon.checkpoint.tensorfile import TensorSlot
from echelon.parameter_server.persistence.requested_path import absolute
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.servable.export_servable import write_programs
from echelon.parameter_server.servable.servable import DELTA_NAME, WHOLE_NAME
from echelon.parameter_server.servable.servable_head import WEIGHTS, ServableHead, ServedTable, write_servable
from echelon.parameter_server.worker.client import ParameterServerClient
from echelon.parameter_server.worker.session import ParameterServerSession

#: Seconds that a file of a server may take to be seen here, on a network file system.
_SEEN_WITHIN = 10.0


class TrainingEngine(Protocol):
    """The part of an Engine that the writer reads."""

    model: nn.Module

    @property
    def steps(self) -> int: ...
    @property
    def served(self) -> ParameterServerSession | None: ...


class ServableWriter:
    """Writes ``servable-00000000`` into a directory, then a delta with the changed rows every so often.

    Call ``step`` after each ``engine.step``; worker 0 writes, and other workers do nothing. Servers write their rows
    themselves, so the directory is one that servers and worker 0 share. A reader applies deltas by
    ``Servable.follow(directory)``.

    engine:      engine in training
    directory:   directory of the servables
    model:       a new instance of the model for programs of torch.export; default None: weights only
    inputs:      with ``model``, sample inputs of its forward, two samples or more
    every:       seconds between deltas; default 300
    whole_every: versions between whole servables, with which older ones are removed; default 100

    >>> writer = echelon.ServableWriter(engine, "servables", every=300)
    >>> for ids, labels in loader:
    ...     loss = engine.step(ids, labels)
    ...     path = writer.step()
    """

    def __init__(
        self,
        engine: TrainingEngine,
        directory: str | os.PathLike[str],
        model: nn.Module | None = None,
        inputs: Sequence[Any] | None = None,
        *,
        every: float = 300.0,
        whole_every: int = 100,
    ) -> None:
        if engine.served is None:
            raise UsageError("ServableWriter needs a model with sparse tables; export others by 'echelon export'")
        if every < 0 or whole_every < 1:
            raise UsageError("ServableWriter: every must be 0 or more, and whole_every 1 or more")
        self._engine, self._directory, self._model, self._inputs = engine, Path(directory), model, inputs
        self._every, self._whole_every = every, whole_every
        self._lineage, self._version = secrets.token_hex(8), -1
        self._snapshots: dict[str, list[int]] = {}  # of each table, by server
        self._wrote = -float("inf")
        self._wholes: list[int] = []

    def step(self) -> Path | None:
        """Write a servable or a delta if it is time, and return its directory; else None."""
        return self.write() if time.monotonic() - self._wrote >= self._every else None

    def write(self) -> Path | None:
        """Write now: a delta, or a whole servable at first; return its directory, None on other workers than 0."""
        session = self._engine.served
        if session is None or session.client is None:
            raise UsageError("ServableWriter: the engine is closed; write before engine.close()")
        if session.worker:
            return None
        session.client.settle()
        session.catch_up()
        version = self._version + 1
        whole = not self._wholes or version - self._wholes[-1] >= self._whole_every
        path = None if whole else self._try_delta(session.client, version)
        if path is None:
            path = self._directory / WHOLE_NAME.format(version)
            write_servable(path, lambda aside: self._fill(session.client, aside, version, None))
            self._wholes.append(version)
            self._sweep()
        self._version, self._wrote = version, time.monotonic()
        return path

    def _try_delta(self, client: ParameterServerClient, version: int) -> Path | None:
        """Write a delta; None if a server no longer knows what has changed since the last version."""
        path = self._directory / DELTA_NAME.format(version)
        try:
            write_servable(path, lambda aside: self._fill(client, aside, version, self._version))
        except (PeerLost, CheckpointError, UsageError):
            raise
        except EchelonError as error:  # a server's refusal: it has begun a new base snapshot, for example
            say(f"servable: a whole one is written in place of delta {version}: {error}")
            return None
        return path

    def _fill(self, client: ParameterServerClient | None, aside: Path, version: int, since: int | None) -> ServableHead:
        assert client is not None
        tables = []
        snapshots = {}
        for number, spec in enumerate(client.job.tables):
            name = f"rows-{number}.safetensors"
            before = self._snapshots.get(spec.name) if since is not None else None
            snapshots[spec.name] = _export(client, aside / name, spec.name, before, chained=number > 0)
            tables.append(ServedTable.of(spec, name))
        _write_weights(aside / WEIGHTS, self._engine.model.state_dict())
        head = ServableHead(
            tables=tuple(tables), lineage=self._lineage, version=version, since=since, step=self._engine.steps
        )
        if self._model is not None and since is None:
            head = write_programs(aside, head, copy.deepcopy(self._model), self._inputs)
        self._snapshots = snapshots
        return dataclasses.replace(head, dense="weights" if self._model is None else "program")

    def _sweep(self) -> None:
        """Remove what is older than the last whole servable but one."""
        oldest = self._wholes[-2] if len(self._wholes) > 1 else 0
        for path in self._directory.iterdir():
            match = re.fullmatch(r"(?:servable|delta)-(\d{8})", path.name)
            if match and int(match[1]) < oldest:
                remove_tree(path)
        self._wholes = self._wholes[-2:]


def _export(client: ParameterServerClient, path: Path, table: str, since: list[int] | None, chained: bool) -> list[int]:
    """Let the servers write a table or its changes; return the number of each server's snapshot.

    chained: go on with the snapshots that the first table has begun, so that deltas to that one stay possible
    """
    asked: dict[str, Any] = {"op": "export", "worker": client.worker, "path": str(absolute(path)), "table": table}
    asked |= {"format": "safetensors", "chained": chained}
    sent = [
        link.send(WireMessage({**asked, "since": None if since is None else since[server]}))
        for server, link in enumerate(client.links)
    ]
    numbers = [int(answer.result().head["version"]) for answer in sent]
    deadline = time.monotonic() + _SEEN_WITHIN
    while _parts(path) < len(numbers):
        if time.monotonic() > deadline:
            raise UsageError(
                f"the servers have written {path}, which this worker does not see; give ServableWriter a directory "
                "that servers and worker 0 share"
            )
        time.sleep(0.05)
    return numbers


def _parts(path: Path) -> int:
    return len(list(path.iterdir())) if path.is_dir() else int(path.exists())


def _write_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write the dense weights as safetensors; those that share memory are written under each of their names."""
    values = sorted(
        ((name, value.detach().cpu().contiguous()) for name, value in state.items()),
        key=lambda item: (-item[1].dtype.itemsize, item[0]),
    )
    slots = [
        TensorSlot(name, *dtypes.exported_as(v.dtype, v.shape), dtypes.nbytes(v.dtype, v.shape)) for name, v in values
    ]
    tensorfile.write(path, slots, (dtypes.bytes_of(value) for _, value in values), note={"format": "pt"})
