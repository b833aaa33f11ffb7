"""Opens the source that reads a data set, according to its type."""

from __future__ import annotations

from pathlib import Path
from types import GeneratorType
from typing import Any

from torch.utils.data import DataLoader

from echelon.base.errors import DataError, UsageError
from echelon.data.batched import BatchedSource, makes_batches
from echelon.data.blocks import BlockSource, is_blocked
from echelon.data.data_source import DataSource, is_stream, kind_name
from echelon.data.divided_stream import DividedSource
from echelon.data.hugging_face import refuse_whole
from echelon.data.loader_options import LoaderOptions
from echelon.data.map_source import ColumnDataset, MapSource, TensorSource, columns_of
from echelon.data.mixture import Mixture
from echelon.data.repeated import Repeated
from echelon.data.resumable_source import ResumableSource, ResumableStream
from echelon.data.sampling import EpochSampler
from echelon.data.shard_source import ShardSource, is_sharded
from echelon.data.stream import StreamSource


def open_sampling(sampler: Any, batch_sampler: Any, seed: int) -> EpochSampler | None:
    """Return the sampler that draws the order of epochs; None if the loader does."""
    if sampler is not None and batch_sampler is not None:
        raise UsageError("batch_sampler= makes the global batches itself; leave sampler= out")
    given = sampler if batch_sampler is None else batch_sampler
    if given is None:
        return None
    if not hasattr(given, "__iter__"):
        raise UsageError(f"{kind_name(given)} is no sampler; it needs an __iter__ that yields indices")
    return EpochSampler(given, seed, in_batches=batch_sampler is not None)


def draw_from(source: DataSource, sampling: EpochSampler, dataset: Any) -> None:
    """Let ``sampling`` draw the order of ``source``. Raises ``DataError`` for data without indices."""
    if not isinstance(source, MapSource):
        raise DataError(
            f"{sampling.name} chooses samples by number, and {kind_name(dataset)} is read in its own order; leave the "
            "sampler out"
        )
    if isinstance(dataset, Mixture):
        raise UsageError(f"{sampling.name} and a Mixture both choose the order; leave one of them out")
    source.draw_from(sampling)


def open_source(dataset: Any, options: LoaderOptions) -> DataSource:
    """Return the source that reads ``dataset``, according to its type."""
    _refuse(dataset)
    refuse_whole(dataset, options.world_size)
    if options.divide:
        return DividedSource(dataset, options)
    repeated = dataset if isinstance(dataset, Repeated) else None
    columns = columns_of(repeated.dataset if repeated else dataset)
    if columns:
        return _open_columns(ColumnDataset(columns, repeated), options)
    if isinstance(dataset, Mixture):
        return _open_mixture(dataset, options)
    if isinstance(dataset, ResumableStream):
        return ResumableSource(dataset, options)
    if is_blocked(dataset):
        return BlockSource(dataset, options)
    if makes_batches(dataset, options):
        return BatchedSource(dataset, options)
    mapped = not is_stream(dataset) and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if mapped:
        return MapSource(dataset, len(dataset), options)
    if is_sharded(dataset):
        return ShardSource(dataset, options)
    if is_stream(dataset):
        return StreamSource(dataset, options)
    raise DataError(
        f"{kind_name(dataset)} is no data set: it needs __len__ and __getitem__, or __iter__, or shard(index, count)"
    )


def _refuse(dataset: Any) -> None:
    """Raise for what is no data set, although it looks like one."""
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "a torch DataLoader was passed as the data set; pass it to engine.loader(), or pass its .dataset and set "
            "options here"
        )
    if isinstance(dataset, str | Path):
        raise DataError(
            f"'{dataset}' is a path, not a data set; pass a data set that reads it, such as echelon.data.FileList"
        )
    if isinstance(dataset, dict) and dataset and 0 not in dataset:
        raise DataError("a dict was passed as the data set; pass a tuple of its tensors, or a list of samples")
    if isinstance(dataset, GeneratorType | map | filter | zip):
        raise DataError(
            f"a {kind_name(dataset)} can be read only once, and every epoch reads the data again; "
            "pass a list, or an object whose __iter__ starts anew"
        )


def reads_apart(dataset: Any) -> bool:
    """Return True if each rank reads its own part of the data, and not its share of one global order."""
    mapped = not is_stream(dataset) and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return is_blocked(dataset) or (is_sharded(dataset) and not mapped and not columns_of(dataset))


def _open_mixture(mixture: Mixture, options: LoaderOptions) -> DataSource:
    if makes_batches(mixture.joined, options):
        return BatchedSource(mixture.joined, options, len(mixture), mixture.epoch_order)
    return MapSource(mixture.joined, len(mixture), options, mixture.epoch_order)


def _open_columns(columns: ColumnDataset, options: LoaderOptions) -> DataSource:
    if options.collate is None and options.lengths is None and not options.pack:
        return TensorSource(columns, options)
    return MapSource(columns, len(columns), options)
