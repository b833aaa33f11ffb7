"""The operations of a device table in torch: they run on any device, and are what the Triton kernels are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.parameter_server.device_table.device_index import FREE_KEY, DeviceIndex
from echelon.parameter_server.device_table.device_rows import USED, DeviceRows
from echelon.parameter_server.device_table.first_rows import FirstRows
from echelon.parameter_server.device_table.row_update import RowsToUpdate
from echelon.parameter_server.device_table.segments import PIECE, Segments
from echelon.parameter_server.device_table.update_rules import row_update_of
from echelon.parameter_server.table.records import CHANGED, COUNT
from echelon.strategy.sparse_update_rules import Rule


class TorchOperations:
    """Find, gather, claim and update in torch's operations."""

    name = "torch"

    def __init__(self, first: FirstRows, rule: Rule) -> None:
        self._first, self._apply = first, row_update_of(rule)

    def locate(self, index: DeviceIndex, ids: Tensor) -> Tensor:
        """Return the place of each id in the index, ``nowhere`` if it has none."""
        found = torch.full_like(ids, index.nowhere)
        left, places = torch.arange(len(ids), device=ids.device), index.homes(ids)
        wanted = ids
        while len(left):
            keys = index.keys[places]
            hit = keys == wanted
            found[left[hit]] = places[hit]
            going = ~hit & (keys != FREE_KEY)
            left, wanted, places = left[going], wanted[going], index.following(places[going])
        return found

    def find(self, index: DeviceIndex, ids: Tensor) -> Tensor:
        """Return the value of each id in the index, EMPTY if it has none."""
        return index.values[self.locate(index, ids)]

    def claim(self, index: DeviceIndex, table: DeviceRows, ids: Tensor) -> Tensor:
        """Return the place of each id, and give one to those that have none; ids may repeat."""
        found = torch.empty_like(ids)
        left, places, wanted = torch.arange(len(ids), device=ids.device), index.homes(ids), ids
        while len(left):
            free = (index.keys[places] == FREE_KEY) & (wanted != FREE_KEY)
            index.keys[places[free]] = wanted[free]  # of several ids one stays, and the others go on
            table.counters[USED] += len(torch.unique(places[free]))
            hit = index.keys[places] == wanted
            found[left[hit]] = places[hit]
            left, wanted, places = left[~hit], wanted[~hit], index.following(places[~hit])
        return found

    def gather(self, table: DeviceRows, ids: Tensor, slots: Tensor, width: int) -> Tensor:
        """Return the first ``width`` floats of each row; an id without a row reads its initial values."""
        absent = slots < 0
        out = torch.empty(len(ids), width, device=ids.device)
        out[~absent] = table.rows[slots[~absent], :width]
        out[absent] = self._first.rows(ids[absent], width)
        return out

    def update(self, table: DeviceRows, work: RowsToUpdate) -> None:
        """Sum the gradients of each run, initialize new rows, apply the rule and mark the rows as pushed."""
        begin_and_mark(table, work, self._first)
        runs = torch.nonzero(work.slots >= 0).view(-1)
        summed = run_sums(work.segments, work.grads)[runs] * work.scale
        slots = work.slots[runs]
        table.rows[slots] = self._apply(table.rows[slots], summed, work.settings)


def begin_and_mark(table: DeviceRows, work: RowsToUpdate, first: FirstRows) -> None:
    """Initialize the rows that are new, and count the push in the meta words of all."""
    new = torch.nonzero(work.new).view(-1)
    fresh = work.slots[new]
    table.rows[fresh] = first.rows(work.ids[work.segments.first[new]], table.width)
    table.meta[fresh, 0] = work.before[new].to(torch.int32)
    slots = work.slots[work.slots >= 0]
    counts = ((table.meta[slots, 0] & COUNT) + 1).clamp(max=COUNT)
    table.meta[slots, 0] = counts | (CHANGED - 2**32)
    table.meta[slots, 1] = work.seen


def run_sums(segments: Segments, grads: Tensor) -> Tensor:
    """Return the sum of the gradients of each run in the order of positions, a run of many piece by piece."""
    lengths = segments.lengths
    pieces = torch.where(lengths > PIECE, (lengths + PIECE - 1) // PIECE, lengths.clamp(max=1))
    run = torch.arange(len(lengths), device=grads.device).repeat_interleave(pieces)
    within = torch.arange(len(run), device=grads.device) - (pieces.cumsum(0) - pieces)[run]
    sizes = (lengths[run] - within * PIECE).clamp(max=PIECE)
    sums = torch.segment_reduce(grads[segments.order].contiguous(), "sum", lengths=sizes, axis=0, unsafe=True)
    return torch.segment_reduce(sums, "sum", lengths=pieces, axis=0, unsafe=True)
