"""What a step reads from sparse tables: each id once, one question to the servers, asked ahead where that can be.

The first step shows which parts of a batch the tables are asked for (``IdView``). From then on the ids of a batch are
known as soon as the batch is there, and its rows can travel while the batch before it computes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves

from echelon.base.errors import DataError
from echelon.parameter_server.table import dedupe, merge
from echelon.parameter_server.worker.client import (
    Floats,
    IdPartition,
    Ids,
    ParameterServerClient,
    PullFuture,
    PullVersions,
)

#: What tells a tensor of ids from others of the same batch.
Key = tuple[str, int, tuple[int, ...], tuple[int, ...]]


def key_of(table: str, ids: Tensor) -> Key:
    return table, ids.data_ptr(), tuple(ids.shape), ids.stride()


@dataclass(frozen=True)
class IdView:
    """How the ids of a lookup lie in one tensor of the batch."""

    table: str
    leaf: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    leaf_shape: tuple[int, ...]
    leaf_stride: tuple[int, ...]

    @classmethod
    def find(cls, table: str, ids: Tensor, leaves: Sequence[Tensor]) -> IdView | None:
        """Where ``ids`` lie in the batch; None when they were computed."""
        for index, leaf in enumerate(leaves):
            if leaf.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr() and leaf.dtype == ids.dtype:
                offset = int(ids.storage_offset() - leaf.storage_offset())
                return cls(
                    table, index, offset, tuple(ids.shape), ids.stride(), tuple(leaf.shape), leaf.stride()
                )  # fmt: skip
        return None

    def of(self, leaves: Sequence[Tensor]) -> Tensor | None:
        """The same part of another batch, which may have more or fewer samples; None when it does not fit."""
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
    """Rows of one table that one question asked for, as a leaf that gathers their gradient."""

    table: str
    share: IdPartition
    rows: Tensor
    origin: Floats  # as they were read, in the order of the ids asked for
    ids: Ids


@dataclass
class LookupBatch:
    """One question: by table its distinct ids, and where each lookup's ids are among them."""

    ids: dict[str, Ids] = field(default_factory=dict)
    inverse: dict[Key, NDArray[np.int64]] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)  # held, so that no other tensor takes their place in memory
    pulled: PullFuture | None = None
    found: dict[str, PulledRows] = field(default_factory=dict)


class SparseLookup:
    """The lookups of one worker, step by step."""

    def __init__(self, client: ParameterServerClient, device: torch.device) -> None:
        self._client, self._device = client, device
        self._views: dict[IdView, None] = {}
        self._leaves: list[Tensor] = []
        self._asked: list[LookupBatch] = []
        self._ahead: deque[LookupBatch] = deque(maxlen=2)  # questions for the next batches, in order
        self.moment: PullVersions | None = None  #: when this step's rows were read
        self.in_step = False
        self.computed: set[str] = set()  #: tables whose ids are computed in the model, so that nothing can be ahead
        self.values: list[Floats] = []  #: dense values that came with the last pull
        self.pull: Callable[..., PullFuture] = client.pull
        self.before_peek: Callable[[], None] = lambda: None  #: called by a lookup outside of a step

    # ---- a step ----

    def begin(self, batch: Any, dense: bool) -> None:
        """Start a step on ``batch``; what was asked ahead for it is taken up."""
        self._leaves = _tensors(batch)
        self._asked, self.in_step, self.values, self.moment = [], True, [], None
        asked = self._asked_ahead(self._views_of(self._leaves), dense)
        if asked.pulled is not None:
            self._asked.append(asked)
            self._receive(asked)

    def ask_ahead(self, batch: Any, dense: bool) -> PullFuture | None:
        """Ask for the rows of the next batch; returns the question, if there is one."""
        if not (self._views or dense):
            return None
        self._ahead.append(self.ask(self._views_of(_tensors(batch)), dense))
        return self._ahead[-1].pulled

    def ask(self, wanted: Sequence[tuple[str, Tensor]], dense: bool) -> LookupBatch:
        asked = LookupBatch(tensors=[ids for _, ids in wanted])
        by_table: dict[str, list[Tensor]] = {}
        for table, ids in wanted:
            by_table.setdefault(table, []).append(ids)
        for table, tensors in by_table.items():
            asked.ids[table], inverse = dedupe(_joined_ids(tensors))
            start = 0
            for ids in tensors:
                asked.inverse[key_of(table, ids)] = inverse[start : start + ids.numel()]
                start += ids.numel()
        if wanted or dense:
            asked.pulled = self.pull(asked.ids, step=self._client.seq, dense=dense)
        return asked

    def _receive(self, asked: LookupBatch) -> None:
        assert asked.pulled is not None
        rows = asked.pulled.rows()
        self.values = asked.pulled.dense or self.values
        self.moment = self.moment or asked.pulled.moment
        for table, values in rows.items():
            leaf = torch.from_numpy(_own(values)).to(self._device).requires_grad_()
            asked.found[table] = PulledRows(table, asked.pulled.shares[table], leaf, values, asked.ids[table])

    def end(self) -> None:
        self._leaves, self._asked, self.in_step = [], [], False

    # ---- a lookup ----

    def lookup(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Distinct rows, and for each of ``ids`` (flat) which of them is its own."""
        _check(table, ids)
        if not self.in_step:
            return self._peek(table, ids)
        key = key_of(table, ids)
        for asked in self._asked:
            if key in asked.inverse:
                return asked.found[table].rows, torch.from_numpy(asked.inverse[key]).to(self._device)
        self._learn(table, ids)
        asked = self.ask([(table, ids)], dense=False)
        self._asked.append(asked)
        self._receive(asked)
        return asked.found[table].rows, torch.from_numpy(asked.inverse[key]).to(self._device)

    def _peek(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        self.before_peek()
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

    def _asked_ahead(self, wanted: Sequence[tuple[str, Tensor]], dense: bool) -> LookupBatch:
        """The question for these ids, if it was asked ahead; else it is asked now."""
        keys = {key_of(table, ids) for table, ids in wanted}
        for at, asked in enumerate(self._ahead):
            if keys == asked.inverse.keys():
                for _ in range(at + 1):  # those before were for batches that were never trained on
                    self._ahead.popleft()
                return asked
        return self.ask(wanted, dense)

    # ---- what the step leaves ----

    def gradients(self, scale: float) -> dict[str, tuple[IdPartition, Floats]]:
        """By table, the gradient of each distinct row, times ``scale``; rows that no gradient reached are left out."""
        parts: dict[str, list[PulledRows]] = {}
        for asked in self._asked:
            for found in asked.found.values():
                if found.rows.grad is not None:
                    parts.setdefault(found.table, []).append(found)
        return {table: self._merged(founds, scale) for table, founds in parts.items()}

    def _merged(self, founds: Sequence[PulledRows], scale: float) -> tuple[IdPartition, Floats]:
        grads = [_gradient(found.rows, scale) for found in founds]
        if len(founds) == 1:
            share = founds[0].share
            return share, grads[0] if share.order is None else grads[0][share.order]
        ids, summed = merge([found.ids for found in founds], grads, [1.0] * len(founds))
        share = IdPartition.of(ids, len(self._client.links))
        return share, summed if share.order is None else summed[share.order]

    def origins(self, tables: Mapping[str, tuple[IdPartition, Floats]]) -> dict[str, Floats]:
        """The rows as they were read, in the order of ``tables``."""
        read = {found.table: found for asked in reversed(self._asked) for found in asked.found.values()}
        return {
            name: read[name].origin if share.order is None else read[name].origin[share.order]
            for name, (share, _) in tables.items()
        }


def _gradient(rows: Tensor, scale: float) -> Floats:
    assert rows.grad is not None
    grad = rows.grad.detach().cpu()
    return (grad if scale == 1.0 else grad * scale).numpy()


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def _joined_ids(tensors: Sequence[Tensor]) -> Ids:
    flat = [ids.detach().reshape(-1).cpu() for ids in tensors]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).contiguous().numpy()


def _own(values: Floats) -> Floats:
    """Memory that torch may write to; what came over the network must not be."""
    return values if values.flags.writeable else values.copy()


def _check(table: str, ids: Tensor) -> None:
    if ids.dtype != torch.int64:
        raise DataError(
            f"table '{table}' was asked for ids of type {str(ids.dtype).removeprefix('torch.')}; ids are int64: call "
            ".long(), or hash names with echelon.data"
        )
