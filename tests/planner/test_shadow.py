"""Copies of a model without contents: which units stand for each other, and what they may not share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from echelon.planner.profiling.fake_copy import FakeModel
from echelon.planner.profiling.profile import profile
from echelon.strategy.annotations.marks import Split
from echelon.tools.memory_profile import TrainingJob, find_footprint

SAMPLES, WIDTH = 4, 8


class Cache:
    """Keys by layer, as libraries of transformers hand them from block to block."""

    def __init__(self) -> None:
        self.layers: dict[int, Tensor] = {}

    def update(self, key: Tensor, layer: int) -> Tensor:
        self.layers[layer] = torch.cat([self.layers[layer], key], 1) if layer in self.layers else key
        return self.layers[layer]


class CachedBlock(nn.Module):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.layer_idx = at
        self.key, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        keys = cache.update(self.key(x), self.layer_idx)
        return x + self.out((x @ keys.transpose(1, 2)).softmax(-1) @ keys)


class Cached(nn.Module):
    """Words are frozen, so that the first block's input has no gradient and the others' inputs have one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(CachedBlock(at) for at in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x, cache = self.words(ids), Cache()
        for block in self.blocks:
            x = block(x, cache)
        return x.mean()


def test_a_cache_is_filled_once_by_each_block() -> None:
    model, ids = Cached(), torch.randint(0, 20, (SAMPLES, 6))
    looked = profile(model, (ids,), device="cpu")
    assert find_footprint(looked, TrainingJob(samples=SAMPLES), "adam").peak == _peak_without_likeness(model, ids)
    units = looked.sheet(SAMPLES).units
    # the second block runs by itself, since its input has a gradient; the third and fourth are like it
    assert [unit.saved for unit in units[1:]] == [units[1].saved] * 3
    assert units[1].saved - units[0].saved in (0, SAMPLES * 6 * WIDTH * 4)


def _peak_without_likeness(model: Cached, ids: Tensor) -> int:
    """Return the peak of the same model, with a setting that makes its blocks differ."""
    for at, block in enumerate(model.blocks):
        block.place = at
    found = find_footprint(profile(model, (ids,), device="cpu"), TrainingJob(samples=SAMPLES), "adam").peak
    for block in model.blocks:
        del block.place
    return found


class Shaped(nn.Module):
    """A setting that cannot be hashed as it is."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.shape, self.inner = shape, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


def test_lists_among_settings_tell_units_apart() -> None:
    model = nn.Sequential(*(Shaped(shape) for shape in (([1, 2], 3), ([1, 2], 3), ([1, 4], 3), [[1], 2], [[1], 2])))
    assert FakeModel(model, ["0", "1", "2", "3", "4"]).like == {"1": "0", "4": "3"}
    looked = profile(model, (torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)), loss=nn.functional.mse_loss)
    assert looked.sheet(SAMPLES).units


def test_a_unit_inside_of_a_split_module_is_like_none_outside() -> None:
    chain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    model = nn.Sequential(chain, nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    batch = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    looked = profile(model, batch, loss=nn.functional.mse_loss, device="cuda")
    units = ["0.0", "0.2", "1", "3"]
    inside = looked.cut(units, {"0": Split()}, False).sheet(SAMPLES, 2).units
    entries = {unit.name: unit.weights for unit in inside}
    assert entries["1"] == entries["3"] == WIDTH * WIDTH + WIDTH
    assert entries["0.0"] == (WIDTH * WIDTH + WIDTH) / 2
    # layers that are units themselves, alike, and all split
    every = {name: Split(how="column") for name in units}
    alone = looked.cut(units, every, False).sheet(SAMPLES, 2).units
    assert [unit.weights for unit in alone] == [(WIDTH * WIDTH + WIDTH) / 2] * 4
