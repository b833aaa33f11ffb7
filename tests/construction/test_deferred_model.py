"""Construction in ``deferred()``: every parameter can be computed from the record, with the bits of a plain one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.base.errors import UsageError
from echelon.construction.piecewise_values import piecewise_values
from echelon.construction.random_draws import PIECE, advance, draw
from echelon.construction.recorder import ConstructionRecorder
from echelon.construction.tape import Tape, TensorRef
from echelon.construction.weight_recipe import RECIPE
from echelon.distributed.tensor_layout import Layout


def values(parameter: Tensor) -> Tensor:
    recipe = getattr(parameter, RECIPE)
    found: Tensor = recipe.tape.values([recipe.ref])[0]
    return found


def built_both_ways(make: Callable[[], nn.Module]) -> nn.Module:
    """Build a model plainly and deferred, compare everything, and return the deferred one."""
    torch.manual_seed(5)
    plain, after = make(), torch.get_rng_state()
    torch.manual_seed(5)
    with echelon.deferred():
        built = make()
    assert torch.equal(torch.get_rng_state(), after)
    assert list(built.state_dict()) == list(plain.state_dict())
    for (name, found), expected in zip(built.named_parameters(), plain.parameters(), strict=True):
        value = values(found) if found.is_meta else found
        assert torch.equal(value, expected), name
        assert (value.stride(), value.dtype) == (expected.stride(), expected.dtype), name
        assert found.requires_grad == expected.requires_grad
    for (name, found), expected in zip(built.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(found, expected), name
    return built


class Initialised(nn.Module):
    """Layers with initial weights of every kind that torch has, and some that copy others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24, padding_idx=3)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embed.weight
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        nn.init.orthogonal_(self.first.weight)
        nn.init.trunc_normal_(self.first.bias, std=0.02)
        self.second.weight.data.copy_(self.first.weight.data)
        self.second.bias.data = torch.arange(24.0)
        nn.init.sparse_(self.first.weight, 0.3)
        self.fused = nn.Parameter(torch.cat([self.first.weight.data, self.second.weight.data]))
        self.transposed = nn.Parameter(nn.init.xavier_normal_(torch.empty(30, 24))[10:20].t())
        self.frozen = nn.Parameter(torch.empty(9).bernoulli_(0.5), requires_grad=False)
        self.legacy = nn.Parameter(torch.FloatTensor(3, 4).fill_(2))
        self.given = nn.Parameter(torch.tensor(2.5))
        own = torch.Generator().manual_seed(4)
        self.own = nn.Parameter(nn.init.normal_(torch.randn(5, 5, generator=own), generator=own) + torch.randn(5, 5))
        self.narrow = nn.Linear(64, 64).bfloat16()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        nn.init.dirac_(self.conv.weight)
        with torch.no_grad():
            self.first.weight[:, 3].fill_(0)
            self.first.weight[self.first.weight > 0.3] = 0.3
        self.apply(self.restart)

    def restart(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight.data.normal_(0, 0.02)
            module.weight.data[module.padding_idx].zero_()


class Inside(nn.Module):
    """Modules of torch that keep weights in their own ways, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 2, 32, batch_first=True), 2)
        self.recurrent = nn.LSTM(8, 8)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 7))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 7))
        self.norm = nn.BatchNorm1d(24)
        self.register_buffer("rotary", 1 / 10000 ** (torch.arange(0, 24, 2).float() / 24))
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)))
        self.register_buffer("mean", self.normed.weight.detach().mean(0))
        self.plain = [torch.zeros(3) + 1, torch.randn(3)]


class Looking(nn.Module):
    """Initial weights that depend on values, also as NumPy and Python see them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        if self.first.weight.sum() > self.second.weight.sum():
            nn.init.constant_(self.first.bias, self.first.weight.abs().max().item())
        else:
            nn.init.constant_(self.first.bias, -1.0)
        self.second.weight.data.numpy()[0, :] = 7
        self.listed = nn.Parameter(torch.tensor(self.second.weight.data.tolist()) * torch.randn(5, 5))
        place = torch.arange(3, device=self.first.weight.device)
        self.large = nn.Parameter(torch.as_tensor(np.ones(3, np.float32)) * place)


def test_deferred_construction_has_the_bits_of_a_plain_one() -> None:
    built = built_both_ways(Initialised)
    assert built.head.weight is built.embed.weight
    assert all(p.is_meta for name, p in built.named_parameters() if name != "given")


def test_modules_of_torch_and_buffers_are_equal() -> None:
    built = built_both_ways(Inside)
    assert torch.equal(built.plain[0], torch.ones(3))
    torch.manual_seed(5)
    assert torch.equal(built.plain[1], Inside().plain[1])


def test_initial_weights_that_look_at_values_are_equal() -> None:
    built_both_ways(Looking)


def test_random_numbers_in_pieces_are_those_of_one_call() -> None:
    aten = torch.ops.aten
    for size in (0, 1, 15, 17, PIECE, PIECE + 15, PIECE + 16, 3 * PIECE + 5):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for func, args in ((aten.normal_.default, (0.5, 0.02)), (aten.uniform_.default, (-1.0, 2.0))):
                expected, found = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)
                torch.manual_seed(7)
                func(expected, *args)
                state = torch.get_rng_state()
                torch.manual_seed(7)
                draw(func, found, args, {})
                assert torch.equal(found, expected)
                assert torch.equal(torch.get_rng_state(), state)
                torch.manual_seed(7)
                advance(func, found, args, {})
                assert torch.equal(torch.get_rng_state(), state)


def test_one_parameter_takes_the_memory_of_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with echelon.deferred():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
    gc.collect()
    allocated: list[int] = []
    tape = getattr(model[0].weight, RECIPE).tape
    memory = tape._memory
    monkeypatch.setattr(tape, "_memory", lambda *a, **k: allocated.append(memory(*a, **k).nbytes()) or memory(*a, **k))
    for parameter in model.parameters():
        allocated.clear()
        values(parameter)
        assert sum(allocated) == parameter.nbytes


class Drawn(nn.Module):
    """Weights that are drawn in order and changed number by number, larger than several pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5_001, 40, padding_idx=3)
        self.linear = nn.Linear(700, 301)
        nn.init.trunc_normal_(self.linear.weight, 0.1, 0.02)
        with torch.no_grad():
            self.embed.weight.normal_(0, 0.02).add_(0.5)
            self.embed.weight[7].zero_()
        self.experts = nn.Parameter(torch.empty(3, 300, 200).uniform_(-1, 1).div_(3.0))
        self.narrow = nn.Linear(301, 700).bfloat16()
        self.sixteen = nn.Parameter(torch.empty(500, 300, dtype=torch.bfloat16).normal_(0, 0.02))
        self.scale = nn.Parameter(torch.ones(300))
        self.scaled = nn.Parameter(torch.randn(3, 200_000) * 2)
        self.shifted = nn.Parameter(torch.add(torch.rand(200_000), torch.ones(200_000), alpha=3))
        self.turned = nn.Parameter(torch.empty(400, 300).normal_().t())


def layouts_of(shape: tuple[int, ...]) -> list[Layout]:
    thirds = [(size // 3, size - size // 3) for size in shape]
    cut = [Layout(shape, {dim: (thirds[dim],)}) for dim in range(len(shape))]
    pieces = Layout(shape, {len(shape) - 1: ((0, 5), (thirds[-1][1], shape[-1]))})
    both = Layout(shape, {dim: (thirds[dim],) for dim in range(len(shape))})
    return [Layout(shape), *cut, pieces, both, Layout(shape, {0: ((0, 0),)})]


def test_written_parts_are_those_of_the_whole_value() -> None:
    torch.manual_seed(5)
    with echelon.deferred():
        model = Drawn()
    after = torch.get_rng_state()
    for name, parameter in model.named_parameters():
        recipe, whole = getattr(parameter, RECIPE), values(parameter)
        for layout in layouts_of(recipe.shape):
            into = recipe.empty_part(layout, parameter.dtype, torch.device("cpu")).fill_(7)
            recipe.write([name], layout, into)
            expected = layout.take(whole)
            assert torch.equal(into, expected), (name, layout)
            assert into.stride() == expected.stride()
    assert torch.equal(torch.get_rng_state(), after)


def test_drawn_weights_are_never_whole_in_memory() -> None:
    with echelon.deferred():
        model = Drawn()
    whole = [name for name, p in model.named_parameters() if piecewise_values(*place_of(p)) is None]
    assert whole == ["shifted", "turned"]


def place_of(parameter: Tensor) -> tuple[Tape, TensorRef]:
    recipe = getattr(parameter, RECIPE)
    return recipe.tape, recipe.ref


def test_other_devices_are_refused() -> None:
    recorder = ConstructionRecorder(Tape())
    with pytest.raises(UsageError, match="makes weights on 'cuda'"):
        recorder.__torch_dispatch__(torch.ops.aten.empty.memory_format, (), ([3],), {"device": torch.device("cuda")})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.weight.detach().zero_(), "'weight' was changed after"),
        (lambda model: model.register_parameter("own", nn.Parameter(torch.empty(3, device="meta"))), "'own' is on the"),
        (lambda model: model.register_buffer("own", torch.empty(3, device="meta")), "buffer 'own' is on the meta"),
    ],
)
def test_meta_tensors_without_values_are_refused(change: Callable[[nn.Module], Any], message: str) -> None:
    with echelon.deferred():
        model = nn.Linear(4, 4)
    change(model)
    with pytest.raises(UsageError, match=message):
        echelon.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
