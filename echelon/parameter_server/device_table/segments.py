"""``Segments``: the positions of a batch by place in the index, so that gradients of one id are added in their order.

The number of distinct ids is known on the device alone, so all arrays have room for as many as there are positions, and
nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: A longer run of one id is cut into pieces of this length, whose sums are added in their order: the head of a zipf law
#: would else occupy one program of a kernel alone.
PIECE = 256


@dataclass(frozen=True)
class Segments:
    """The runs of equal places.

    order:  positions, by place and then by position
    starts: begin of each run in ``order``, then the number of positions up to the end of the array
    places: place of each run; ``nowhere`` behind the last
    first:  position of the first id of each run; 0 behind the last
    """

    order: Tensor
    starts: Tensor
    places: Tensor
    first: Tensor

    @classmethod
    def of(cls, places: Tensor, nowhere: int) -> Segments:
        count, device = len(places), places.device
        ordered, order = places.to(torch.int32).sort(stable=True)
        heads = torch.ones(count, dtype=torch.bool, device=device)
        torch.ne(ordered[1:], ordered[:-1], out=heads[1:])
        runs = heads.cumsum(0) - 1
        starts = torch.full((count + 1,), count, dtype=torch.int64, device=device)
        positions = torch.arange(count, device=device)
        starts.scatter_(0, torch.where(heads, runs, count), torch.where(heads, positions, count))
        at = starts[:-1].clamp(max=count - 1)
        is_run = starts[:-1] < count
        return cls(order, starts, torch.where(is_run, ordered[at].long(), nowhere), torch.where(is_run, order[at], 0))

    @property
    def is_run(self) -> Tensor:
        return self.starts[:-1] < len(self.order)

    @property
    def lengths(self) -> Tensor:
        return self.starts[1:] - self.starts[:-1]
