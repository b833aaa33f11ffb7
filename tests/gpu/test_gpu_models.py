"""Models of transformers and timm on ranks that share a GPU, beside a plain loop of torch on it."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run
from plain import DEVICE, Trained, assert_equal, in_host_memory, my_share
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon import Strategy

STEPS, ROWS = 3, 8


def needs(library: str) -> Any:
    is_missing = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(is_missing, reason=f"{library} is not installed")


class Named(nn.Module):
    """A model that returns an object, of which the logits are wanted."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids).logits.flatten(0, 1)  # type: ignore[no-any-return]


def bert() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return Named(BertForMaskedLM(BertConfig(vocab_size=40, **sizes, **off)))


def resnet() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import timm

    return timm.create_model("resnet10t", num_classes=8)  # type: ignore[no-any-return]


def words(step: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 40, (ROWS, 6), generator=torch.Generator().manual_seed(step))
    return ids, ids


def pictures(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 3, 32, 32, generator=g), torch.randint(8, (ROWS,), generator=g)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target.flatten())


Make = Callable[[], nn.Module]
Batches = Callable[[int], tuple[Tensor, Tensor]]


def made(make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = make().train()
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def together(make: Make, batches: Batches) -> Trained:
    echelon.init(device=DEVICE)
    model, optimizer = made(make)
    engine = echelon.distribute(model, loss=loss_of, optimizer=optimizer, strategy=Strategy(fast=False), log=QUIET)
    losses = [float(engine.step(*my_share(batches(step)))) for step in range(STEPS)]
    return Trained(losses, in_host_memory(engine.whole_state()))


def alone(make: Make, batches: Batches) -> Trained:
    torch.manual_seed(3)
    model, losses = make().train().to(DEVICE), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(STEPS):
        x, y = (part.to(DEVICE) for part in batches(step))
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return Trained(losses, in_host_memory(dict(model.state_dict())))


@pytest.mark.parametrize(
    ("make", "batches"),
    [
        pytest.param(bert, words, marks=needs("transformers"), id="transformers"),
        pytest.param(resnet, pictures, marks=needs("timm"), id="timm"),
    ],
)
def test_a_borrowed_model_equals_a_plain_loop(make: Make, batches: Batches) -> None:
    one = run(alone, make, batches, ranks=1)[0]
    for found in run(together, make, batches, ranks=2):
        assert_equal(found, one, 1e-4)
