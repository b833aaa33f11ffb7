"""Samples behind the batches of loaders: the ranks write them down, and one process collates those of all anew.

Batches that were padded on each rank by itself do not fit into one; their samples do.
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
from torch.utils._pytree import tree_leaves

from echelon.data import Loader
from echelon.data.collate import BatchCollator
from echelon.data.seeding import preserve_global_rng
from echelon.tools.verify.batches import on_device
from echelon.tools.verify.float64 import to_float64
from echelon.tools.verify.verify_request import VerifyRequest

#: Other than any that a loader makes: a collate function that draws random numbers gives itself away.
SEED = 1


def _file(question: VerifyRequest, loader: int, batch: int, replica: int) -> Path:
    return question.file(f"samples-{loader}-{batch}-{replica}.pickle")


class SampleWriter:
    """On a rank: samples of each batch that its loaders hand out, in files."""

    def __init__(self, question: VerifyRequest, loader: int, replica: int) -> None:
        self._question, self._loader, self._replica = question, loader, replica
        self._heard: deque[bytes | None] = deque()
        self._batches = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While the loader reads."""
        before, BatchCollator.overheard = BatchCollator.overheard, self._hear
        try:
            yield
        finally:
            BatchCollator.overheard = before

    def begin(self) -> None:
        """Forget what was read ahead in an epoch that was left."""
        self._heard.clear()

    def handed_out(self, counts: bool) -> None:
        """counts: False for a stand-in, which is no sample of the global batch"""
        samples = self._heard.popleft() if self._heard else None
        if samples is not None and counts:
            path = _file(self._question, self._loader, self._batches, self._replica)
            own = path.with_suffix(f".{os.getpid()}")  # ranks that share a batch write the same
            own.write_bytes(samples)
            own.replace(path)
        self._batches += 1

    def _hear(self, samples: list[Any]) -> None:
        try:
            self._heard.append(pickle.dumps(samples))  # now: a collate function may change them
        except Exception:  # whatever a sample of the user's says to that; its batch is then taken as it is
            self._heard.append(None)


class GatheredBatch(NamedTuple):
    """The samples of all replicas as one batch, and those of each as a batch of its own."""

    batch: Any
    shares: list[Any]


class SampleReader:
    """In one process: the batches of one loader, each collated anew from the samples of all replicas."""

    def __init__(
        self, question: VerifyRequest, loader: Loader, number: int, replicas: int, device: torch.device
    ) -> None:
        self._question, self._number, self._replicas = question, number, replicas
        self._collate, self._device = loader.collate, device
        self._batches = Counter[str]()

    def next(self) -> GatheredBatch | None:
        """Return the next batch; None where its samples were not written down."""
        at = self._batches["read"]
        self._batches["read"] += 1
        paths = [_file(self._question, self._number, at, replica) for replica in range(self._replicas)]
        found = [path.read_bytes() for path in paths if path.exists()]
        if not found:
            return None
        whole = [sample for one in found for sample in pickle.loads(one)]
        return GatheredBatch(self._batch(whole), [self._batch(pickle.loads(one)) for one in found])

    def _batch(self, samples: list[Any]) -> Any:
        with preserve_global_rng():
            batch = on_device(self._collate(samples, range(len(samples)), SEED), self._device)
        return to_float64(batch) if self._question.wide else batch


def is_passed_on(inputs: Any, gathered: GatheredBatch, batches: list[Any]) -> bool:
    """Return True if ``inputs`` are the gathered batch, and the replicas' ``batches`` their shares of it, unchanged."""
    own = {id(leaf) for leaf in _tensors(gathered.batch)}
    if not all(id(leaf) in own for leaf in _tensors(inputs)) or len(batches) != len(gathered.shares):
        return False
    return all(
        any(_equal(leaf, other) for other in _tensors(share))
        for batch, share in zip(batches, gathered.shares, strict=True)
        for leaf in _tensors(batch)
    )


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
