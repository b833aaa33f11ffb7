"""Code between units on placeholders: in later steps nothing is computed for it, and the numbers stay one process's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from staged import Staged
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


class Glued(nn.Module):
    """Unit ``a`` in stage 0, ``b`` in stage 1; what lies between them is for ``b`` to skip, but for ``h``."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.first, self.between, self.calls = nn.Linear(8, 8), between, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        g = self.first(x)
        h = self.a(self.between(g, x, self.calls))
        out: Tensor = self.b(h)
        return out


def several(g: Tensor, x: Tensor, call: int) -> Tensor:
    left, right = torch.cat([g, g * 2], dim=1).chunk(2, dim=1)
    again, once_more = left.clone(), left.clone()
    assert again is not once_more
    return F.layer_norm(again + once_more.unsqueeze(0)[0] + right, (8,))


def in_place(g: Tensor, x: Tensor, call: int) -> Tensor:
    h = g * 1.0
    h += 1
    h[:, 0] = 2.0
    return h.mul_(3)


def with_real_ones(g: Tensor, x: Tensor, call: int) -> Tensor:
    return g + torch.arange(g.shape[1], device=g.device) * torch.ones(8)


def other_ways(g: Tensor, x: Tensor, call: int) -> Tensor:
    return g * 2 if call % 2 else g.exp() + g


def reshaped_in_place(g: Tensor, x: Tensor, call: int) -> Tensor:
    return (g * 1.0).unsqueeze_(0).squeeze_(0)


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 8, generator=draw), torch.randn(4, 8, generator=draw)) for _ in range(2)]


def staged(between: Any) -> tuple[Glued, Staged]:
    model = Glued(between)
    return model, Staged(model, F.mse_loss, batches()[0], {"first": 0, "a": 0, "b": 1})


@pytest.mark.parametrize("between", [several, in_place, with_real_ones, other_ways, reshaped_in_place])
def test_steps_give_the_numbers_of_one_process(between: Any) -> None:
    model, pipeline = staged(between)
    for stage_model in pipeline.models:
        stage_model.calls = model.calls = 0
    for _ in range(3):
        for replica in (model, *pipeline.models):
            replica.zero_grad()
            replica.calls = 0
        losses = pipeline.step(batches(), [1.0, 1.0])
        for loss, (x, y) in zip(losses, batches(), strict=True):
            expected = F.mse_loss(model(x), y)
            expected.backward()  # type: ignore[no-untyped-call]
            assert torch.equal(loss, expected.detach())
        found = pipeline.gradients()
        for name, value in model.named_parameters():
            assert torch.equal(found[name], value.grad), name  # type: ignore[arg-type]


@pytest.mark.parametrize("between", [several, in_place, with_real_ones, other_ways])
def test_later_steps_compute_nothing_on_placeholders(between: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, pipeline = staged(between)
    pipeline.step(batches(), [1.0, 1.0])
    pipeline.step(batches(), [1.0, 1.0])
    asked: list[Any] = []
    dispatch = FakeTensorMode.dispatch

    def noted(self: FakeTensorMode, function: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(function)
        return dispatch(self, function, *args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", noted)
    pipeline.step(batches(), [1.0, 1.0])
    assert asked == []


def test_precision_and_gradients_are_part_of_the_question() -> None:
    def between(g: Tensor, x: Tensor, call: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=call % 2 == 0), torch.set_grad_enabled(call % 3 > 0):
            made = g @ torch.eye(8)
        if g.shape != x.shape:  # always false
            raise AssertionError
        kinds.append((call, made.dtype, made.requires_grad))
        return g

    kinds: list[tuple[int, torch.dtype, bool]] = []
    _, pipeline = staged(between)
    for _ in range(6):
        pipeline.step(batches(), [1.0, 1.0])
    assert {(dtype, wants) for call, dtype, wants in kinds if call % 2 == 0 and call % 3} == {(torch.bfloat16, True)}
    assert {(dtype, wants) for call, dtype, wants in kinds if call % 2 and call % 3} == {(torch.float32, True)}
    assert {wants for call, _, wants in kinds if call % 3 == 0} == {False}
