"""The data set ``click_log``: the synthetic click log, as batches of each task of recommenders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from echelon.base.errors import UsageError
from echelon.data.ragged_columns import RaggedColumns
from echelon.zoo import registry
from echelon.zoo.datasets.made_up.synthetic_click_log import (
    ITEMS,
    ClickLogRows,
    Ints,
    category_of,
    click_log,
    hour_of,
    item_shares,
    spread,
    tags_of,
)
from echelon.zoo.entry import Data, Dataset, Request, Setting

ROWS = 40_000  #: of the training part, unless num_sample_per_epoch says otherwise
HISTORY = Setting(name="history_length", default=20, meaning="most items of a user's history")
TRAIN, TEST = 11, 12  #: seeds

Columns = tuple[Any, ...]


def open_click_log(request: Request) -> Data:
    size, length = request.get("num_sample_per_epoch", ROWS), request.get("history_length", HISTORY.default)
    for name, value in (("num_sample_per_epoch", size), ("history_length", length)):
        if value < 1:
            raise UsageError(f"--{name} {value}: must be 1 or more")
    make, facts = _BATCHES[request.task]
    drawn = length + (request.task == "next_item")  # the last one is only predicted
    train, test = (
        _data_set(make(click_log(rows, seed, drawn), request))
        for rows, seed in ((size, TRAIN), (max(1, size // 5), TEST))
    )
    facts = {**facts, "history_length": length}
    return Data(train=train, test=test, facts=facts, about=f"{size:,} rows of a made-up click log")


def _data_set(columns: Columns) -> Any:
    ragged = any(isinstance(column, tuple) for column in columns)
    return RaggedColumns(*columns) if ragged else TensorDataset(*columns)


def _ids(rows: ClickLogRows) -> Tensor:
    columns = [(rows.user, "users"), (rows.item, "items"), (rows.category, "categories"), (hour_of(rows.time), "hours")]
    return _stacked([*columns, (category_of(rows.history[:, -1]), "categories")])


def _stacked(columns: list[tuple[Ints, str]]) -> Tensor:
    return torch.from_numpy(np.stack([spread(numbers, kind) for numbers, kind in columns], axis=1))


def _floats(values: Any) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


def _items(numbers: Ints) -> Tensor:
    return torch.from_numpy(spread(numbers, "items"))


def _clicks(rows: ClickLogRows, request: Request) -> Columns:
    return _ids(rows), _floats(rows.numbers), _floats(rows.click)


def _clicks_with_history(rows: ClickLogRows, request: Request) -> Columns:
    context = _stacked([(rows.user, "users"), (rows.item, "items"), (hour_of(rows.time), "hours")])
    before = np.where(rows.history < 0, -1, category_of(rows.history))
    candidate, history = (torch.from_numpy(spread(numbers, "categories")) for numbers in (rows.category, before))
    return context, _floats(rows.numbers), candidate, history, _floats(rows.click)


def _clicks_and_conversions(rows: ClickLogRows, request: Request) -> Columns:
    return _ids(rows), _floats(rows.numbers), _floats(np.stack([rows.click, rows.conversion], axis=1))


def _retrieval(rows: ClickLogRows, request: Request) -> Columns:
    """Users with items that they clicked; these repeat, so that there are as many as rows."""
    at = np.resize(np.flatnonzero(rows.click) if rows.click.any() else 0, len(rows.item))
    item = rows.item[at]
    users = _stacked([(rows.user[at], "users"), (category_of(rows.history[at, -1]), "categories")])
    items = _stacked([(item, "items"), (category_of(item), "categories")])
    tags, offsets = tags_of(item)
    seen = np.bincount(item, minlength=ITEMS) / len(item)
    ragged = torch.from_numpy(spread(tags, "tags")), torch.from_numpy(offsets)
    return users, items, ragged, _floats(np.log(seen[item]))


def _sequences(rows: ClickLogRows, request: Request) -> Columns:
    """Histories without their last item, the next item of each place, and random ones beside it."""
    before, after = rows.history[:, :-1], rows.history[:, 1:]
    draw = np.random.RandomState(len(rows.item))
    random = draw.choice(ITEMS, (*after.shape, request.get("negatives", 4)), p=item_shares())
    candidates = np.concatenate([after[..., None], random], axis=2)
    return _items(before), _items(np.where(after[..., None] >= 0, candidates, -1)), _floats(before >= 0)


#: Task -> (function of rows and request that makes the columns of a batch, what it determines).
_BATCHES: dict[str, tuple[Callable[[ClickLogRows, Request], Columns], dict[str, int]]] = {
    "click": (_clicks, {"slots": 5, "numbers": 3}),
    "click_history": (_clicks_with_history, {"slots": 3, "numbers": 3}),
    "click_and_conversion": (_clicks_and_conversions, {"slots": 5, "numbers": 3}),
    "retrieve": (_retrieval, {"user_columns": 2, "item_columns": 2}),
    "next_item": (_sequences, {}),
}

registry.add(
    Dataset(
        name="click_log",
        open=open_click_log,
        tasks=tuple(_BATCHES),
        about="a made-up click log with a known law: histories, tags, times, clicks and conversions",
        settings=(HISTORY,),
    )
)
