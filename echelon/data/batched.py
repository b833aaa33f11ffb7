"""In-memory data sets that make whole batches themselves, because making many samples at once is faster."""

from __future__ import annotations

import inspect
from typing import Any, Protocol, runtime_checkable

from echelon.data.loader_options import LoaderOptions
from echelon.data.map_source import DatasetOrder, MapSource, StepIndices
from echelon.data.order import Indices
from echelon.data.repeated import Repeated
from echelon.data.seeding import SeedPurpose, Seeds, chain_each, mix


@runtime_checkable
class BatchedDataset(Protocol):
    """A data set that can also be indexed sample by sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def batch(self, indices: Indices, seeds: Seeds) -> Any:
        """Return these samples as one batch.

        All randomness of a sample must come from its seed. The seed depends on the loader's seed, the epoch and the
        sample's position in it only: so it is the same for any number of ranks.
        """


class BatchedSource(MapSource):
    """Calls ``batch`` once per batch, without seeding of global generators and without collating."""

    def __init__(
        self, dataset: Any, options: LoaderOptions, size: int | None = None, order: DatasetOrder | None = None
    ) -> None:
        super().__init__(dataset, len(dataset) if size is None else size, options, order)
        self._repeated = dataset if isinstance(dataset, Repeated) else None
        self._batched: BatchedDataset = _inner(dataset)
        self._calm = True

    def _gather(self, request: StepIndices) -> Any:
        seed = mix(self._options.seed, SeedPurpose.SAMPLE, request.epoch)
        rows = request.indices if self._repeated is None else self._repeated.rows(request.indices)
        return self._batched.batch(rows, chain_each(seed, request.positions))


def makes_batches(dataset: Any, options: LoaderOptions) -> bool:
    """Return True if the data set makes batches itself and no option needs single samples."""
    by_sample = options.collate is not None or options.lengths is not None or options.cache or options.pack
    return is_batched(_inner(dataset)) and not by_sample


def is_batched(dataset: Any) -> bool:
    """Return True if it has ``batch(indices, seeds)``.

    Hugging Face's ``Dataset.batch`` takes a batch size, so the number of required arguments decides.
    """
    if not isinstance(dataset, BatchedDataset):
        return False
    try:
        parameters = inspect.signature(dataset.batch).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional and one.default is inspect.Parameter.empty for one in parameters) == 2


def _inner(dataset: Any) -> Any:
    return dataset.dataset if isinstance(dataset, Repeated) else dataset
