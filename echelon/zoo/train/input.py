"""Translate the input parameters of ``echelon train`` to loader options, and measure how long a run waits for input."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from echelon.base.errors import UsageError
from echelon.base.formatting import things
from echelon.data import Loader, Mixture, Repeated, RepeatedStream
from echelon.data.batched import is_batched
from echelon.data.blocks import is_blocked
from echelon.data.data_source import is_stream
from echelon.data.map_source import columns_of
from echelon.data.resumable_source import ResumableStream
from echelon.data.shard_source import is_sharded
from echelon.zoo.entry import Data, Request


def loader_options(request: Request, data: Data, ranks_on_host: int) -> dict[str, Any]:
    """Return the options for ``engine.loader(train_part(request, data), ...)``; those of the data set take precedence.

    A worker is a process that makes one batch at a time, so ``num_parallel_batches`` is also the largest number of
    workers of a rank.
    """
    workers = _workers(request, data.train, ranks_on_host)
    ahead = _positive(request, "prefetch_buffer_size", 32)
    return {
        "workers": workers,
        "prefetch": max(1, ahead // max(workers, 1)),
        "shuffle_buffer": _positive(request, "shuffle_buffer_size", 1024),
        **data.loader,
    }


def train_part(request: Request, data: Data) -> Any:
    """Return ``data.train``, repeated or cut to ``num_sample_per_epoch`` samples if that is set."""
    size = request.get("num_sample_per_epoch")
    if size is None:
        return data.train
    if size < 1:
        raise UsageError(f"--num_sample_per_epoch {size}: an epoch needs one sample at least")
    if is_blocked(data.train) or is_sharded(data.train) or isinstance(data.train, ResumableStream):
        raise UsageError(
            f"--num_sample_per_epoch {size}: this data is files or a stream, and an epoch is all of it; leave it "
            "out, and use --stop_at_step"
        )
    if is_stream(data.train):
        return RepeatedStream(data.train, size)
    if isinstance(data.train, Mixture):
        return data.train.resized(size)
    is_that_long = not isinstance(data.train, tuple) and len(data.train) == size
    return data.train if is_that_long else Repeated(data.train, size)


def _workers(request: Request, train: Any, ranks_on_host: int) -> int:
    """Return the number of workers; 0 for data in memory, and for streams, which each worker would read completely."""
    threads = _positive(request, "num_preprocessing_threads", 16)
    batches = _positive(request, "num_parallel_batches", 8)
    inner = train.dataset if isinstance(train, Repeated) else train
    inner = inner.joined if isinstance(inner, Mixture) else inner
    if columns_of(inner) or is_batched(inner) or is_stream(inner):
        return 0
    return min(max(min(threads, _cores()) // ranks_on_host, 1), batches)


def _positive(request: Request, name: str, default: int) -> int:
    value: int = request.get(name, default)
    if value < 1:
        raise UsageError(f"--{name} {value}: must be 1 or more")
    return value


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class InputWaitTimer:
    """Measures how long the loop over a loader waits for batches.

    The very first batch is not counted, because workers start then. On a GPU the host runs ahead, so the GPU has been
    idle for at most as long.
    """

    def __init__(self) -> None:
        self._waited, self._total = 0.0, 0.0
        self._loader: Loader | None = None

    def around(self, loader: Loader) -> Iterator[Any]:
        """Yield the batches of one epoch of the loader and measure the waits."""
        is_first, self._loader = self._loader is None, loader
        batches, requested = iter(loader), time.perf_counter()
        for batch in batches:
            got = time.perf_counter()
            self._note(0.0 if is_first else got - requested, 0.0 if is_first else got - requested)
            is_first = False
            yield batch
            requested = time.perf_counter()
            self._note(0.0, requested - got)

    @property
    def share(self) -> float:
        """The fraction of the time so far that was spent waiting."""
        return self._waited / self._total if self._total else 0.0

    def line(self, speed: float, unit: str) -> str:
        """Return a line about input speed and waits.

        speed: training throughput of all ranks, in examples per second
        """
        if self._loader is None:
            return "input: nothing was read"
        waited = f"waited {self.share:.1%} of the time"
        rate, workers = self._loader.possible_rate, self._loader.workers
        if rate is None:
            return f"input: {speed:,.0f} {unit}/s trained, {waited}"
        possible = rate * self._loader.global_batch / self._loader.batch_size  # assumes that all ranks are as fast
        return f"input: {possible:,.0f} {unit}/s possible ({_workers_said(workers)}), {waited}"

    def _note(self, waited: float, passed: float) -> None:
        self._waited += waited
        self._total += passed


def _workers_said(workers: int) -> str:
    return f"{things(workers, 'worker')} a rank" if workers else "no workers"
