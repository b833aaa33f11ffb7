"""Samples of the loaders' batches: the ranks write them to disk, and one process collates those of all replicas again.

Batches that each rank has padded to its own length cannot be concatenated; their samples can be collated.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.data import Loader
from echelon.data.collate import BatchCollator
from echelon.data.seeding import preserve_global_rng
from echelon.plan.operations import tensors_in
from echelon.tools.verify.batches import on_device
from echelon.tools.verify.float64 import to_float64
from echelon.tools.verify.verify_request import VerifyRequest

#: Differs from every seed that a loader uses, so that a collate function that draws random numbers is detected.
SEED = 1


def _file(question: VerifyRequest, loader: int, batch: int, replica: int) -> Path:
    return question.file(f"samples-{loader}-{batch}-{replica}.pickle")


class SampleWriter:
    """Writes the samples of each batch that one loader of this rank hands out to files."""

    def __init__(self, question: VerifyRequest, loader: int, replica: int) -> None:
        self._question, self._loader, self._replica = question, loader, replica
        self._heard: deque[bytes | None] = deque()
        self._batches = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record the samples that the loader collates within this context."""
        before, BatchCollator.overheard = BatchCollator.overheard, self._hear
        try:
            yield
        finally:
            BatchCollator.overheard = before

    def begin(self) -> None:
        """Drop samples that were prefetched in an abandoned epoch."""
        self._heard.clear()

    def handed_out(self, counts: bool) -> None:
        """Write the samples of the batch that the loader has just handed out.

        counts: False for a stand-in batch, which is not part of the global batch
        """
        samples = self._heard.popleft() if self._heard else None
        if samples is not None and counts:
            path = _file(self._question, self._loader, self._batches, self._replica)
            own = path.with_suffix(f".{os.getpid()}")  # ranks that share a batch write the same file
            own.write_bytes(samples)
            own.replace(path)
        self._batches += 1

    def _hear(self, samples: list[Any]) -> None:
        try:
            self._heard.append(pickle.dumps(samples))  # at once: a collate function may modify the samples
        except Exception:  # pickling user objects may raise anything; the collated batch is then used as it is
            self._heard.append(None)


class GatheredBatch(NamedTuple):
    """The samples of all replicas as one batch, and the samples of each replica as a batch of its own."""

    batch: Any
    shares: list[Any]


class SampleReader:
    """Reads the batches of one loader in the one process, each collated again from the samples of all replicas."""

    def __init__(
        self, question: VerifyRequest, loader: Loader, number: int, replicas: int, device: torch.device
    ) -> None:
        self._question, self._number, self._replicas = question, number, replicas
        self._collate, self._device = loader.collate, device
        self._batches = Counter[str]()

    def next(self) -> GatheredBatch | None:
        """Return the next batch; None if its samples were not recorded."""
        at = self._batches["read"]
        self._batches["read"] += 1
        paths = [_file(self._question, self._number, at, replica) for replica in range(self._replicas)]
        result = [path.read_bytes() for path in paths if path.exists()]
        if not result:
            return None
        whole = [sample for one in result for sample in pickle.loads(one)]
        return GatheredBatch(self._batch(whole), [self._batch(pickle.loads(one)) for one in result])

    def _batch(self, samples: list[Any]) -> Any:
        with preserve_global_rng():
            batch = on_device(self._collate(samples, range(len(samples)), SEED), self._device)
        return to_float64(batch) if self._question.wide else batch


def is_passed_on(inputs: Any, gathered: GatheredBatch, batches: list[Any]) -> bool:
    """Return True if ``inputs`` is the gathered batch and each of ``batches`` is a replica's share of it, unchanged."""
    own = {id(leaf) for leaf in tensors_in(gathered.batch)}
    if not all(id(leaf) in own for leaf in tensors_in(inputs)) or len(batches) != len(gathered.shares):
        return False
    return all(
        any(_equal(leaf, other) for other in tensors_in(share))
        for batch, share in zip(batches, gathered.shares, strict=True)
        for leaf in tensors_in(batch)
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
