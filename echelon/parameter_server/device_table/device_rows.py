"""``DeviceRows``: the rows of a table in device memory, and the numbers of those that are free.

The host knows an upper bound of the rows in use, and asks the device for their number only when the bound is reached:
a step does not wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.base.errors import EchelonError

#: Indices of the counters: rows in use, rows ever used, free rows among those, places of the index in use.
ROWS, NEXT, FREE, USED = range(4)

_SMALLEST = 1 << 10


class DeviceRows:
    """Rows of ``width`` floats; ``meta`` has the count with its flags and the last-seen time of each.

    room:     number of rows, all of them from the start and no more; default: as many as are needed
    free:     stack of the numbers of free rows
    counters: exact numbers, on the device
    """

    def __init__(self, width: int, device: torch.device, room: int = 0) -> None:
        self.width, self.device, self._room = width, device, room
        self.rows = torch.empty(0, width, device=device)
        self.meta = torch.empty(0, 2, dtype=torch.int32, device=device)
        self.free = torch.empty(0, dtype=torch.int64, device=device)
        self.counters = torch.zeros(4, dtype=torch.int64, device=device)
        self._most = [0, 0, 0, 0]  # bounds of the counters: FREE from below, the others from above
        if room:
            self._resize(room)

    def __len__(self) -> int:
        return self.exact()[ROWS]

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.meta.nbytes + self.free.nbytes

    def exact(self) -> list[int]:
        """Wait for the device and return the counters."""
        self._most = self.counters.tolist()
        return self._most

    def most(self, counter: int) -> int:
        """Return an upper bound of a counter."""
        return self._most[counter]

    def reserve(self, count: int) -> None:
        """Make sure that ``count`` new ids find rows, and count them in the bounds."""
        if not self._room and max(0, count - self._most[FREE]) + self._most[NEXT] > len(self.rows):
            _, following, free, _ = self.exact()
            wanted = following + max(0, count - free)
            if wanted > len(self.rows):
                self._resize(max(wanted + 3 * max(0, count - free), len(self.rows) * 3 // 2, _SMALLEST))
        self._most[NEXT] += max(0, count - self._most[FREE])
        self._most[FREE] = max(0, self._most[FREE] - count)
        self._most[ROWS] += count
        self._most[USED] += count

    def _resize(self, size: int) -> None:
        try:
            rows = torch.empty(size, self.width, device=self.device)
        except RuntimeError as error:  # torch's OutOfMemoryError, and what it raises for host memory
            raise EchelonError(
                f"no memory on {self.device} for a table of {size:,} rows of {4 * self.width} bytes beside its "
                f"{len(self.rows):,} of now; set a capacity, use more workers, or location='cached'"
            ) from error
        used = len(self.rows)
        rows[:used] = self.rows
        meta = torch.empty(size, 2, dtype=torch.int32, device=self.device)
        meta[:used] = self.meta
        free = torch.empty(size, dtype=torch.int64, device=self.device)
        free[:used] = self.free
        self.rows, self.meta, self.free = rows, meta, free

    def deal(self, wants: Tensor, first: Tensor) -> Tensor:
        """Return a row for each run that wants one, in the order of the runs' first positions.

        So the numbers of rows do not depend on the order in which ids came to their places in the index.
        """
        flags = torch.zeros(len(wants) + 1, dtype=torch.int64, device=self.device)
        flags.scatter_(0, torch.where(wants, first, len(wants)), 1)
        ranks = flags[:-1].cumsum(0)[first] - 1
        free, following = self.counters[FREE], self.counters[NEXT]
        if len(self.free):
            reused = self.free[(free - 1 - ranks).clamp(0, len(self.free) - 1)]
            dealt = torch.where(ranks < free, reused, following + ranks - free)
        else:
            dealt = following + ranks
        new = wants.sum()
        taken = torch.minimum(new, free)
        self.counters += torch.stack([new, new - taken, -taken, torch.zeros_like(new)])
        return dealt

    def release(self, slots: Tensor) -> None:
        """Free rows."""
        free = self.exact()[FREE]
        self.free[free : free + len(slots)] = slots
        self.counters += torch.tensor([-len(slots), 0, len(slots), 0], device=self.device)
        self.exact()

    def clear(self) -> None:
        self.__init__(self.width, self.device, self._room)  # type: ignore[misc]
