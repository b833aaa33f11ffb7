"""A synthetic click log with a known law: users, items, histories, tags, timestamps, clicks and conversions.

Every rank and every run draws the same rows. The probability of each click is known, so that a model's area under the
curve and calibration can be compared with the best possible ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

USERS, ITEMS, CATEGORIES, TAGS = 300, 1000, 25, 30
STRIDE = 3  #: categories that a user's walk steps on
START = 1_700_000_000  #: the time of the first row, in seconds
SECONDS = 40  #: mean time between two rows
SIZES = {"users": 1, "items": 2, "categories": 3, "hours": 4, "tags": 5}  #: kinds of ids, which never share one


class ClickLogRows(NamedTuple):
    """Rows of the log, in the order of their time.

    user, item, category: [n] numbers from 0
    history:     [n, s] the items that the user took before, the last one last; -1 pads their beginning
    tags:        numbers of the tags of all rows, one row after the other; a row has 0 to 3
    tag_offsets: [n + 1] where each row's tags begin
    numbers:     [n, 3] price, age and noise, in [0, 1)
    time:        [n] seconds
    probability: [n] chance of a click, which is the law
    click, conversion: [n] 0 or 1; only what was clicked is converted
    """

    user: Ints
    item: Ints
    category: Ints
    history: Ints
    tags: Ints
    tag_offsets: Ints
    numbers: Floats
    time: Ints
    probability: Floats
    click: Ints
    conversion: Ints


def click_log(rows: int, seed: int, history: int = 20) -> ClickLogRows:
    """Draw rows of the log.

    history: most items of a history, which has two at least
    """
    draw = np.random.RandomState(seed)
    user = draw.randint(0, USERS, rows)
    walked = _walks(draw, rows, history)
    wanted = (category_of(walked[:, -1]) + STRIDE) % CATEGORIES  # where the user's walk is most likely to go next
    likely = draw.random_sample(rows) < 0.5
    item = np.where(likely, _item_of(draw, wanted), _popular(draw, rows))
    numbers = draw.random_sample((rows, 3))
    time = START + np.cumsum(draw.randint(1, 2 * SECONDS, rows))
    tags, offsets = tags_of(item)
    walked = np.where(np.arange(history) >= draw.randint(0, max(history - 1, 1), rows)[:, None], walked, -1)
    known = (category_of(walked) == category_of(item)[:, None]) & (walked >= 0)
    score = _score(user, item, wanted, time) + _tag_effects(tags, offsets) + 1 - 2 * numbers[:, 0]
    score += 1.2 * known.sum(1).clip(max=2)
    probability = 1 / (1 + np.exp(-score))
    click = draw.random_sample(rows) < probability
    chance = 1 / (1 + np.exp(-(_liking(user, category_of(item)) - 2 * numbers[:, 0])))
    conversion = click & (draw.random_sample(rows) < chance)
    return ClickLogRows(
        user, item, category_of(item), walked, tags, offsets, numbers, time, probability, click.astype(np.int64),
        conversion.astype(np.int64),
    )  # fmt: skip


def spread(numbers: Ints, kind: str) -> Ints:
    """Return numbers from 0 as ids over the range of int64, other ones for each kind; -1 becomes 0, others never."""
    ids = (numbers + 1) * 8 + SIZES[kind] * (numbers >= 0)
    spread_out: Ints = (ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.int64)
    return spread_out


def category_of(item: Ints) -> Ints:
    return item % CATEGORIES


def hour_of(time: Ints) -> Ints:
    return time // 3600 % 24


def item_shares() -> Floats:
    """Return the share of each item among those that are shown at random."""
    weights = 1 / (np.arange(ITEMS) + 10.0)
    shares: Floats = weights / weights.sum()
    return shares


def tags_of(item: Ints) -> tuple[Ints, Ints]:
    """Return the tags of items, one item after the other, and where each item's begin: 0 to 3 each."""
    counts = item // CATEGORIES % 4
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    number = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    return (np.repeat(item, counts) * 5 + number * 7) % TAGS, offsets


def _score(user: Ints, item: Ints, wanted: Ints, time: Ints) -> Floats:
    """Return the log-odds of a click by taste, the way of the walk and the hour; others add history, tags and price."""
    category = category_of(item)
    at_its_hour = hour_of(time) // 6 == category % 4
    score: Floats = -2.5 + 1.2 * _liking(user, category) + 1.8 * (category == wanted) + 0.8 * at_its_hour
    return score


def _tag_effects(tags: Ints, offsets: Ints) -> Floats:
    sums = np.concatenate([[0.0], np.cumsum((tags * 11 % TAGS) / TAGS - 0.5)])
    effects: Floats = sums[offsets[1:]] - sums[offsets[:-1]]
    return effects


def _liking(user: Ints, category: Ints) -> Floats:
    """Return how a user likes a category, in [-1, 1]: those around a category of its own."""
    liking: Floats = np.cos(2 * np.pi * (category - user * 11) / CATEGORIES)
    return liking


def _walks(draw: Any, rows: int, length: int) -> Ints:
    """Return items whose categories step on by the stride four times of five, and else go anywhere."""
    places = np.empty((rows, length), np.int64)
    at = draw.randint(0, CATEGORIES, rows)
    for step in range(length):
        places[:, step] = _item_of(draw, at)
        strays = draw.random_sample(rows) < 0.2
        at = np.where(strays, draw.randint(0, CATEGORIES, rows), (at + STRIDE) % CATEGORIES)
    return places


def _item_of(draw: Any, category: Ints) -> Ints:
    """Return an item of each category; those of low numbers are frequent."""
    each = ITEMS // CATEGORIES
    item: Ints = category + CATEGORIES * (each * draw.random_sample(len(category)) ** 2).astype(np.int64)
    return item


def _popular(draw: Any, rows: int) -> Ints:
    popular: Ints = np.searchsorted(np.cumsum(item_shares()), draw.random_sample(rows), side="right")
    return popular.clip(max=ITEMS - 1)
