"""Translates torch's DataLoader, and torch's names of its options, to options of ``echelon.data.Loader``."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from echelon.base.errors import UsageError
from echelon.data.hugging_face import has_columns
from echelon.data.map_source import columns_of
from echelon.data.sampling import SeedDrawingSampler, known_length, nested

#: torch's names of options that have another name here.
RENAMED = {"num_workers": "workers", "collate_fn": "collate", "prefetch_factor": "prefetch"}
#: torch's options that need no setting: batches are pinned if that helps, and workers persist.
CARED_FOR = ("pin_memory", "persistent_workers", "pin_memory_device", "in_order")


class LoaderRequest(NamedTuple):
    """A data set and options of ``echelon.data.Loader``; ``origin`` is a line about values from a DataLoader, or ''."""

    dataset: Any
    batch_size: int | None
    global_batch: int | None
    options: dict[str, Any]
    origin: str = ""


def loader_request(
    data: Any, batch_size: int | None, global_batch: int | None, options: dict[str, Any]
) -> LoaderRequest:
    """Return the data set and options of a loader; ``data`` may be a DataLoader, options may have torch's names."""
    options = _in_our_names(options)
    _refuse_contradictions(options, batch_size, global_batch)
    if is_torch_loader(data):
        return _from_loader(data, batch_size, global_batch, options)
    _refuse_wrapper(data)
    if (generator := options.pop("generator", None)) is not None and options.pop("shuffle", True):
        options.setdefault("sampler", _shuffled_by(generator, data))
    if "sampler" in options:
        options["sampler"] = undealt(options["sampler"], options)
    return LoaderRequest(data, batch_size, global_batch, options)


def _refuse_wrapper(data: Any) -> None:
    """Raise for an object that iterates a DataLoader, because its items are batches and not samples."""
    if isinstance(data, IterableDataset) or hasattr(data, "__getitem__"):
        return
    for name, value in getattr(data, "__dict__", {}).items():
        if is_torch_loader(value):
            raise UsageError(
                f"{type(data).__name__} iterates the DataLoader in its '{name}', and its items are batches; pass that "
                "DataLoader to engine.loader()"
            )


def refuse_unnamed(sizes: tuple[Any, ...]) -> None:
    """Raise for ``loader(dataset, 32)``: it could be the size per replica or of all replicas."""
    if sizes:
        raise UsageError(
            f"loader(dataset, {sizes[0]}) does not say which batch that is; write batch_size={sizes[0]} for each "
            f"replica, or global_batch={sizes[0]} for all together"
        )


def _shuffled_by(generator: torch.Generator, data: Any) -> SeedDrawingSampler:
    """Return the sampler of ``DataLoader(data, shuffle=True, generator=generator)``."""
    columns = columns_of(data)
    size = known_length(columns[0] if columns else data)
    if not size:
        raise UsageError(
            f"generator= decides the order of samples, but {type(data).__name__} is read in its own order; leave it out"
        )
    return SeedDrawingSampler(RandomSampler(range(size), generator=generator), generator)


def is_torch_loader(data: Any) -> bool:
    return isinstance(data, DataLoader)


def is_sharded_by_rank(loader: DataLoader[Any]) -> bool:
    """Return True if a sampler of the DataLoader depends on the rank, or its data is a stream, which may."""
    if isinstance(loader.dataset, IterableDataset):
        return True
    return _is_of_ranks(loader.sampler) or _is_of_ranks(loader.batch_sampler)


def undealt(sampler: Any, options: dict[str, Any]) -> Any:
    """Return a sampler of the whole order, in place of one that draws the share of a rank."""
    if not _is_of_ranks(sampler) or options.get("world_size") == 1:
        return sampler
    if not isinstance(sampler, DistributedSampler):
        raise UsageError(
            f"{type(sampler).__name__} and engine.loader() both distribute samples over ranks; pass a sampler of the "
            "whole order, or add rank=0, world_size=1 to keep this one's shares"
        )
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank = 1, 0
    whole.num_samples = whole.total_size = len(sampler.dataset)  # type: ignore[arg-type]
    whole.drop_last = False  # it concerned the ranks' shares; the loader's own option is uneven='drop'
    return whole


def _is_of_ranks(sampler: Any) -> bool:
    """Return True if a sampler, or one inside it, draws the share of one rank."""
    return any(
        (hasattr(one, "num_replicas") and hasattr(one, "rank")) or hasattr(one, "process_index")
        for one in nested(sampler)
    )


def _in_our_names(options: dict[str, Any]) -> dict[str, Any]:
    result = {name: value for name, value in options.items() if name not in CARED_FOR and name not in RENAMED}
    for torchs, ours in RENAMED.items():
        if torchs in options and ours in options:
            raise UsageError(f"{torchs}= and {ours}= are one option; leave one of them out")
        if options.get(torchs) is not None:
            result[ours] = options[torchs]
    if "drop_last" in result:
        drops = result.pop("drop_last")
        if "uneven" in result:
            raise UsageError("drop_last= and uneven= are one option; leave one of them out")
        result["uneven"] = "drop" if drops else "join"
    return {
        name: value for name, value in result.items() if value is not None or name not in ("sampler", "batch_sampler")
    }


def _refuse_contradictions(options: dict[str, Any], batch_size: int | None, global_batch: int | None) -> None:
    if "sampler" in options and options.get("shuffle"):
        raise UsageError("sampler= and shuffle=True both decide the order; leave one of them out")
    if "batch_sampler" not in options:
        return
    for name, value in (
        ("sampler", options.get("sampler")),
        ("batch_size", batch_size),
        ("global_batch", global_batch),
    ):
        if value is not None:
            raise UsageError(f"batch_sampler= makes the global batches itself; leave {name}= out")


def _from_loader(
    loader: DataLoader[Any], batch_size: int | None, global_batch: int | None, options: dict[str, Any]
) -> LoaderRequest:
    _refuse_odd(loader)
    taken: dict[str, Any] = {"workers": loader.num_workers, "prefetch": loader.prefetch_factor}
    taken |= {"collate": _collate(loader), "worker_init_fn": loader.worker_init_fn}
    is_sized = batch_size is not None or global_batch is not None
    taken |= _order(loader, is_sized, options)
    if not is_sized and "batch_sampler" not in {**taken, **options}:
        batch_size = getattr(loader.batch_sampler, "batch_size", None)
    taken = {name: value for name, value in taken.items() if value is not None and name not in options}
    sizes = {"batch_size": batch_size, "global_batch": global_batch}
    line = _line({name: value for name, value in sizes.items() if value is not None} | taken, is_sized)
    return LoaderRequest(loader.dataset, batch_size, global_batch, {**taken, **options}, line)


def _refuse_odd(loader: DataLoader[Any]) -> None:
    name = type(loader).__name__
    if any("__iter__" in vars(kind) for kind in type(loader).__mro__[: type(loader).__mro__.index(DataLoader)]):
        raise UsageError(
            f"{name} has an __iter__ of its own, which engine.loader() would pass over; pass its .dataset and collate="
        )
    if loader.batch_sampler is None:
        raise UsageError(
            f"{name}(batch_size=None) hands out its samples as batches; give it a batch_size, or pass batch_size= and "
            "collate= to engine.loader(loader.dataset)"
        )


def _collate(loader: DataLoader[Any]) -> Any:
    """Return the DataLoader's collate function; None for torch's default, unless rows have columns."""
    torchs = loader.collate_fn is default_collate and not has_columns(loader.dataset)
    return None if torchs else loader.collate_fn


def _order(loader: DataLoader[Any], is_sized: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for the order of samples: shuffle, sampler or batch_sampler, and uneven."""
    batches: Any = loader.batch_sampler
    is_chosen = any(name in options for name in ("sampler", "batch_sampler", "shuffle"))
    if type(batches) is BatchSampler and (loader.batch_size is not None or is_sized or _is_of_ranks(batches)):
        uneven = {"uneven": "drop" if batches.drop_last else "join"}
        return uneven if is_chosen else {**uneven, **_single(loader, batches.sampler, options)}
    if is_sized or is_chosen:
        raise UsageError(
            f"batch_sampler={type(batches).__name__} of the DataLoader makes the global batches itself; leave "
            "batch_size=, global_batch=, shuffle= and sampler= out, or pass the DataLoader's .dataset"
        )
    return {"batch_sampler": _seeded_by(loader, undealt(batches, options))}


def _single(loader: DataLoader[Any], sampler: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the option shuffle= if it is sufficient, else sampler=."""
    if isinstance(loader.dataset, IterableDataset):
        return {"shuffle": False}
    is_whole = known_length(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    if type(sampler) is SequentialSampler and is_whole:
        return {"shuffle": False}
    if type(sampler) is RandomSampler and is_whole and not sampler.replacement and sampler.generator is None:
        return {"shuffle": True}
    return {"sampler": _seeded_by(loader, undealt(sampler, options))}


def _seeded_by(loader: DataLoader[Any], sampler: Any) -> Any:
    """Return the sampler with the DataLoader's own draws, if both draw from the same generator."""
    generator = loader.generator
    shares = generator is not None and any(getattr(one, "generator", None) is generator for one in nested(sampler))
    return SeedDrawingSampler(sampler, generator) if generator is not None and shares else sampler


def _line(taken: dict[str, Any], is_sized: bool) -> str:
    said = {name: _said(value) for name, value in taken.items() if name not in ("prefetch", "worker_init_fn")}
    if not taken.get("workers"):
        said.pop("workers", None)
    if "batch_size" in said and not is_sized:
        size = said["batch_size"]
        said["batch_size"] = f"{size} for each replica (global_batch={size} keeps the batches of one process)"
    if "batch_sampler" in said:
        said["batch_sampler"] += ", whose batches are dealt out to replicas"
    return "loader: from the DataLoader: " + ", ".join(f"{name}={value}" for name, value in said.items())


def _said(value: Any) -> str:
    value = value.sampler if isinstance(value, SeedDrawingSampler) else value
    plain = isinstance(value, int | str | bool)
    return str(value) if plain else getattr(value, "__name__", type(value).__name__)
