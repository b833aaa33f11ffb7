"""Randomness of the data, apart from the model's.

Every random choice about data is drawn from a number mixed from the loader's seed, what the choice is for, and
where in the data it is made, so that it comes out the same for any number of ranks and workers and after a resume.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Seeds = NDArray[np.uint64]

_64_BITS = 2**64 - 1


class SeedPurpose(IntEnum):
    """What a random number is for: two uses never share a stream."""

    ORDER = 1
    PAD = 2
    BUCKET = 3
    BUFFER = 4
    RESERVOIR = 5
    SAMPLE = 6
    COLLATE = 7
    KEPT = 8
    FILES = 9
    SAMPLER = 10


def mix(*parts: int) -> int:
    """One 64-bit number from several whole numbers."""
    state = 0
    for part in parts:
        state = chain(state, part)
    return state


def chain(state: int, part: int) -> int:
    """One more number mixed into ``state`` (the finalizer of splitmix64)."""
    z = (state + 0x9E3779B97F4A7C15 * (part + 1)) & _64_BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return z ^ (z >> 31)


def chain_each(state: int | Seeds, parts: NDArray[np.int64]) -> Seeds:
    """``chain`` for whole arrays, which stretch to each other."""
    steps = parts.astype(np.uint64) + np.uint64(1)
    z: Seeds = np.asarray(state, np.uint64) + np.uint64(0x9E3779B97F4A7C15) * steps
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def numpy_stream(*parts: int) -> np.random.RandomState:
    """A generator for whole arrays. RandomState, because numpy promises never to change its streams."""
    value = mix(*parts)
    return np.random.RandomState([value & 0xFFFFFFFF, value >> 32])


def python_stream(*parts: int) -> random.Random:
    """A generator for one number at a time: 0.2 us a draw, where numpy takes 3."""
    return random.Random(mix(*parts))


def seed_all(value: int) -> None:
    """Seed what data set code draws from: 7 us. ``torch.manual_seed`` would take 110 and reseed the GPUs too."""
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)


class GlobalRngState(NamedTuple):
    """States of the generators that ``seed_all`` seeds."""

    python: Any
    numpy: Any
    cpu: torch.Tensor


def global_state() -> GlobalRngState:
    return GlobalRngState(random.getstate(), np.random.get_state(), torch.default_generator.get_state())


def restore_global_state(state: GlobalRngState) -> None:
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.default_generator.set_state(state.cpu)


@contextmanager
def preserve_global_rng() -> Iterator[None]:
    """Give the process its random state back afterwards, as if nothing had been drawn (90 us)."""
    before = global_state()
    try:
        yield
    finally:
        restore_global_state(before)
