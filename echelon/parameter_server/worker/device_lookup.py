"""``DeviceLookup``: lookups of one process whose tables, or some of them, lie in the memory of its device.

The ids of such a table stay on the device: a lookup reads the row of each id, with repetitions, and the update sums the
gradients of equal ids. Nothing waits for the device, and nothing is sent ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.parameter_server.device_table.cached_table import CachedTable
from echelon.parameter_server.device_table.delayed_finite_check import DelayedFiniteCheck
from echelon.parameter_server.server.store import ServerStore
from echelon.parameter_server.worker.client import ParameterServerClient, PullFuture
from echelon.parameter_server.worker.sparse_lookup import IdView, SparseLookup, check_ids
from echelon.plan.operations import tensors_in


@runtime_checkable
class OnDeviceTable(Protocol):
    """Interface of a table whose rows lie on a device; ``DeviceTable`` describes both methods."""

    def read(self, ids: Tensor, *, state: bool = False) -> Tensor: ...
    def update(
        self, ids: Tensor, grads: Tensor, *, lr: float | None = None, scale: float = 1.0, now: int = 0,
        valid: Tensor | None = None,
    ) -> NDArray[np.int64]: ...  # fmt: skip


@dataclass
class RowRead:
    """The rows of one lookup, as a leaf tensor that accumulates their gradient."""

    ids: Tensor
    rows: Tensor


#: Lookups by table.
Reads = dict[str, list[RowRead]]


class DeviceLookup(SparseLookup):
    """The lookups of one worker; those in ``tables`` never leave the device."""

    def __init__(
        self,
        client: ParameterServerClient,
        device: torch.device,
        store: ServerStore,
        tables: Mapping[str, OnDeviceTable],
    ) -> None:
        super().__init__(client, device)
        self._store, self._on_device, self._finite = store, tables, DelayedFiniteCheck()
        self._reads: Reads = {}
        self._cached = {name: table for name, table in tables.items() if isinstance(table, CachedTable)}
        self._cached_views: dict[IdView, None] = {}

    def lookup(self, table: str, ids: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if table not in self._on_device:
            return super().lookup(table, ids, offsets)
        check_ids(table, ids)
        if self.in_step and table in self._cached:
            self._learn_view(table, ids)
        flat = ids.detach().reshape(-1).to(self._device)
        rows = self._on_device[table].read(flat)
        if self.in_step:
            self._reads.setdefault(table, []).append(RowRead(flat, rows.requires_grad_()))
        return rows, None

    def _learn_view(self, table: str, ids: Tensor) -> None:
        view = IdView.find(table, ids, self._leaves)
        if view is not None:
            self._cached_views[view] = None

    def ask_ahead(self, batch: Any, dense: bool) -> PullFuture | None:
        """Prefetch the rows of the next batch, also those that a cache lacks."""
        leaves = tensors_in(batch)
        for view in self._cached_views:
            if (ids := view.of(leaves)) is not None:
                self._cached[view.table].prefetch(ids.detach().reshape(-1).to(self._device))
        return super().ask_ahead(batch, dense)

    @property
    def merges(self) -> bool:
        return super().merges or bool(self._reads)

    def end(self) -> None:
        super().end()
        self._reads = {}

    def take_reads(self) -> Reads:
        """Return the lookups since the last update, and forget them."""
        reads, self._reads = self._reads, {}
        return reads

    def update(self, reads: Reads, scale: float, rates: Mapping[str, float]) -> None:
        """Apply the gradients of these lookups, times ``scale``."""
        self._finite.check()
        for table, each in reads.items():
            given = [(read.ids, read.rows.grad) for read in each if read.rows.grad is not None]
            if given:
                ids, grads = zip(*given, strict=True)
                self._apply(table, _joined(ids), _joined(grads), scale, rates[table])

    def _apply(self, table: str, ids: Tensor, grads: Tensor, scale: float, rate: float) -> None:
        step = self._client.seq
        words = f"the gradient of table '{table}' in step {step} is NaN or infinite; nothing of it was applied"
        finite = self._finite.note(grads, words)
        evicted = self._on_device[table].update(ids, grads, lr=rate, scale=scale, now=self._store.now, valid=finite)
        self._store.note_evicted(table, evicted)
        self._store.expire_by_time(table)
        if grads.device.type != "cuda":
            self._finite.check()

    def check(self) -> None:
        """Raise the error of a gradient that was not finite, after all steps so far."""
        self._finite.check(wait=True)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
