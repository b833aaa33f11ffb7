"""Batches whose samples are not in the first dimension of every tensor, and models that run on one size alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.planner.profiling.profile import Profile, profile
from echelon.tools.memory_profile import TrainingJob, find_footprint

TABLES, EACH, WIDTH = 3, 4, 8


class Recommender(nn.Module):
    """Tables of bags as in DLRM: offsets are tables x samples, indices come one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, WIDTH, mode="sum") for _ in range(TABLES))
        self.dense, self.top = nn.Linear(5, WIDTH), nn.Linear(WIDTH * (TABLES + 1), 1)

    def forward(self, x: Tensor, offsets: Tensor, indices: Any) -> Tensor:
        found = [bag(one, starts) for bag, one, starts in zip(self.bags, indices, offsets, strict=True)]
        return self.top(torch.cat([self.dense(x), *found], 1))


def batch_of(samples: int, kind: str) -> tuple[Any, ...]:
    offsets = torch.arange(0, samples * EACH, EACH).repeat(TABLES, 1)
    indices: Any = torch.randint(0, 50, (TABLES, samples * EACH))
    if kind == "lists":
        indices = list(indices)
    elif kind == "ragged":
        indices = [torch.randint(0, 50, (samples * EACH + at,)) for at in range(TABLES)]
    return torch.randn(samples, 5), offsets, indices, torch.rand(samples, 1)


def looked_at(samples: int, kind: str) -> Profile:
    return profile(Recommender(), batch_of(samples, kind), loss=nn.functional.mse_loss, device="cpu")


@pytest.mark.parametrize("kind", ["table", "lists"])
def test_samples_are_found_in_any_dimension(kind: str) -> None:
    many, few = looked_at(16, kind), looked_at(6, kind)
    assert [leaf.shape for leaf in many.placeholders(6)[:2]] == [(6, 5), (TABLES, 6)]
    for samples in (6, 16):
        found = [find_footprint(each, TrainingJob(samples=samples), "adagrad") for each in (many, few)]
        assert found[0].peak == found[1].peak
        assert found[0].modules == found[1].modules


def test_ragged_indices_stay_as_they_are() -> None:
    assert [len(each) for each in looked_at(16, "ragged").placeholders(16)[2]] == [64, 65, 66]
    assert find_footprint(looked_at(16, "ragged"), TrainingJob(samples=16), "adagrad").peak > 0


class Rigid(nn.Linear):
    """A forward for eight rows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(8, -1))


def test_a_model_of_one_size_is_weighed_and_others_are_refused() -> None:
    batch = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    rigid, free = (
        profile(kind(WIDTH, WIDTH), batch, loss=nn.functional.mse_loss, name=kind.__name__, device="cpu")
        for kind in (Rigid, nn.Linear)
    )
    found, wanted = (find_footprint(each, TrainingJob(samples=8), "adam") for each in (rigid, free))
    assert found.peak == wanted.peak
    assert [saving.what for saving in wanted.savings if saving.what.startswith("batch")] == ["batch 4"]
    assert not [saving.what for saving in found.savings if saving.what.startswith("batch")]
    assert any(
        note.startswith("batch 4 is left out: 'Rigid': its batch of 8 is known as a whole") for note in found.notes
    )
    with pytest.raises(UsageError, match="'Rigid': its batch of 8 is known as a whole only, since the model does not"):
        find_footprint(rigid, TrainingJob(samples=4), "adam")


def test_a_model_that_fails_on_its_batch_says_so() -> None:
    batch = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    with pytest.raises(UsageError, match=r"'Rigid' cannot be profiled: .* but got \[8, 6\]"):
        profile(Rigid(WIDTH, WIDTH), batch, loss=nn.functional.mse_loss, device="cpu")
