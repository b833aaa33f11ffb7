"""Learning-rate schedules against closed forms and numbers worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.checkpoint.training_state import decode, encode
from echelon.optim import LARS, Schedule


def rates(steps: int, lr: float = 1.0, **options: Any) -> np.ndarray[Any, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = Schedule(optimizer, **options)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return np.array(found)


def test_fixed_is_fixed() -> None:
    np.testing.assert_array_equal(rates(5, lr=0.3), [0.3] * 5)


def test_exponential_is_a_staircase_with_a_floor() -> None:
    found = rates(100, lr=0.1, decay="exponential", decay_steps=7, end_lr=0.05)
    np.testing.assert_allclose(found, np.maximum(0.1 * 0.94 ** (np.arange(100) // 7), 0.05))
    assert found[6] == 0.1
    assert found[7] == pytest.approx(0.094)
    assert found[99] == 0.05
    np.testing.assert_allclose(rates(4, decay="exponential", decay_steps=2, decay_factor=0.5), [1, 1, 0.5, 0.5])


def test_polynomial_is_a_line_to_the_floor() -> None:
    found = rates(15, lr=1.0, decay="polynomial", total_steps=10, end_lr=0.2)
    np.testing.assert_allclose(found, np.maximum(1 - 0.08 * np.arange(15), 0.2))
    np.testing.assert_allclose(rates(4, decay="polynomial", total_steps=10, decay_steps=2), [1, 0.5, 0, 0])


@pytest.mark.parametrize(
    ("scheme", "plateaus"),
    [
        # steps at full rate, then how long each halved rate is kept, out of 60 steps
        ("luong234", [40, 5, 5, 5, 5]),
        ("luong5", [30, 6, 6, 6, 6, 6]),
        ("luong10", [30, *[3] * 10]),
    ],
)
def test_luong_halves_evenly_before_the_end(scheme: str, plateaus: list[int]) -> None:
    wanted = np.concatenate([[0.5**i] * n for i, n in enumerate(plateaus)])
    np.testing.assert_array_equal(rates(60, decay=scheme, total_steps=60), wanted)
    assert rates(65, decay=scheme, total_steps=60)[-1] == wanted[-1]  # no further halving after the end


@pytest.mark.parametrize("total", [1, 2, 3, 7, 11, 100])
@pytest.mark.parametrize(("scheme", "times"), [("luong234", 4), ("luong5", 5), ("luong10", 10)])
def test_luong_with_any_number_of_steps(scheme: str, times: int, total: int) -> None:
    found = rates(total, decay=scheme, total_steps=total)
    assert found[0] == 1.0 or total < 3
    assert np.all(np.diff(found) <= 0)
    if total == 100:
        assert found[-1] == 0.5**times


def test_t2t_warmup_starts_at_one_percent_and_multiplies_decay() -> None:
    found = rates(20, lr=0.5, warmup_steps=10)
    np.testing.assert_allclose(found[:10], 0.5 * 0.01 ** (1 - np.arange(10) / 10))
    assert found[0] == pytest.approx(0.005)
    np.testing.assert_array_equal(found[10:], [0.5] * 10)
    both = rates(20, lr=0.5, warmup_steps=10, decay="polynomial", total_steps=20)
    np.testing.assert_allclose(both, found * (1 - np.arange(20) / 20))
    floored = rates(20, lr=0.5, warmup_steps=10, end_lr=0.1)
    np.testing.assert_array_equal(floored, found)  # the floor is the decay's, not the warm-up's


def test_linear_warm_up() -> None:
    np.testing.assert_allclose(rates(6, warmup="linear", warmup_steps=4), [0.25, 0.5, 0.75, 1, 1, 1])


def test_every_group_from_its_own_rate_and_a_floor_never_lifts() -> None:
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = LARS([{"params": params[:1], "lr": 1.0}, {"params": params[1:], "lr": 0.01}], 0.1)
    schedule = Schedule(optimizer, decay="exponential", decay_steps=1, decay_factor=0.5, end_lr=0.3)
    for wanted in ([0.5, 0.01], [0.3, 0.01]):
        optimizer.step()
        schedule.step()
        assert schedule.get_last_lr() == wanted


def test_resume_through_json_is_bit_equal() -> None:
    options: dict[str, Any] = {"decay": "luong5", "total_steps": 30, "warmup_steps": 5}
    whole = rates(30, lr=0.7, **options)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.7)
    before = Schedule(optimizer, **options)
    for _ in range(12):
        optimizer.step()
        before.step()
    kept = json.loads(json.dumps(encode(before.state_dict())))
    settings = optimizer.state_dict()
    fresh = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.7)
    after = Schedule(fresh, **options)
    fresh.load_state_dict(settings)
    after.load_state_dict(decode(kept))
    found = []
    for _ in range(18):
        found.append(fresh.param_groups[0]["lr"])
        fresh.step()
        after.step()
    np.testing.assert_array_equal(found, whole[12:])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"decay": "luong235", "total_steps": 3}, "Schedule(decay='luong235') is unknown; did you mean 'luong234'?"),
        ({"decay": "cosine"}, "known: exponential, fixed"),
        ({"warmup": "liner"}, "did you mean 'linear'?"),
        ({"decay": "luong5"}, "needs total_steps"),
        ({"decay": "polynomial"}, "needs total_steps or decay_steps"),
        ({"decay": "exponential"}, "needs decay_steps"),
        ({"warmup_steps": -1}, "Schedule(warmup_steps=-1): expected a whole number of 0 or more"),
        ({"total_steps": 0}, "Schedule(total_steps=0)"),
        ({"decay_steps": 2.5}, "Schedule(decay_steps=2.5)"),
        ({"end_lr": -0.1}, "Schedule(end_lr=-0.1)"),
        ({"decay_factor": 1.5}, "Schedule(decay_factor=1.5)"),
    ],
)
def test_mistakes_are_told_in_one_line(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        rates(1, **options)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_state_of_something_else_is_refused() -> None:
    schedule = Schedule(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    with pytest.raises(UsageError, match="lacks '_last_lr'"):
        schedule.load_state_dict({"last_epoch": 3, "_step_count": 4, "base_lrs": [1.0]})
