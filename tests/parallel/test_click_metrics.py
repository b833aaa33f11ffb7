"""Metrics of clicks over uneven ranks equal numpy's over all samples: windows, normalised entropy, calibration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import nn
from zoo import QUIET

import echelon
from echelon.base.errors import UsageError
from echelon.parallel.click_window import ClickWindow
from echelon.parallel.evaluate import windowed_auc

SAMPLES, BATCH, LAST = 53, 8, 19
METRICS = {"ne": "ne", "calibration": "calibration", "last": windowed_auc(LAST), "auc": "auc"}


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(4)
    x = torch.randint(-2, 3, (SAMPLES, 1), generator=g).float()  # few values: many scores are equal
    return x, (torch.rand(SAMPLES, generator=g) < torch.sigmoid(x[:, 0])).float()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0] * self.scale


def by_definition(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    p = 1 / (1 + np.exp(-scores))
    share = labels.mean()
    loss = -np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p))
    ahead = scores[labels > 0.5][:, None] - scores[labels <= 0.5][None, :]
    return {
        "ne": loss / -(share * math.log(share) + (1 - share) * math.log(1 - share)),
        "calibration": p.sum() / labels.sum(),
        "auc": float((ahead > 0).mean() + 0.5 * (ahead == 0).mean()),
    }


def made() -> Any:
    echelon.init(seed=0)
    model = Scale()
    loss = F.binary_cross_entropy_with_logits
    return echelon.distribute(model, loss=loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), log=QUIET)


def evaluated() -> dict[str, float]:
    engine = made()
    return dict(engine.evaluate(samples(), batch_size=BATCH // engine.world.size, metrics=METRICS))


def one_rank_evaluates_nothing() -> dict[str, float]:
    """Batches of the user's own, of which rank 1 has none."""
    engine = made()
    x, y = samples()
    batches = [] if engine.world.rank else [(x[:10], y[:10]), (x[10:], y[10:])]
    return dict(engine.evaluate(batches, metrics=METRICS))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_evaluated_metrics_equal_numpy_over_all_samples(ranks: int) -> None:
    x, y = samples()
    scores, labels = 0.7 * x[:, 0].double().numpy(), y.double().numpy()
    expected = by_definition(scores, labels)
    for found in run(evaluated, ranks=ranks):
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)
        assert found["last"] == pytest.approx(by_definition(scores[-LAST:], labels[-LAST:])["auc"], rel=1e-9)


def test_a_rank_without_samples_has_all_metrics_too() -> None:
    x, y = samples()
    expected = by_definition(0.7 * x[:, 0].double().numpy(), y.double().numpy())
    for found in run(one_rank_evaluates_nothing, ranks=2):
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def windows() -> list[dict[str, float]]:
    """The window after every step of training; batches of the ranks are of different size, as at the end of data."""
    engine = made()
    window, found = ClickWindow(LAST, engine.world), []
    for batch in engine.loader(samples(), global_batch=BATCH, shuffle=False, uneven="join"):
        engine.step(*batch, outputs=True)
        window.add(engine.output, batch[-1])
        found.append(window.result())
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_window_of_training_is_that_of_all_ranks(ranks: int) -> None:
    x, y = samples()
    scores, labels = 0.7 * x[:, 0].double().numpy(), y.double().numpy()
    for found in run(windows, ranks=ranks):
        for step, metrics in enumerate(found, start=1):
            end = min(step * BATCH, SAMPLES)
            at = slice(max(0, end - LAST), end)
            assert metrics == pytest.approx(by_definition(scores[at], labels[at]), rel=1e-6), step


def test_what_a_window_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"windowed_auc\(0\): expected a window of one sample or more"):
        windowed_auc(0)
    with pytest.raises(UsageError, match=r"ClickWindow\(0\)"):
        ClickWindow(0, made().world)
    with pytest.raises(UsageError, match="nothing was added yet"):
        ClickWindow(3, made().world).result()


def test_metrics_without_positives_are_not_numbers() -> None:
    engine = made()
    x, _ = samples()
    found = engine.evaluate((x, torch.zeros(SAMPLES)), metrics=["ne", "calibration"])
    assert math.isnan(found["ne"])
    assert math.isnan(found["calibration"])
