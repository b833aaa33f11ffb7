"""``RowFetch``: records of the host's table on their way to the device, read by a thread while the device computes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.parameter_server.table.batches import dedupe
from echelon.parameter_server.table.table import Table


@dataclass(frozen=True)
class FetchedRows:
    """The records of the ids that have a row on the host.

    missing: number of distinct ids that were not in the cache, with and without a row on the host
    """

    ids: NDArray[np.int64]
    records: NDArray[np.uint32]
    missing: int


class HostCopy:
    """A copy of tensors in host memory that is ready when the device comes to it."""

    def __init__(self, *tensors: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._copies = tensors
        if tensors[0].device.type == "cuda":
            self._copies = tuple(torch.empty_like(each, device="cpu", pin_memory=True) for each in tensors)
            for copy, each in zip(self._copies, tensors, strict=True):
                copy.copy_(each, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> tuple[Tensor, ...]:
        if self._event is not None:
            self._event.synchronize()
        return self._copies


class RowFetch:
    """Reads and writes of the host's table, one after the other: a row that was written back is read as written."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="echelon-row-cache")
        self._writes: list[Future[None]] = []

    def fetch(self, ids: Tensor, missing: Tensor) -> Future[FetchedRows]:
        """Read the rows of the ids that are ``missing`` in the cache."""
        places = torch.where(missing, missing.cumsum(0) - 1, len(ids))
        packed = torch.empty(len(ids) + 1, dtype=torch.int64, device=ids.device).scatter_(0, places, ids)
        return self._thread.submit(self._fetched, HostCopy(packed, missing.sum()))

    def _fetched(self, copy: HostCopy) -> FetchedRows:
        ids, count = copy.wait()
        distinct, _ = dedupe(ids[: int(count)].numpy())
        present, records = self._table.records_of(distinct)
        return FetchedRows(distinct[present], records[present], len(distinct))

    def write_back(self, ids: Tensor, records: Tensor) -> None:
        """Store the records of distinct ids in the host's table."""
        self._writes.append(self._thread.submit(self._stored, HostCopy(ids, records)))

    def _stored(self, copy: HostCopy) -> None:
        ids, records = copy.wait()
        self._table.put_records(ids.numpy(), records.numpy().view(np.uint32))

    def settle(self) -> None:
        """Wait until everything is written. Raises the error of a write, such as that of a full disk."""
        writes, self._writes = self._writes, []
        for write in writes:
            write.result()

    def check(self) -> None:
        """Raise the error of a write that has failed."""
        while self._writes and self._writes[0].done():
            self._writes.pop(0).result()
