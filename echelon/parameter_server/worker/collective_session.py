"""``CollectiveSession``: sparse tables in the workers themselves, without servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from echelon.base.errors import CheckpointError, EchelonError, first_line
from echelon.base.formatting import things
from echelon.distributed.collectives import gather_json
from echelon.distributed.world import World
from echelon.parameter_server.device_table.row_location import table_maker
from echelon.parameter_server.protocol.job_spec import JobSpec
from echelon.parameter_server.worker.catch_up import CatchUpHook
from echelon.parameter_server.worker.checkpoint_part import part_name, part_of, refuse_merging
from echelon.parameter_server.worker.client import PullFuture
from echelon.parameter_server.worker.collective_client import CollectiveClient
from echelon.parameter_server.worker.in_process import own_shard
from echelon.parameter_server.worker.row_exchange import GroupExchange, RowExchange
from echelon.parameter_server.worker.session import ParameterServerSession
from echelon.parameter_server.worker.shared_memory_exchange import share_memory
from echelon.parameter_server.worker.sparse_embedding import locations_of
from echelon.parameter_server.worker.sparse_lookup import LookupBatch, SparseLookup, deduplicated
from echelon.plan.operations import tensors_in
from echelon.strategy import ParameterServer


class CollectiveLookup(SparseLookup):
    """The lookups of one worker, which takes part in each exchange, also if it needs no rows."""

    _client: CollectiveClient

    def _pulled(self, wanted: Sequence[tuple[str, Tensor]], dense: bool) -> Iterator[LookupBatch]:
        found = self._take_prefetched(wanted) if self._ahead else None
        self._ahead.clear()
        all_found = self._client.begin_step(None if found is None else found.pulled)
        if found is not None:
            yield found
        if not all_found:  # workers that have their rows take part without ids
            missing = deduplicated(wanted if found is None else (), self._client.shards)
            missing.pulled = self._client.pull(missing.ids, step=self._client.seq)
            yield missing

    def ask_ahead(self, batch: Any, dense: bool) -> PullFuture | None:
        if not self._views:
            return None
        lookup = deduplicated(self._views_of(tensors_in(batch)), self._client.shards)
        lookup.pulled = self._client.ask_ahead(lookup.ids)
        self._ahead.append(lookup)
        return lookup.pulled


class CollectiveSession(ParameterServerSession):
    """The session of a model whose tables its workers hold: each of them a share of the buckets of every table."""

    client: CollectiveClient | None

    def __init__(self, settings: ParameterServer, world: World, model: nn.Module) -> None:
        super().__init__(settings, world.role, world.seed, model, world.device)
        assert world.control is not None
        self.worker, self.workers = world.rank, world.size
        self._control, self._timeout = world.control, world.timeout

    @property
    def _shards(self) -> int:
        return self.workers

    def _connect(self, job: JobSpec) -> None:
        exchange: RowExchange | None = share_memory(self._control, self._timeout)
        if exchange is None:
            exchange = GroupExchange(self.worker, self.workers, self._device, self._timeout)
        self.how = exchange.how
        maker = table_maker(locations_of(self._tables), self._device)
        shard = own_shard(self.worker, self.workers, maker)
        self.client = CollectiveClient(job, self.worker, exchange, shard)
        self.reading = CollectiveLookup(self.client, self._device)
        self._hooks.append(self._model.register_forward_hook(CatchUpHook(self._end_forward)))

    def _greet(self) -> None:
        assert self.client is not None
        self.client.open()

    def _end_forward(self) -> None:
        if self.client is not None and self.reading.in_step:
            self.client.end_forward()

    def begin(self) -> None:
        """Start training: the tables are empty, or hold a checkpoint's rows."""

    # ---- a step ----

    def _push(self, samples: float, weight: float, loss: Tensor | None) -> None:
        if self._next is not None:
            self._ask_ahead()  # its ids travel with the push
        super()._push(samples, weight, loss)

    # ---- between steps ----

    def new_pass(self) -> None:
        """End a pass over the data, so that rows may expire. All workers call it after the same step."""
        assert self.client is not None
        self.client.new_pass()

    def save(self, place: Path, step: int) -> str:
        """Save this worker's part of a checkpoint, and wait for the others; return the name of the directory."""
        refuse_merging(self.reading)
        directory = place / part_name(step)
        self._together(lambda: self._save_part(directory, step))
        return directory.name

    def load(self, checkpoint: Path, name: str | None) -> None:
        """Load this worker's rows of a checkpoint, whatever number of workers or servers saved it."""
        self._together(lambda: self._load_part(part_of(checkpoint, name)))

    def close(self, done: bool = True) -> None:
        try:
            if done and self.client is not None and self._is_behind and self.client.occupancy.is_counted:
                self.client.begin_step(None)  # a table may be too full since the last step
        finally:
            super().close(done)

    def _together(self, call: Callable[[], None]) -> None:
        """Call a function on every worker. If it fails on one, the error is raised on all."""
        error = ""
        try:
            call()
        except (EchelonError, OSError) as caught:
            error = first_line(caught)
        errors: list[str] = gather_json(error, self._control, "checkpoint of tables")
        failed = next(((worker, line) for worker, line in enumerate(errors) if line), None)
        if failed is not None:
            raise CheckpointError(f"worker {failed[0]}: {failed[1]}")

    def _holders(self) -> str:
        return f"{things(self.workers, 'worker')} ({self.how})"

    def describe(self) -> Iterator[str]:
        yield from super().describe()
        yield "tables: collective, rows in the workers, dense parameters summed between workers"
