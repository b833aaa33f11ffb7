"""Exchanges between workers that hold the tables: each gives every worker a message and gets one from every worker.

``GroupExchange`` sends messages through torch.distributed; ``SharedMemoryExchange``, in a module of its own, leaves
them in memory that the workers of one host share.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from echelon.base.errors import PeerLost, first_line
from echelon.distributed.activity import waiting
from echelon.distributed.collectives import start_all_to_all

Bytes = NDArray[np.uint8]

#: Bytes before each message of a ``GroupExchange``: its length, and the length of the sender's longest message.
PREFIX = 16
#: Length to which the first message of a kind is padded. Later ones are padded to the longest so far, and a quarter.
FIRST = 1 << 12
#: Messages begin at multiples of this number of bytes.
ALIGNMENT = 64


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class RowExchange(Protocol):
    """Interface of an exchange. All workers make the same exchanges in the same order.

    how: words for the startup log
    """

    how: str

    def outgoing(self, sizes: Sequence[int]) -> list[Bytes]:
        """Return memory for the next message to each worker, to be filled before ``swap``."""

    def swap(self, kind: int) -> list[Bytes]:
        """Send the messages, and return those of all workers, which are valid until the next but one ``swap``.

        kind: number of the kind of exchange; messages of one kind have similar lengths
        """

    def close(self) -> None: ...


class GroupExchange:
    """An exchange through a process group of its own: Gloo between CPUs, NCCL between GPUs.

    A message is padded to a length that all workers know, so that lengths are not sent before. If one was longer,
    all workers see that in the prefix, and send the rest in a second round.
    """

    def __init__(self, rank: int, ranks: int, device: torch.device, timeout: float) -> None:
        self._group = dist.new_group(timeout=timedelta(seconds=timeout))
        backend = dist.get_backend(self._group)
        self.how = f"all-to-all ({backend})"
        self._device = device if backend == "nccl" else torch.device("cpu")
        self._rank, self._ranks = rank, ranks
        self._padded: dict[int, int] = {}
        self._sent = torch.empty(ranks, PREFIX + FIRST, dtype=torch.uint8)
        self._most = 0

    def outgoing(self, sizes: Sequence[int]) -> list[Bytes]:
        self._most = max(sizes)
        if PREFIX + self._most > self._sent.shape[1]:
            self._sent = torch.empty(self._ranks, aligned(PREFIX + self._most * 5 // 4), dtype=torch.uint8)
        rows: list[Bytes] = list(self._sent.numpy())
        for row, size in zip(rows, sizes, strict=True):
            row[:PREFIX].view(np.int64)[:] = size, self._most
        return [row[PREFIX : PREFIX + size] for row, size in zip(rows, sizes, strict=True)]

    def swap(self, kind: int) -> list[Bytes]:
        padded = self._padded.setdefault(kind, FIRST)
        got = self._transferred(0, PREFIX + padded)
        lengths, mosts = np.stack([part[:PREFIX].view(np.int64) for part in got]).T.tolist()
        most = max(mosts)
        if most > padded:
            rest = self._transferred(PREFIX + padded, PREFIX + most)
            got = [np.concatenate(both) for both in zip(got, rest, strict=True)]
            self._padded[kind] = aligned(most * 5 // 4)
        return [part[PREFIX : PREFIX + length] for part, length in zip(got, lengths, strict=True)]

    def _transferred(self, begin: int, end: int) -> list[Bytes]:
        """Send these bytes of each message, and return those of the messages that arrive."""
        if end > self._sent.shape[1]:
            longer = torch.empty(self._ranks, end, dtype=torch.uint8)
            longer[:, : self._sent.shape[1]] = self._sent
            self._sent = longer
        sent = self._sent[:, begin:end].contiguous().to(self._device)
        received = torch.empty_like(sent)
        try:
            with waiting("rows of tables", "", self._group):
                start_all_to_all(received, sent, self._group, tag=0).wait()
        except RuntimeError as error:
            raise PeerLost(
                f"worker {self._rank}: the exchange of rows of sparse tables has failed: {first_line(error)}; another "
                "worker has ended or stands still, see its log"
            ) from None
        return list(received.cpu().numpy())

    def close(self) -> None:
        if dist.is_initialized() and dist.get_backend(self._group) == "gloo":
            dist.destroy_process_group(self._group)
