"""An Engine's session with parameter servers: it pulls rows before a step and pushes gradients after it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from echelon.base.environment import RESTART_COUNT
from echelon.base.errors import UsageError
from echelon.base.formatting import things
from echelon.distributed import world as worlds
from echelon.distributed.ps_role import Role
from echelon.parameter_server.persistence.requested_path import absolute
from echelon.parameter_server.protocol.job_spec import JobSpec, TableSpec
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.worker.catch_up import attach
from echelon.parameter_server.worker.checkpoint_part import (
    forget_parts,
    part_name,
    part_of,
    refuse_dense_state,
    refuse_merging,
)
from echelon.parameter_server.worker.client import ParameterServerClient, PullFuture, WorkerUpdate
from echelon.parameter_server.worker.dense_blocks import DenseBlockBuffers, check_parameters
from echelon.parameter_server.worker.geo import GeoWorker
from echelon.parameter_server.worker.job_description import group_settings, make_job, table_seed
from echelon.parameter_server.worker.server_connections import ServerConnections
from echelon.parameter_server.worker.session_lines import mode_lines, staleness_line
from echelon.parameter_server.worker.sparse_embedding import tables_of
from echelon.parameter_server.worker.sparse_lookup import SparseLookup
from echelon.strategy import ParameterServer

#: Number of recently answered pushes over which a worker's staleness is averaged.
LATELY = 100


class GradientCounts(Protocol):
    """The counts that go with the gradients of an update."""

    weights: Tensor | float  #: sum of the weights of this worker's losses

    @property
    def own_samples(self) -> float:
        """Sum of the sample counts of this worker's losses."""


class ParameterServerSession:
    """The session of one model: its tables, and its dense parameters if servers hold them."""

    pushes = True  #: gradients are pushed after each step

    def __init__(
        self, settings: ParameterServer, role: Role, seed: int, model: nn.Module, device: torch.device
    ) -> None:
        self.remote = bool(role.endpoints)
        self.role, self._seed, self._device = role, seed, device
        # without servers there are no other workers, so all modes are equal
        self.settings = settings if self.remote else dataclasses.replace(settings, mode="sync")
        #: True if servers hold the dense parameters, too; without servers this process holds them
        self.dense = settings.dense_on_servers and self.remote
        self.worker, self.workers = (role.index, role.workers) if self.remote else (0, 1)
        self._model, self._hooks = model, list[RemovableHandle]()
        self._tables = tables_of(model, lambda name: table_seed(seed, name))
        self._pack_state: Callable[[], bytes] | None = None  # returns the state from which this worker resumes
        #: True if this process's own optimizer steps the dense parameters
        self.steps_here = not self.dense or self.settings.mode == "geo"
        self._geo: GeoWorker | None = None
        self._next: Any = None  # the next batch
        self._ahead: PullFuture | None = None  # the prefetch of the next step
        self._begun = False
        self._is_behind = False  # an update was pushed whose result is not yet in the model
        #: True if workers step synchronously and are connected through servers only
        self.steps_together = self.dense and self.settings.mode == "sync"
        self._stale: list[int] = []
        self.client: ParameterServerClient | None = None
        self._contact: ServerConnections | None = None

    # ---- opening ----

    @property
    def tables(self) -> Mapping[str, tuple[TableSpec, list[Any]]]:
        """The tables of the model by name, each with the modules that read it."""
        return self._tables

    @property
    def session(self) -> ParameterServerSession:
        return self

    def open(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], pack_state: Callable[[], bytes]
    ) -> None:
        """Open the job on the servers. ``begin`` follows when the model has its initial values.

        pack_state: returns the state from which this worker resumes; it is stored with each push
        """
        self._optimizer, self._pack_state = optimizer, pack_state
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        if self.dense:
            check_parameters(trained)
        job = make_job(
            self.settings,
            [spec for spec, _ in self._tables.values()],
            optimizer if self.dense else None,
            trained,
            session=self._session(),
            servers=self._shards,
            trainers=self.workers,
            seed=self._seed,
        )
        self._blocks = DenseBlockBuffers(job.blocks, trained, job.servers)
        self._connect(job)
        for name, (_, modules) in self._tables.items():
            for module in modules:
                module.connect(name, lambda: self.reading)
        if self.dense and not self.steps_together:
            self._hooks = attach(self._model, self.catch_up)
        self._greet()

    @property
    def _shards(self) -> int:
        """The number of processes that hold tables."""
        return max(1, len(self.role.endpoints))

    def _connect(self, job: JobSpec) -> None:
        self._contact = ServerConnections(self.role, job, self.settings.timeout)
        narrow = self.remote and self.settings.wire == "bfloat16"
        self.client = ParameterServerClient(self._contact.links, job, self.worker, narrow)
        if self.settings.mode == "geo":
            self._geo = GeoWorker(self.client, self._blocks, self.workers, self.settings.k_steps)
        pull = None if self._geo is None else self._geo.pull
        self.reading = SparseLookup(self.client, self._device, self.catch_up, pull)

    def _greet(self) -> None:
        assert self.client is not None
        assert self._contact is not None
        try:
            with self._contact.report_waits():
                self.client.open()  # a server may find its earlier state only when it knows the session
                self._standing = self.client.hello()
        except BaseException:
            self.close(done=False)  # the job was not opened, so there is none to leave
            raise
        self._contact.keep()

    def _session(self) -> str:
        """Return the name of the session.

        Workers that all-reduce dense parameters restart together, and each restart begins a new session.
        """
        attempt = os.environ.get(RESTART_COUNT, "0") if not self.dense else "0"
        return f"{self.role.session}/{attempt}"

    @property
    def resumed(self) -> bytes | None:
        """State that this worker stored on the servers before it was restarted; None if this is its first start."""
        assert self.client is not None
        if not self.dense:
            return None
        seq = self.client.last_push(self._standing)
        if seq is None:
            return self._join()
        if seq < 0:
            return None
        blobs = self._blobs()
        if seq not in blobs:
            raise UsageError(f"server 0 has no state of worker {self.worker} after step {seq}; start the job again")
        self.client.resume_at(seq + 1)
        self._begun = True
        return blobs[seq]

    def _join(self) -> bytes | None:
        """Join a running job, because this worker is new or was dropped; return its stored state, if any."""
        assert self.client is not None
        step = int(self.client.links[0].call(WireMessage({"op": "join", "worker": self.worker})).head["step"])
        self.client.resume_at(step)
        self._begun = True
        blobs = self._blobs()
        return blobs[max(blobs)] if blobs else None

    def _blobs(self) -> dict[int, bytes]:
        """Return this worker's states on server 0, by the sequence number of the push that contained each."""
        assert self.client is not None
        kept = self.client.links[0].call(WireMessage({"op": "blob", "worker": self.worker}))
        return {int(seq): bytes(blob) for seq, blob in zip(kept.head["steps"], kept.arrays, strict=True)}

    def begin(self) -> None:
        """Start training: all workers begin with worker 0's values of the dense parameters."""
        assert self.client is not None
        if not self._begun and self.worker == 0:  # others wait in their first pull
            self.client.begin(self._blocks.values())
        if not self.dense and self.remote:
            worlds.barrier()  # servers without blocks do not wait, and no worker may pull before a checkpoint is loaded
        self._begun = True
        self.refresh()

    # ---- a step ----

    @contextlib.contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """Pull the values for ``batch``, and run its forward and backward inside the context."""
        assert self.client is not None
        waits = self.settings.mode == "bounded" or (self.settings.mode == "sync" and self._is_behind)
        self.reading.begin(batch, dense=self.dense and waits)
        answered = self.client.collect(self._leave())  # errors of earlier pushes are raised here
        self._install(self.reading.values or answered)
        try:
            yield
        except BaseException:
            self.reading.end()
            raise

    def _leave(self) -> int:
        """Return the number of pushes that may stay unanswered while the next step computes."""
        return 1 if self.settings.prefetch and self.settings.mode == "async" else 0

    def push(self, gradients: GradientCounts, loss: Tensor) -> None:
        """Push the gradients of ``loss``, the loss of this step."""
        self._update(gradients.own_samples, float(gradients.weights), loss)

    def _update(self, samples: float, weight: float, loss: Tensor | None = None) -> None:
        """Push the step's gradients.

        samples:  number of samples over which the loss is a mean
        weight:   factor that the loss was multiplied by; gradients of rows are divided by it
        loss:     this worker's loss, sent with the push if workers step together
        """
        self._push(samples, weight, loss)
        self._is_behind = True

    def _push(self, samples: float, weight: float, loss: Tensor | None) -> None:
        assert self.client is not None
        tables = self.reading.gradients(1.0 / weight if weight else 0.0) if samples else {}
        rates = {name: float(modules[0].lr) for name, (_, modules) in self._tables.items()}
        if self._geo is not None:
            self._geo.update(tables, rates)
            self.reading.end()
            if self._geo.due:
                self._geo.exchange(self._blob())
            return
        dense = self._blocks.gradients() if self.dense else []
        compensated = self.settings.compensate > 0
        update = WorkerUpdate(
            weight=float(samples),
            tables=tables,
            rates=rates,
            groups=group_settings(self._optimizer) if self.dense else [],
            dense=dense,
            values=self.dense and self.settings.mode == "async",
            pulled_rows=self.reading.origins(tables) if compensated else {},
            pulled_dense=self._blocks.values() if compensated and self.dense else [],
            blob=self._blob(),
            loss=float(loss) if loss is not None and samples and self.steps_together else 0.0,
        )
        self.client.push(update, self.reading.moment)
        self.reading.end()
        if self._next is not None and self.settings.mode in ("sync", "bounded"):
            self._ask_ahead()
        self._note_staleness()

    def finish_step(self, own: Tensor) -> Tensor:
        """Wait for the other workers' part of the step, install its result, and return the mean loss over all workers.

        The loss comes with the pull of the next step. This is for workers that step together (``steps_together``).
        """
        assert self.client is not None
        self.client.collect()  # a refused push gives the reason; the pull would only report the push as missing
        pulled, self._ahead = self._ahead or self.client.pull({}, step=self.client.seq, dense=True), None
        pulled.wait()
        self._install(pulled.take_dense())
        self._is_behind = False
        return own if pulled.loss is None else own.new_tensor(pulled.loss)

    def _blob(self) -> NDArray[np.uint8] | None:
        return np.frombuffer(self._pack_state(), np.uint8) if self._pack_state and self.dense else None

    def skip(self) -> None:
        """Skip the step, which has nothing to apply. If other workers wait for it, an empty update is pushed."""
        if self.dense and self.settings.mode != "geo":
            self._update(0.0, 0.0)
        else:
            self.reading.end()

    def ahead(self, batch: Any) -> None:
        """Prefetch the rows of ``batch``, which comes after the batch that is about to be returned."""
        if not self.settings.prefetch:
            return
        self._next = batch
        if self.settings.mode == "async":
            self._ask_ahead()

    def _ask_ahead(self) -> None:
        batch, self._next = self._next, None
        pull = self.reading.ask_ahead(batch, dense=self.dense and self.settings.mode != "async")
        self._ahead = pull if self.steps_together else None

    def _install(self, values: Sequence[NDArray[np.float32]]) -> None:
        if self._geo is not None:
            self._geo.install(values)
        elif self.dense and values:
            self._blocks.install(values)

    def _note_staleness(self) -> None:
        assert self.client is not None
        self._stale = (self._stale + self.client.take_staleness())[-LATELY:]

    @property
    def staleness(self) -> float:
        """Mean number of other workers' updates between this worker's recent pulls and pushes."""
        return sum(self._stale) / len(self._stale) if self._stale else 0.0

    # ---- between steps ----

    def catch_up(self) -> None:
        """Install the last update in the model, unless it is installed already or a step is running."""
        if self._is_behind and self.client is not None and not self.reading.in_step:
            self.refresh()

    def refresh(self) -> None:
        """Commit every push and install the servers' values, before the model is inspected, evaluated or saved."""
        assert self.client is not None
        if self._geo is not None and self._geo.steps:
            self._geo.exchange(self._blob())
        together = self.settings.mode == "sync"  # other workers' last pushes belong to the same step: wait for them
        if self.dense or together:
            pulled = self.client.refresh(self.client.seq, dense=self.dense, peek=not together)
            self._install(pulled.dense)
        else:
            self.client.settle()
        self._is_behind = False

    def new_pass(self) -> None:
        """Tell the servers that a pass over the data is done, so that rows may expire."""
        assert self.client is not None
        if self.worker == 0:
            self.client.ask(op="new_pass")

    def save(self, place: Path, step: int) -> str:
        """Save the servers' part of a checkpoint; worker 0 requests it, and the others wait. Return its name."""
        assert self.client is not None
        refuse_merging(self.reading)
        if not self.dense and self.remote:
            worlds.barrier()  # every worker's pushes have been answered
        if self.worker == 0:
            self._save_part(place / part_name(step), step)
        if not self.dense and self.remote:
            worlds.barrier()
        return part_name(step)

    def _save_part(self, directory: Path, step: int) -> None:
        assert self.client is not None
        directory.mkdir(parents=True, exist_ok=True)
        self.client.ask(op="save", path=str(absolute(directory)), step=step)

    def forget_saves(self, place: Path) -> None:
        """Remove servers' parts whose checkpoint is removed."""
        if not self.worker:
            forget_parts(place)

    def load(self, checkpoint: Path, name: str | None) -> None:
        """Load the servers' part of a checkpoint. Worker 0 requests it; others wait in ``begin``."""
        part = part_of(checkpoint, name)
        if self.worker == 0:
            self._load_part(part)

    def _load_part(self, part: Path) -> None:
        assert self.client is not None
        if not self.remote:
            refuse_dense_state(part)
        self.client.ask(op="load", path=str(part))

    def export(self, path: str | Path, table: str, since: int | None = None) -> int:
        """Let the servers write a table to Parquet or safetensors, by the suffix of ``path``; return its version.

        since: version of an earlier export; only later changes are written

        With several servers ``path`` becomes a directory with one file per server.
        """
        assert self.client is not None
        self.client.settle()
        kind = "parquet" if str(path).endswith(".parquet") else "safetensors"
        answers = self.client.ask(op="export", path=str(absolute(Path(path))), table=table, format=kind, since=since)
        return max(int(answer.head["version"]) for answer in answers)

    def stats(self) -> list[dict[str, Any]]:
        """Return the counters of each server."""
        assert self.client is not None
        return [answer.head for answer in self.client.ask(op="stats")]

    def leave(self, done: bool, say: Callable[[str], None]) -> None:
        """Leave the job at the end of the run; worker 0 logs the summary."""
        if done and self.worker == 0 and (line := self.summary()) is not None:
            say(line)
        self.close(done)

    def close(self, done: bool = True) -> None:
        """Close the session; with ``done`` this worker first completes its updates and leaves the job."""
        if self.client is None:
            return
        client = self.client
        try:
            if done and (self.dense or client.occupancy.is_counted):
                self.catch_up()
            if done:
                client.leave()
        finally:
            self.client = None
            for hook in self._hooks:
                hook.remove()
            if self._contact is not None:
                self._contact.close()
            client.close()

    def summary(self) -> str | None:
        """Return the line about staleness for the end of the run; None if there is no staleness."""
        if not self.remote or self.settings.mode == "sync" or self.client is None:
            return None
        return staleness_line(self.stats())

    def describe_processes(self) -> str | None:
        """Return a description of workers and servers if workers are connected through servers only; else None."""
        if not self.dense:
            return None
        servers = things(len(self.role.endpoints), "server")
        return f"{things(self.workers, 'worker')} x {self._device.type}, {servers}"

    def _holders(self) -> str:
        """Return a description of the processes that hold the tables."""
        return things(len(self.role.endpoints), "server") if self.remote else "this process (no servers in this job)"

    def describe(self) -> Iterator[str]:
        """Yield the lines about tables and servers for the announcement of the run."""
        where = self._holders()
        for name, (spec, modules) in self._tables.items():
            rule = type(spec.rule).__name__.lower()
            shared = f", shared by {len(modules)} modules" if len(modules) > 1 else ""
            shared += modules[0].location.describe(self._device)
            kept = f" kept as {spec.dtype}" if spec.dtype != "float32" else ""
            yield f"table '{name}': {things(spec.dim, 'float')} a row{kept}, {rule}, on {where}{shared}"
        yield from mode_lines(self.settings, self.role.endpoints, self.workers, self.dense)
