"""Output layers of an odd size: which are found, and that they compute what they computed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon
from echelon import Fast, Strategy
from echelon.fastpath.fast_path import prepare
from echelon.fastpath.padded_vocab import odd_layers, pad
from echelon.strategy.fastpath_choice import FastPathChoice

WORDS, WIDTH = 1027, 1024


class Words(nn.Module):
    def __init__(self, bias: bool = True, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WORDS) for _ in range(2))
        self.small = nn.Linear(WIDTH, 9)
        self.even = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.even(self.embedding(ids)))  # type: ignore[no-any-return]


def test_large_odd_layers_outside_of_blocks_are_found() -> None:
    model = Words()
    assert odd_layers(model, ("blocks.0", "blocks.1")) == ("head",)
    assert odd_layers(model, ("blocks.0",)) == ("blocks.1", "head")
    assert odd_layers(nn.Linear(WIDTH, WORDS), ()) == ("",)


IDS = torch.arange(24).reshape(2, 12) * 40


def passed(model: Words, dtype: torch.dtype | None) -> list[Tensor]:
    """Output, loss and gradients."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        output = model(IDS)
        loss = F.cross_entropy(output.flatten(0, 1), IDS.flatten())
    loss.backward()
    return [output.detach(), loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def away(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_it_computes_in_16_bits_what_it_computed(bias: bool, tied: bool) -> None:
    """Sums of another length may be added up in another order, so both are set beside the truth: one is as near as
    the other."""
    model = Words(bias, tied)
    expected, truth = passed(model, torch.bfloat16), passed(copy.deepcopy(model).double(), None)
    keys = list(model.state_dict())
    pad(model, ["head"])
    found = passed(model, torch.bfloat16)
    for one, other, true in zip(found, expected, truth, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert away(one, true) <= 1.2 * away(other, true) + 1e-4 * float(true.norm())  # the loss may be right by luck
    assert list(model.state_dict()) == keys


def test_16_bit_weights_need_no_autocast() -> None:
    layer, x = nn.Linear(WIDTH, WORDS, dtype=torch.bfloat16), torch.randn(4, WIDTH, dtype=torch.bfloat16)
    expected = layer(x)
    pad(layer, [""])
    torch.testing.assert_close(layer(x), expected)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    real = F.pad
    monkeypatch.setattr(F, "pad", lambda *args, **kwargs: calls.append(args) or real(*args, **kwargs))
    return calls


def test_padding_unused_in_32_bits_with_hooks_copies_or_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 32 bits, with hooks, in copies and after padding was undone, the layer runs as written."""
    model, calls = Words(), counted(monkeypatch)
    pad(model, ["head"])
    passed(model, None)
    assert not calls
    passed(model, torch.bfloat16)
    assert calls
    calls.clear()
    seen: list[Any] = []
    handle = model.head.register_forward_hook(lambda *args: seen.append(args))
    passed(model, torch.bfloat16)
    assert seen
    handle.remove()
    passed(copy.deepcopy(model), torch.bfloat16)
    prepare(model, FastPathChoice())
    passed(model, torch.bfloat16)
    assert not calls


def test_training_with_it_is_training_without(capfd: pytest.CaptureFixture[str]) -> None:
    runs = []
    for on in (True, False):
        model = Words()
        strategy = Strategy(amp=True, fast=Fast(pad=on))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = echelon.distribute(model, loss=token_loss, optimizer=optimizer, strategy=strategy)
        losses = torch.tensor([float(engine.step(IDS, IDS)) for _ in range(3)])
        runs.append([losses, *model.state_dict().values()])
        assert ("head; Strategy" in capfd.readouterr().out) is on
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-3, atol=1e-4)
    assert runs[0][0][-1] < runs[0][0][0]


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
