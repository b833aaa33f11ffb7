"""``TritonOperations``: the operations of a device table as Triton kernels; Triton is imported with this module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echelon.parameter_server.device_table import triton_kernels as kernels
from echelon.parameter_server.device_table.device_index import FREE_KEY, DeviceIndex
from echelon.parameter_server.device_table.device_rows import USED, DeviceRows
from echelon.parameter_server.device_table.first_rows import FirstRows
from echelon.parameter_server.device_table.row_update import RowsToUpdate
from echelon.parameter_server.device_table.segments import PIECE
from echelon.parameter_server.device_table.torch_operations import TorchOperations
from echelon.parameter_server.table.initial import CONSTANT, NORMAL
from echelon.strategy.sparse_update_rules import Adagrad, Adam, Ftrl, Momentum, Rule, Sgd

#: Ids of one program of find and claim; floats of one program of gather and update. Not tuned: no GPU has run them yet.
_IDS, _FLOATS = 128, 2048


class TritonOperations:
    """Find, gather, claim and update as kernels; ``TorchOperations`` says what each does."""

    name = "triton"

    def __init__(self, first: FirstRows, rule: Rule) -> None:
        self._first, self._plain, self._rule = first, TorchOperations(first, rule), _rule_number(rule)
        kind = CONSTANT if first.kind != NORMAL and not first.span > 0 else first.kind
        self._kind = kind
        self._columns = _columns(first.dim)
        self._numbers: dict[torch.device, Tensor] = {}

    def locate(self, index: DeviceIndex, ids: Tensor) -> Tensor:
        return self._searched(index, ids, places=True)

    def find(self, index: DeviceIndex, ids: Tensor) -> Tensor:
        return self._searched(index, ids, places=False)

    def _searched(self, index: DeviceIndex, ids: Tensor, places: bool) -> Tensor:
        found = torch.empty_like(ids)
        if len(ids):
            kernels.find[(_programs(len(ids), _IDS),)](
                ids.contiguous(), index.keys, index.values, found, len(ids), index.size, index.low, index.span,
                index.scale, FREE_KEY=FREE_KEY, PLACES=places, BLOCK=_IDS,
            )  # fmt: skip
        return found

    def claim(self, index: DeviceIndex, table: DeviceRows, ids: Tensor) -> Tensor:
        found = torch.empty_like(ids)
        if len(ids):
            kernels.claim[(_programs(len(ids), _IDS),)](
                ids.contiguous(), index.keys, table.counters[USED:], found, len(ids), index.size, index.low,
                index.span, index.scale, FREE_KEY=FREE_KEY, BLOCK=_IDS,
            )  # fmt: skip
        return found

    def gather(self, table: DeviceRows, ids: Tensor, slots: Tensor, width: int) -> Tensor:
        first = self._first
        out = torch.empty(len(ids), width, device=ids.device)
        columns = _columns(width)
        block = max(1, _FLOATS // columns)
        if len(ids):
            kernels.gather[(_programs(len(ids), block),)](
                ids.contiguous(), slots, table.rows, self._first_numbers(ids.device), out, len(ids), first.seed,
                first.filled, width, DIM=first.dim, ROW=table.width, KIND=self._kind, COLUMNS=columns, BLOCK=block,
                enable_fp_fusion=False,
            )  # fmt: skip
        return out

    def update(self, table: DeviceRows, work: RowsToUpdate) -> None:
        if self._rule is None:
            self._plain.update(table, work)
            return
        first, runs, device = self._first, work.segments, work.ids.device
        grads, ids, count = work.grads.contiguous(), work.ids.contiguous(), len(work.ids)
        ends, sums = self._piece_sums(work, grads)
        settings = [*work.settings, 0.0, 0.0, 0.0][:4]
        block = max(1, _FLOATS // self._columns)
        kernels.update[(_programs(count, block),)](
            ids, grads, runs.order, runs.starts, runs.first, ends, sums, work.slots, work.new, work.before,
            table.rows, table.meta, self._first_numbers(device), count, first.seed, first.filled, work.seen,
            work.scale, *settings, RULE=self._rule, DIM=first.dim, ROW=table.width, KIND=self._kind,
            COLUMNS=self._columns, PIECE=PIECE, BLOCK=block, enable_fp_fusion=False,
        )  # fmt: skip

    def _piece_sums(self, work: RowsToUpdate, grads: Tensor) -> tuple[Tensor, Tensor]:
        """Sum the pieces of long runs; return the number of pieces up to the end of each run, and the sums."""
        runs, count, dim = work.segments, len(work.ids), self._first.dim
        most = 2 * count // PIECE  # a long run has more than PIECE positions
        if not most:
            return runs.starts, grads  # not looked at: no run is long
        lengths = runs.lengths
        ends = torch.where(lengths > PIECE, (lengths + PIECE - 1) // PIECE, 0).cumsum(0)
        sums = torch.empty(most, dim, device=grads.device)
        run = torch.searchsorted(ends, torch.arange(most, device=grads.device), right=True)
        kernels.piece_sums[(most,)](
            grads, runs.order, runs.starts, run.clamp(max=count - 1), ends, sums, ends[-1:],
            DIM=dim, COLUMNS=self._columns, PIECE=PIECE,
        )  # fmt: skip
        return ends, sums

    def _first_numbers(self, device: torch.device) -> Tensor:
        if device not in self._numbers:
            first = self._first
            numbers = [first.low, first.span, first.top, first.start]
            self._numbers[device] = torch.tensor(numbers, dtype=torch.float64, device=device)
        return self._numbers[device]


def _programs(count: int, each: int) -> int:
    return -(-count // each)


def _columns(width: int) -> int:
    """Return the columns of a program: a power of two, at least the four sums of a mean square."""
    return max(4, 1 << (width - 1).bit_length())


def _rule_number(rule: Rule) -> Any:
    """Return the number of a rule's kernel; None for a rule that has none."""
    if isinstance(rule, Ftrl):
        return None  # a power of any exponent: torch's operations apply it
    if isinstance(rule, Momentum):
        return kernels.NESTEROV if rule.nesterov else kernels.MOMENTUM
    if isinstance(rule, Adagrad):
        return kernels.ROW_ADAGRAD if rule.row_wise else kernels.ADAGRAD
    return {Sgd: kernels.SGD, Adam: kernels.ADAM}[type(rule)]
