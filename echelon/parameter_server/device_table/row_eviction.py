"""Selection of the rows that a full device table evicts: those with the smallest (score, hash of the id)."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.parameter_server.device_table.device_index import DeviceIndex
from echelon.parameter_server.device_table.device_rows import DeviceRows
from echelon.parameter_server.device_table.signed_hash import LOW_HALF, mix
from echelon.parameter_server.table.records import COUNT


def select_evictions(index: DeviceIndex, rows: DeviceRows, pinned: Tensor, oldest: bool, number: int) -> Tensor:
    """Return the ids of the ``number`` rows to evict, as ``table.eviction``; fewer if too many rows are pinned.

    pinned: rows that stay, because the push needs them
    oldest: evict the rows whose last push is longest ago; else those with the fewest pushes
    """
    places = index.live()
    slots, keys = index.values[places], index.keys[places]
    stays = torch.zeros(len(rows.rows), dtype=torch.bool, device=index.device)
    stays[pinned] = True
    may_go = slots >= 0
    may_go[may_go.clone()] &= ~stays[slots[may_go]]
    keys, meta = keys[may_go], rows.meta[slots[may_go]].long()
    score = (meta[:, 1] & LOW_HALF) if oldest else (meta[:, 0] & COUNT)
    rank = ((score - 2**31) << 32) | (mix(keys) & LOW_HALF)  # signed numbers in the order of the unsigned ones
    return keys[rank.topk(min(number, len(keys)), largest=False, sorted=True).indices]
