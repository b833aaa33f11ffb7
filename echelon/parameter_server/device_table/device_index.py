"""``DeviceIndex``: an open-addressing hash table from ids to rows in device memory, in the order of the ids' buckets.

The place of an id comes from the high half of its hash, so the ids of a bucket are neighbours, and a checkpoint reads a
bucket without a look at the others. A key that equals ``FREE_KEY`` marks a free place; the one id of this value has a
place of its own behind the others. The values are those of the CPU table's index: a row, EMPTY for a removed id, or the
count of an id that waits for admission.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.base.errors import EchelonError
from echelon.parameter_server.device_table.signed_hash import bucket_of, mix, shifted, signed
from echelon.parameter_server.protocol.job_spec import BUCKETS
from echelon.parameter_server.table.index import EMPTY

#: Key of a free place. Any int64 would do; this one is no likely id.
FREE_KEY = signed(0xB1F0A5C7D3E94267)
#: Share of the places that may be in use.
LOAD = 0.5

_BUCKET_SHIFT = 32 - (BUCKETS.bit_length() - 1)
_SMALLEST = 1 << 10
_SPILL = 256  # places read at once behind the end of a bucket


class DeviceIndex:
    """The places of the ids in ``buckets``.

    keys, values: ``size`` places, the place of the id FREE_KEY, and a place that takes what belongs nowhere
    low, scale:   the place of a hash is ((its high half - low) * scale) >> 32
    """

    def __init__(self, buckets: range, device: torch.device, size: int = _SMALLEST) -> None:
        if size >= 2**31:
            raise EchelonError(f"no index of {size:,} places on a device, 2,147,483,647 are the most; use more workers")
        self.buckets, self.device, self.size = buckets, device, size
        self.low, self.span = buckets.start << _BUCKET_SHIFT, len(buckets) << _BUCKET_SHIFT
        self.scale = (size << 32) // self.span
        self.keys = torch.full((size + 2,), FREE_KEY, dtype=torch.int64, device=device)
        self.values = torch.full((size + 2,), EMPTY, dtype=torch.int64, device=device)

    @property
    def limit(self) -> int:
        """The number of places in use at which the index grows."""
        return int(self.size * LOAD)

    @property
    def nowhere(self) -> int:
        """The place that takes what belongs nowhere."""
        return self.size + 1

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def homes(self, ids: Tensor) -> Tensor:
        """Return the place at which the search for each id begins; ids of other buckets begin at 0."""
        high = shifted(mix(ids), 32) - self.low
        place = torch.where((high >= 0) & (high < self.span), (high * self.scale) >> 32, 0)
        return torch.where(ids == FREE_KEY, self.size, place)

    def following(self, places: Tensor) -> Tensor:
        """Return the next place of a search."""
        return torch.where(places + 1 >= self.size, 0, places + 1)

    def pairs(self, bucket: int) -> tuple[Tensor, Tensor]:
        """Return the ids and values of a bucket, sorted by id."""
        places = self._places(bucket)
        keys, values = self.keys[places], self.values[places]
        of_bucket = (values != EMPTY) & (bucket_of(keys) == bucket)
        keys, order = keys[of_bucket].sort()
        return keys, values[of_bucket][order]

    def _places(self, bucket: int) -> Tensor:
        """Return the places that may hold ids of a bucket: its own, and those behind them up to a free place."""
        start = bucket << _BUCKET_SHIFT
        begin = ((start - self.low) * self.scale) >> 32
        end = ((start + (1 << _BUCKET_SHIFT) - self.low) * self.scale) >> 32
        while end - begin < self.size:
            tail = torch.arange(end, min(end + _SPILL, begin + self.size), device=self.device) % self.size
            end += len(tail)
            if bool((self.keys[tail] == FREE_KEY).any()):
                break
        places = torch.arange(begin, end, device=self.device) % self.size
        return torch.cat([places, places.new_tensor([self.size])])

    def live(self) -> Tensor:
        """Return the places of all ids that were not removed."""
        return torch.nonzero(self.values[: self.size + 1] != EMPTY).view(-1)
