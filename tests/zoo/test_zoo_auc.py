"""The area under the ROC curve over all ranks equals the definition: all pairs of a positive and a negative."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon.base.errors import UsageError
from echelon.parallel.evaluate import Overall, area_under_curve, scored


def by_pairs(scores: np.ndarray, labels: np.ndarray) -> float:
    """Every positive beside every negative: 1 where it is higher, 1/2 where they are equal."""
    ahead = scores[labels > 0.5][:, None] - scores[labels <= 0.5][None, :]
    return float((ahead > 0).mean() + 0.5 * (ahead == 0).mean())


def data(samples: int) -> tuple[Tensor, Tensor]:
    """Features of few values, so that many scores are equal."""
    g = torch.Generator().manual_seed(samples)
    x = torch.randint(-2, 3, (samples, 2), generator=g).float()
    return x, (x.sum(1) + torch.randn(samples, generator=g) > 0.5).float()


def weighed(x: Tensor) -> Tensor:
    return x @ torch.tensor([1.0, 0.5])


class Scorer(nn.Module):
    """Scores by fixed weights, so that what is right is known without training."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.head = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(2))
            self.head.weight.copy_(torch.tensor([[1.0, 0.5]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x)).squeeze(1)


def judged(samples: int, marks: dict[str, Any]) -> list[dict[str, float]]:
    """Evaluate shared data; and, without marks, batches of each rank alone, fewer than those of the rank before."""
    world = echelon.init()
    model = Scorer()
    echelon.annotate(model, marks)
    engine = echelon.distribute(
        model,
        loss=F.binary_cross_entropy_with_logits,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        sample=tuple(part[:4] for part in data(samples)) if marks else None,
        log=QUIET,
    )
    x, y = data(samples)
    median = Overall(lambda output, target: output.unsqueeze(1), lambda rows: rows.median().item())
    metrics = {"auc": "auc", "above": lambda output, target: (output > 0).float()}
    shared = engine.evaluate((x, y), batch_size=4, metrics=metrics if marks else {**metrics, "median": median})
    if marks:
        return [shared]
    ends = [*[0, samples * 5 // 8, samples * 7 // 8][: world.size], samples]
    mine = slice(ends[world.rank], ends[world.rank + 1])
    batches = [(x[mine][:3], y[mine][:3]), (x[mine][3:], y[mine][3:])]
    return [shared, engine.evaluate(batches, metrics=["auc"])]


def expected(samples: int) -> float:
    x, y = data(samples)
    return by_pairs(weighed(x).numpy(), y.numpy())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_sample_counts_once_however_they_are_shared_out(ranks: int) -> None:
    x, y = data(37)
    for shared, own in run(judged, 37, {}, ranks=ranks):
        assert list(shared) == ["loss", "auc", "above", "median"]
        assert shared["auc"] == own["auc"] == pytest.approx(expected(37), abs=1e-12)
        assert shared["above"] == pytest.approx(float((weighed(x) > 0).float().mean()))
        assert shared["loss"] == pytest.approx(float(F.binary_cross_entropy_with_logits(weighed(x), y)), rel=1e-6)
        assert shared["median"] == weighed(x).median().item()


@pytest.mark.parametrize(
    "marks",
    [
        {"": echelon.pipeline(micro_batches=3), "first": echelon.stage(0), "head": echelon.stage(1)},
        {"head": echelon.split()},
        {"first": echelon.replicate(), "head": echelon.split()},
    ],
    ids=["pipeline", "split", "split beside replicas"],
)
def test_stages_and_split_outputs(marks: dict[str, Any]) -> None:
    """With 13 samples in batches of 4, the last batch leaves micro-batches and ranks with stand-ins."""
    for (found,) in run(judged, 13, marks, ranks=2):
        assert found["auc"] == pytest.approx(expected(13), abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_the_formula_equals_all_pairs_with_and_without_ties(seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 200))
    scores = random.normal(size=count) if seed % 2 else random.integers(0, 1 + count // 9, count).astype(float)
    labels = (random.random(count) < 0.3).astype(float)
    labels[:2] = 0, 1
    found = area_under_curve(scored(torch.tensor(scores), torch.tensor(labels)))
    assert found == pytest.approx(by_pairs(scores, labels), abs=1e-12)


def test_two_classes_many_labels_a_sample_and_what_has_no_area() -> None:
    logits, labels = torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 1, 0])
    assert area_under_curve(scored(logits, labels)) == 0.5  # second ahead by -1, 1, 3
    many = torch.tensor([[1.0, 0.0, -1.0], [2.0, 1.0, 0.0]])
    assert area_under_curve(scored(many, (many >= 1).float())) == 1.0
    assert math.isnan(area_under_curve(scored(torch.ones(3), torch.ones(3))))
    assert math.isnan(area_under_curve(scored(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 0.0]))))
    with pytest.raises(UsageError, match=r"the output has shape \(4, 3\) and the target \(4,\)") as error:
        scored(torch.zeros(4, 3), torch.zeros(4))
    assert "\n" not in str(error.value)
