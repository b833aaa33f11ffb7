"""Lookups of a step in sparse tables: ids are deduplicated, pulled in one request, and prefetched where possible.

The first step shows which parts of a batch are ids of tables (``IdView``). From then on the ids of a batch are known as
soon as the batch exists, and the transfer of its rows overlaps with the computation of the previous batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.base.errors import DataError
from echelon.parameter_server.table import dedupe, dedupe_by_server, merge
from echelon.parameter_server.worker.client import (
    Floats,
    IdPartition,
    Ids,
    ParameterServerClient,
    PullFuture,
    PullVersions,
)
from echelon.parameter_server.worker.event_counts import EventCounts
from echelon.plan.operations import tensors_in

#: Identifies a tensor of ids among the tensors of a batch.
Key = tuple[str, int, tuple[int, ...], tuple[int, ...]]


def key_of(table: str, ids: Tensor) -> Key:
    return table, ids.data_ptr(), tuple(ids.shape), ids.stride()


@dataclass(frozen=True)
class IdView:
    """The location of a lookup's ids as a view of one tensor of the batch."""

    table: str
    leaf: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    leaf_shape: tuple[int, ...]
    leaf_stride: tuple[int, ...]

    @classmethod
    def find(cls, table: str, ids: Tensor, leaves: Sequence[Tensor]) -> IdView | None:
        """Return the view of the batch that ``ids`` are; None if the ids were computed."""
        for index, leaf in enumerate(leaves):
            if leaf.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr() and leaf.dtype == ids.dtype:
                offset = int(ids.storage_offset() - leaf.storage_offset())
                return cls(
                    table, index, offset, tuple(ids.shape), ids.stride(), tuple(leaf.shape), leaf.stride()
                )  # fmt: skip
        return None

    def of(self, leaves: Sequence[Tensor]) -> Tensor | None:
        """Return the same part of another batch, which may have more or fewer samples; None if it does not fit."""
        if self.leaf >= len(leaves):
            return None
        leaf = leaves[self.leaf]
        if tuple(leaf.shape[1:]) != self.leaf_shape[1:] or leaf.stride() != self.leaf_stride or not leaf.numel():
            return None
        if leaf.shape[0] == self.leaf_shape[0]:
            size = self.shape
        elif self.shape[:1] == self.leaf_shape[:1]:
            size = (leaf.shape[0], *self.shape[1:])
        elif len(self.shape) == 1 and self.shape[0] == math.prod(self.leaf_shape):
            size = (leaf.numel(),)
        else:
            return None
        return leaf.as_strided(size, self.stride, leaf.storage_offset() + self.offset)


@dataclass
class PulledRows:
    """Rows of one table from one pull, as a leaf tensor that accumulates their gradient."""

    table: str
    share: IdPartition
    rows: Tensor
    origin: Floats  # the rows as they were read, in the order of the requested ids
    ids: Ids
    events: Floats | None = None  # shows and clicks, if the table counts them


@dataclass
class LookupBatch:
    """One pull: the distinct ids by table, and the indices of each lookup's ids among them."""

    ids: dict[str, Ids] = field(default_factory=dict)
    inverse: dict[Key, NDArray[np.int64]] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)  # kept alive, so that no other tensor reuses their memory
    pulled: PullFuture | None = None
    found: dict[str, PulledRows] = field(default_factory=dict)
    counted: set[Key] = field(default_factory=set)  # lookups whose shows and clicks are counted


class SparseLookup:
    """The lookups of one worker, step by step.

    before_peek: called by a lookup outside of a step
    pull:        reads rows in place of ``client.pull``; default: ``client.pull``
    """

    def __init__(
        self,
        client: ParameterServerClient,
        device: torch.device,
        before_peek: Callable[[], None] = lambda: None,
        pull: Callable[..., PullFuture] | None = None,
    ) -> None:
        self._client, self._device = client, device
        self._views: dict[IdView, None] = {}
        self._leaves: list[Tensor] = []
        self._events = EventCounts(client.job.tables)
        self._lookups: list[LookupBatch] = []
        self._earlier: list[LookupBatch] = []  # of earlier passes, whose gradients are merged into one update
        self._ahead: deque[LookupBatch] = deque(maxlen=2)  # pulls for the next batches, in order
        self.moment: PullVersions | None = None  #: versions of this step's rows
        self.in_step = False
        self.computed: set[str] = set()  #: tables whose ids are computed in the model, which prevents prefetching
        self.values: list[Floats] = []  #: dense values of the last pull
        self._pull = pull or client.pull
        self._before_peek = before_peek

    # ---- a step ----

    def begin(self, batch: Any, dense: bool) -> None:
        """Start a step on ``batch`` and receive its rows, from a prefetch if there is one."""
        self._leaves = self._events.leaves = tensors_in(batch)
        self._earlier += self._lookups
        self._lookups = []
        self.in_step = True
        self.values = []
        self.moment = None
        for lookup in self._pulled(self._views_of(self._leaves), dense):
            if lookup.pulled is not None:
                self._lookups.append(lookup)
                self._receive(lookup)

    def _pulled(self, wanted: Sequence[tuple[str, Tensor]], dense: bool) -> Iterator[LookupBatch]:
        """Yield the prefetch of these ids, or pull them now if there is none."""
        yield self._take_prefetched(wanted) or self.ask(wanted, dense)

    def ask_ahead(self, batch: Any, dense: bool) -> PullFuture | None:
        """Prefetch the rows of the next batch; return the pull, if there is one."""
        if not (self._views or dense):
            return None
        self._ahead.append(self.ask(self._views_of(tensors_in(batch)), dense))
        return self._ahead[-1].pulled

    def ask(self, wanted: Sequence[tuple[str, Tensor]], dense: bool) -> LookupBatch:
        lookup = deduplicated(wanted, self._client.shards)
        if wanted or dense:
            lookup.pulled = self._pull(lookup.ids, step=self._client.seq, dense=dense)
        return lookup

    def _receive(self, lookup: LookupBatch) -> None:
        assert lookup.pulled is not None
        rows = lookup.pulled.rows()
        self.values = lookup.pulled.dense or self.values
        self.moment = self.moment or lookup.pulled.moment
        for table, values in rows.items():
            leaf = torch.from_numpy(_own(values)).to(self._device).requires_grad_()
            lookup.found[table] = PulledRows(table, lookup.pulled.shares[table], leaf, values, lookup.ids[table])

    @property
    def merges(self) -> bool:
        """True if gradients of rows wait for the update of later passes."""
        return any(lookup.found for lookup in (*self._earlier, *self._lookups))

    def end(self) -> None:
        self._leaves, self._lookups, self._earlier, self.in_step = [], [], [], False

    # ---- a lookup ----

    def lookup(self, table: str, ids: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the distinct rows, and for each of the flat ``ids`` the index of its row.

        offsets: where the samples' bags begin, for tables that count shows and clicks
        """
        check_ids(table, ids)
        if not self.in_step:
            return self._peek(table, ids)
        key = key_of(table, ids)
        for lookup in self._lookups:
            if key in lookup.inverse:
                return self._result(lookup, key, ids, offsets)
        self._learn(table, ids)
        lookup = self.ask([(table, ids)], dense=False)
        self._lookups.append(lookup)
        self._receive(lookup)
        return self._result(lookup, key, ids, offsets)

    def _result(self, lookup: LookupBatch, key: Key, ids: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
        found, inverse = lookup.found[key[0]], lookup.inverse[key]
        if self._events.counts(key[0]) and key not in lookup.counted:
            lookup.counted.add(key)
            events = self._events.of(key[0], ids, inverse, len(found.rows), offsets)
            found.events = events if found.events is None else found.events + events
        return found.rows, torch.from_numpy(inverse).to(self._device)

    def _peek(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        self._before_peek()
        unique, inverse = dedupe(_joined_ids([ids]))
        rows = self._client.pull({table: unique}, step=self._client.seq, peek=True).rows()[table]
        return torch.from_numpy(_own(rows)).to(self._device), torch.from_numpy(inverse).to(self._device)

    def _learn(self, table: str, ids: Tensor) -> None:
        view = IdView.find(table, ids, self._leaves)
        if view is None:
            self.computed.add(table)
        else:
            self._views[view] = None

    def _views_of(self, leaves: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        found = [(view.table, view.of(leaves)) for view in self._views]
        return [(table, ids) for table, ids in found if ids is not None]

    def _take_prefetched(self, wanted: Sequence[tuple[str, Tensor]]) -> LookupBatch | None:
        """Return the prefetch of these ids; None if there is none."""
        keys = {key_of(table, ids) for table, ids in wanted}
        for at, lookup in enumerate(self._ahead):
            if keys == lookup.inverse.keys():
                for _ in range(at + 1):  # earlier prefetches were for batches that were never trained on
                    self._ahead.popleft()
                return lookup
        return None

    # ---- results of the step ----

    def gradients(self, scale: float) -> dict[str, tuple[IdPartition, Floats]]:
        """Return the gradient of each distinct row by table, times ``scale``; pulls without a gradient are left out."""
        parts: dict[str, list[PulledRows]] = {}
        for lookup in (*self._earlier, *self._lookups):
            for found in lookup.found.values():
                if found.rows.grad is not None:
                    parts.setdefault(found.table, []).append(found)
        return {table: self._merged(founds, scale) for table, founds in parts.items()}

    def _merged(self, founds: Sequence[PulledRows], scale: float) -> tuple[IdPartition, Floats]:
        grads = [_gradient(found, scale) for found in founds]
        if len(founds) == 1:
            share = founds[0].share
            return share, grads[0] if share.order is None else grads[0][share.order]
        ids, summed = merge([found.ids for found in founds], grads, [1.0] * len(founds))
        share = IdPartition.of(ids, self._client.shards)
        return share, summed if share.order is None else summed[share.order]

    def origins(self, tables: Mapping[str, tuple[IdPartition, Floats]]) -> dict[str, Floats]:
        """Return the rows as they were read, in the order of the partitions in ``tables``."""
        read = {found.table: found for lookup in reversed(self._lookups) for found in lookup.found.values()}
        return {
            name: read[name].origin if share.order is None else read[name].origin[share.order]
            for name, (share, _) in tables.items()
        }


def deduplicated(wanted: Sequence[tuple[str, Tensor]], shards: int) -> LookupBatch:
    """Return the distinct ids of these lookups by table. They are not pulled yet."""
    lookup = LookupBatch(tensors=[ids for _, ids in wanted])
    by_table: dict[str, list[Tensor]] = {}
    for table, ids in wanted:
        by_table.setdefault(table, []).append(ids)
    for table, tensors in by_table.items():
        lookup.ids[table], inverse = dedupe_by_server(_joined_ids(tensors), shards)
        start = 0
        for ids in tensors:
            lookup.inverse[key_of(table, ids)] = inverse[start : start + ids.numel()]
            start += ids.numel()
    return lookup


def _gradient(found: PulledRows, scale: float) -> Floats:
    """Return the gradient of each row, with its shows and clicks beside it if they are counted."""
    assert found.rows.grad is not None
    grad = found.rows.grad.detach().cpu()
    scaled: Floats = (grad if scale == 1.0 else grad * scale).numpy()
    return scaled if found.events is None else np.concatenate([scaled, found.events], 1)


def _joined_ids(tensors: Sequence[Tensor]) -> Ids:
    flat = [ids.detach().reshape(-1).cpu() for ids in tensors]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).contiguous().numpy()


def _own(values: Floats) -> Floats:
    """Return the values in writable memory; arrays from the network are read-only and are copied."""
    return values if values.flags.writeable else values.copy()


def check_ids(table: str, ids: Tensor) -> None:
    """Raise ``DataError`` for ids that are not int64."""
    if ids.dtype != torch.int64:
        raise DataError(
            f"table '{table}' was given ids of type {str(ids.dtype).removeprefix('torch.')}; ids are int64: call "
            ".long(), or hash names with echelon.data"
        )
