"""Backward in two parts gives the gradients of one, bit by bit, and tells the parameters' hooks once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.parallel.pipeline.split_backward import WeightGradStore, defer_weight_grads

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(8, 16), (5, 8)),
    "linear of three dimensions": (nn.Linear(8, 16), (3, 5, 8)),
    "linear without bias": (nn.Linear(8, 16, bias=False), (3, 5, 8)),
    "linear of a vector": (nn.Linear(8, 16), (8,)),
    "conv1d": (nn.Conv1d(8, 6, 3, padding=1), (3, 8, 5)),
    "conv2d": (nn.Conv2d(4, 8, 3, stride=2, bias=False), (2, 4, 9, 9)),
    "conv2d in groups": (nn.Conv2d(4, 8, 3, padding=(1, 0), dilation=2, groups=4), (2, 4, 9, 9)),
    "conv3d": (nn.Conv3d(2, 4, 3), (2, 2, 5, 5, 5)),
    "conv2d, circular": (nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"), (2, 4, 6, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_two_parts(name: str) -> None:
    layer, shape = LAYERS[name]
    x = torch.randn(shape, requires_grad=True)
    output = layer(x)
    gradient = torch.sin(3 * output.detach())
    wanted = torch.autograd.grad(output, [x, *layer.parameters()], gradient)

    store = WeightGradStore()
    with defer_weight_grads(store):
        output = layer(x)
        output.backward(gradient)
    assert len(store) == 1
    assert all(p.grad is None for p in layer.parameters())
    assert x.grad is not None
    assert x.grad.equal(wanted[0])
    store.run()
    for parameter, value in zip(layer.parameters(), wanted[1:], strict=True):
        assert parameter.grad is not None
        assert parameter.grad.equal(value)
        parameter.grad = None


class Model(nn.Module):
    """Attention, dropout, convolution, a weight used twice, a tied one, and one that is used in other ways too."""

    def __init__(self, recompute: bool, other_use: str) -> None:
        super().__init__()
        self.recompute, self.other_use = recompute, other_use
        self.words = nn.Embedding(20, 8, padding_idx=-2)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.conv, self.twice = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 8)
        self.head, self.tied = nn.Linear(8, 20, bias=False), nn.Linear(8, 20, bias=False)
        self.tied.weight = self.words.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.ones(8))

    def body(self, h: Tensor) -> Tensor:
        h = self.normed(self.frozen(self.block(h) * self.scale.to(h.dtype)))
        h = h + self.conv(h.transpose(1, 2)).transpose(1, 2)
        return self.twice(F.gelu(self.twice(h)))

    def forward(self, ids: Tensor) -> Tensor:
        before = self.head.weight.pow(2).sum() if self.other_use == "before" else 0.0
        h = self.words(ids)
        h = checkpoint(self.body, h, use_reentrant=False) if self.recompute else self.body(h)
        loss = (self.head(h) + self.tied(h)).float().pow(2).mean()
        after = self.twice.weight.pow(2).sum() if self.other_use == "after" else 0.0
        return loss + before + after


def counting_hooks(model: nn.Module) -> dict[str, int]:
    calls: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:

            def hook(_: Tensor, name: str = name) -> None:
                calls[name] = calls.get(name, 0) + 1

            parameter.register_hook(hook)
            parameter.register_post_accumulate_grad_hook(hook)
    return calls


@pytest.mark.parametrize("other_use", ["", "before", "after"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("amp", [False, True])
def test_a_model_in_two_parts(amp: bool, recompute: bool, other_use: str) -> None:
    torch.manual_seed(0)
    whole = Model(recompute, other_use)
    parts = copy.deepcopy(whole)
    calls, calls_in_parts = counting_hooks(whole), counting_hooks(parts)
    for step in range(2):
        ids = torch.randint(0, 20, (3, 5))
        run_whole(whole, ids, amp, step)
        deferred = run_in_parts(parts, ids, amp, step)
        assert deferred == (10 if other_use != "before" else 9)
    assert calls == calls_in_parts
    for (name, wanted), found in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert (wanted.grad is None) == (found.grad is None) == (not wanted.requires_grad), name
        if wanted.grad is not None and found.grad is not None:
            if (other_use, name) == ("after", "twice.weight"):
                # The sum over its three uses has another order, and autocast rounds the sum of two of them.
                torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-2 if amp else 1e-6, atol=1e-6)
            else:
                assert found.grad.equal(wanted.grad), name


def run_whole(model: nn.Module, ids: Tensor, amp: bool, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss = model(ids)
    loss.backward()


def run_in_parts(model: nn.Module, ids: Tensor, amp: bool, seed: int) -> int:
    torch.manual_seed(seed)
    store = WeightGradStore()
    with defer_weight_grads(store), torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss = model(ids)
    with defer_weight_grads(store):
        torch.autograd.backward([loss])
    deferred = len(store)
    store.run()
    return deferred


def test_a_layer_without_part_in_the_loss_gets_no_gradient() -> None:
    used, unused = nn.Linear(4, 4), nn.Linear(4, 4)
    store, x = WeightGradStore(), torch.randn(2, 4)
    with defer_weight_grads(store):
        unused(x)
        used(x).sum().backward()
    store.run()
    assert used.weight.grad is not None
    assert unused.weight.grad is None


def test_layers_that_cannot_be_taken_apart_are_left_whole() -> None:
    sparse: Any = nn.Embedding(9, 4, sparse=True)
    odd = nn.Conv1d(4, 4, 2, padding="same")
    store = WeightGradStore()
    with defer_weight_grads(store), pytest.warns(UserWarning, match="copy"):
        (odd(sparse(torch.tensor([[1, 2, 3]])).transpose(1, 2)).sum()).backward()
    assert len(store) == 0
    assert sparse.weight.grad.is_sparse
    assert odd.weight.grad is not None


def test_a_backward_outside_is_refused() -> None:
    store, layer = WeightGradStore(), nn.Linear(4, 4)
    with defer_weight_grads(store):
        loss = layer(torch.randn(2, 4)).sum()
    with pytest.raises(AssertionError, match="under defer_weight_grads"):
        loss.backward()
