"""Damaged and hostile variants of a valid input: of bytes at random, of JSON value by value."""

from __future__ import annotations

import copy
import json
import math
from random import Random
from typing import Any

#: Values that a parser does not expect: wrong types, numbers beyond 64 bits and beyond floats, very deep and long ones.
HOSTILE: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2**31,
        2**63,
        2**64,
        -(2**63),
        10**40,
        0.5,
        -0.0,
        1e308,
        math.inf,
        -math.inf,
        math.nan,
    ),
    *("", "x", "0", "-1", "../../etc/passwd", "/dev/zero", "\x00", "\ud800", "a\nb", "x" * 5000, "9" * 5000),
    *([], {}, [[]], [None], {"": None}, [0] * 1000, {"a": {"b": {}}}),
)
#: A text that nests deeper than Python's parser goes.
DEEP = "[" * 100_000


def damaged(data: bytes, random: Random) -> bytes:
    """Return ``data`` with one to three changes: bits, ranges removed, repeated, zeroed or replaced."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 3)):
        begin = random.randrange(len(changed) + 1)
        end = min(len(changed), begin + random.choice((1, 2, 4, 8, 64, 4096)))
        change = random.randrange(6)
        if change == 0 and begin < len(changed):
            changed[begin] ^= 1 << random.randrange(8)
        elif change == 1:
            del changed[begin:]
        elif change == 2:
            del changed[begin:end]
        elif change == 3:
            changed[begin:begin] = changed[begin:end]
        elif change == 4:
            changed[begin:end] = bytes(end - begin)
        else:
            changed[begin:end] = random.randbytes(end - begin)
    return bytes(changed)


def hostile_json(text: str, random: Random) -> str:
    """Return the JSON ``text`` with one to three of its values replaced, removed, repeated or exchanged."""
    if random.random() < 0.02:
        return DEEP
    value = [json.loads(text)]
    for _ in range(random.randint(1, 3)):
        places = list(_places(value))
        holder, key = random.choice(places)
        change = random.random()
        if change < 0.6:
            holder[key] = copy.deepcopy(random.choice(HOSTILE))
        elif change < 0.75 and holder is not value:
            del holder[key]
        elif change < 0.9:
            other, name = random.choice(places)
            holder[key] = copy.deepcopy(other[name])
        elif isinstance(holder, dict):
            holder[random.choice(("x", "", "__class__", f"{key}_"))] = copy.deepcopy(holder[key])
        else:
            holder.insert(key, copy.deepcopy(holder[key]))
        value = value[:1]
    return json.dumps(value[0])


def json_or_bytes(data: bytes, random: Random) -> bytes:
    """Return a variant of a JSON text: most often one that is JSON again."""
    return damaged(data, random) if random.random() < 0.2 else hostile_json(data.decode(), random).encode()


def _places(value: Any) -> Any:
    """Yield every container and key within ``value``."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)
