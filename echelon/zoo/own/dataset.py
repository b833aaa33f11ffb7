"""Make a user's data set an entry of the zoo."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.utils.data

from echelon.base.errors import UsageError
from echelon.data.data_source import is_stream
from echelon.zoo.entry import Data, Dataset, Request
from echelon.zoo.own.arguments import OwnArguments, read_arguments
from echelon.zoo.own.own_object import declared_tasks, found_at, short_name

#: Arguments that select the part of a data set, as in torchvision: (value for training, value for tests).
_PARTS: dict[str, tuple[Any, Any]] = {"train": (True, False), "split": ("train", "test")}


def own_dataset(place: str) -> Dataset:
    """Return the entry of ``file.py:Name``, which is a class or function that makes data, or a ``zoo.Dataset``."""
    result = found_at(place, "--dataset_name")
    if isinstance(result, Dataset):
        return result
    part = _part_argument(result)
    arguments = read_arguments(result, place, besides=[part] if part else [])

    def open_own(request: Request) -> Data:
        return _opened(arguments, part, request, place)

    return Dataset(
        name=short_name(place),
        open=open_own,
        tasks=declared_tasks(result, place, first="classify"),
        about=f"your own, of {place}",
        settings=arguments.settings,
        defaults=arguments.defaults,
    )


def _part_argument(make: Callable[..., Any]) -> str | None:
    try:
        known = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return None
    return next((name for name, (first, _) in _PARTS.items() if name in known and known[name].default == first), None)


def _opened(arguments: OwnArguments, part: str | None, request: Request, place: str) -> Data:
    if part is not None:
        train, test = (arguments.call(request, **{part: value}) for value in _PARTS[part])
    else:
        made = arguments.call(request)
        if isinstance(made, Data):
            return made if made.about else dataclasses.replace(made, about=_about(made.train, made.test, place))
        train, test = _two(made)
    for data in (train, *([] if test is None else [test])):
        _check(data, place)
    _check_target(train, request, place)
    return Data(train=train, test=test, facts=_facts(train), loader=_loader(train), about=_about(train, test, place))


def _two(made: Any) -> tuple[Any, Any]:
    """Return the train and test parts of {"train": ..., "test": ...}, of two data sets, or of one without a test."""
    if isinstance(made, Mapping) and "train" in made:
        return made["train"], made.get("test")
    if isinstance(made, tuple) and len(made) == 2 and all(_is_dataset(each) for each in made):
        return made
    return made, None


def _is_dataset(data: Any) -> bool:
    return isinstance(data, torch.utils.data.Dataset | tuple)


def _check(data: Any, place: str) -> None:
    if not (hasattr(data, "__getitem__") or hasattr(data, "__iter__")):
        raise UsageError(
            f"--dataset_name {place}: gave {type(data).__name__}; it must make a torch Dataset, a tuple of tensors, "
            'two of them, or {"train": ..., "test": ...}'
        )


def _check_target(train: Any, request: Request, place: str) -> None:
    """Raise UsageError if targets of a classification are floats, unless the user gave a task or a loss."""
    if request.task != "classify" or request.get("task") is not None or request.get("loss_name") != "example":
        return
    target = _first_target(train)
    if isinstance(target, float) or (hasattr(target, "dtype") and _is_floating(target.dtype)):
        raise UsageError(
            f"--dataset_name {place}: its targets are floats, which are no classes; give --task regress, or a loss: "
            "--loss_name file.py:name"
        )


def _first_target(train: Any) -> Any:
    if isinstance(train, tuple):
        return train[-1]
    if is_stream(train) or not len(train):
        return None
    sample = train[0]
    return sample[-1] if isinstance(sample, tuple | list) else None


def _is_floating(dtype: Any) -> bool:
    return dtype.is_floating_point if isinstance(dtype, torch.dtype) else np.issubdtype(dtype, np.floating)


def _facts(train: Any) -> dict[str, Any]:
    """Return the numbers of classes and words, if the data set has them as attributes."""
    classes = getattr(train, "classes", None)
    known = {name: getattr(train, name, None) for name in ("num_classes", "vocab_size")}
    if known["num_classes"] is None and isinstance(classes, list | tuple):
        known["num_classes"] = len(classes)
    return {name: value for name, value in known.items() if isinstance(value, int)}


def _loader(train: Any) -> dict[str, Any]:
    collate = getattr(train, "collate", None) or getattr(train, "collate_fn", None)
    return {"collate": collate} if callable(collate) else {}


def _about(train: Any, test: Any, place: str) -> str:
    return f"{_count(train)} of {place}, " + ("no test part" if test is None else f"{_count(test)} to test on")


def _count(data: Any) -> str:
    if isinstance(data, tuple):
        return f"{len(data[0]):,} samples"
    return "a stream" if is_stream(data) else f"{len(data):,} samples"
