"""``DeviceSession``: the session of one process whose tables, or some of them, lie in the memory of its device."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from echelon.base.errors import EchelonError
from echelon.distributed.world import World
from echelon.parameter_server.device_table.row_location import refuse_servers, table_maker
from echelon.parameter_server.protocol.job_spec import JobSpec
from echelon.parameter_server.worker.client import ParameterServerClient
from echelon.parameter_server.worker.device_lookup import DeviceLookup, OnDeviceTable
from echelon.parameter_server.worker.in_process import InProcessChannel, own_shard
from echelon.parameter_server.worker.session import ParameterServerSession
from echelon.parameter_server.worker.sparse_embedding import locations_of
from echelon.strategy import ParameterServer


class DeviceSession(ParameterServerSession):
    """The session of a process that is alone: rows on its device are read and updated there."""

    reading: DeviceLookup

    def _connect(self, job: JobSpec) -> None:
        locations = locations_of(self._tables)
        self._shard = own_shard(make_table=table_maker(locations, self._device))
        self.client = ParameterServerClient([InProcessChannel(self._shard.handle)], job, self.worker)
        self._job = job

    def _greet(self) -> None:
        assert self.client is not None
        self.client.open()
        tables = {name: table for name, table in self._shard.tables.items() if isinstance(table, OnDeviceTable)}
        self.reading = DeviceLookup(self.client, self._device, self._shard.store, tables)

    def _push(self, samples: float, weight: float, loss: Tensor | None) -> None:
        reads = self.reading.take_reads()
        super()._push(samples, weight, loss)
        if not (samples and weight):
            return
        rates = {name: float(modules[0].lr) for name, (_, modules) in self._tables.items()}
        try:
            self.reading.update(reads, 1.0 / weight, rates)
        except EchelonError as error:
            self._shard.stop_serving(" ".join(str(error).split()))  # the step was applied only in part
            raise

    def save(self, place: Path, step: int) -> str:
        self.reading.check()
        return super().save(place, step)

    def close(self, done: bool = True) -> None:
        try:
            if done and self.client is not None:
                self.reading.check()
        finally:
            super().close(done)


def session_of(settings: ParameterServer, world: World, model: nn.Module) -> ParameterServerSession:
    """Return the session of a job with servers, or of one process that holds its tables itself."""
    session = ParameterServerSession(settings, world.role, world.seed, model, world.device)
    locations = locations_of(session.tables)
    if not any(location.on_device for location in locations.values()):
        return session
    if session.remote:
        refuse_servers(locations)
    return DeviceSession(settings, world.role, world.seed, model, world.device)
