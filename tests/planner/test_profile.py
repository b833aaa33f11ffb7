"""Profiles against closed forms, and against what really runs: kernels, memory, messages."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import Collectives
from harness import run
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode

import echelon
from echelon.parallel.tensor import SplitAxis, apply_split
from echelon.plan.saved_bytes import SavedBytes
from echelon.planner.model_costs import ModelUnit, UnitPass
from echelon.planner.profiling.builders import bert, gpt, llama
from echelon.planner.profiling.profile import Profile, profile
from echelon.planner.profiling.transformers import bert_model, token_loss

PRODUCTS = ("product", "convolution", "attention")


def arithmetic(one: UnitPass) -> float:
    return sum(kernel.flops * kernel.count for kernel in one.kernels if kernel.kind in PRODUCTS)


# ---- models ----


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def plain_loss(output: Tensor, target: Tensor) -> Tensor:
    """Compute a loss of operations that hold no memory."""
    return (output - target).square().mean()


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


class Alone(nn.Module):
    """A model without units."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Mlp(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(32, 128), nn.Linear(128, 32), dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.second(F.gelu(self.first(x))), self.dropout, self.training)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU()) for i, o in ((3, 8), (8, 16))]
        )
        self.up = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU()) for i, o in ((16, 8), (16, 3))]
        )

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down[0](x)
        h = self.down[1](F.max_pool2d(skip, 2))
        h = F.interpolate(self.up[0](h), scale_factor=2)
        out: Tensor = self.up[1](torch.cat([h, skip], 1))
        return out


def layer(dropout: float = 0.0) -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 128, dropout, activation=F.gelu, batch_first=True)


# ---- closed forms ----


@pytest.mark.parametrize("fused", [True, False])
def test_a_transformer_layer_does_what_its_closed_form_says(fused: bool) -> None:
    b, s, h, heads = 3, 64, 128, 8
    unit = gpt(2, h, heads, s, 1000, fused_attention=fused, dtype=torch.bfloat16).sheet(b).units[1]
    forward = 24 * b * s * h**2 + 4 * b * s**2 * h
    assert arithmetic(unit.forward) == forward
    again = 2 * b * s**2 * h if fused else 0  # a fused kernel computes the weights anew
    assert arithmetic(unit.backward) == 2 * forward + again
    # Korthikanti et al.: 34 sbh, and 5 as^2b where the weights of attention are kept; statistics come on top.
    norms, statistics = 4 * 4 * b * s, 4 * b * s * heads if fused else 0
    kept = 34 * s * b * h + (0 if fused else 5 * heads * s**2 * b) + norms + statistics
    assert unit.saved == pytest.approx(kept, rel=0.002)


def test_weights_of_published_models() -> None:
    assert sum(entries for _, entries, *_ in gpt(96, 12288, 96, 2048).parameters) == pytest.approx(175e9, rel=0.01)
    assert sum(entries for _, entries, *_ in bert(24, 1024, 16, 512).parameters) == pytest.approx(335e6, rel=0.01)
    found = llama(32, 4096, 32, 8, 14336, 64, 128256)
    assert sum(entries for _, entries, *_ in found.parameters) == pytest.approx(8.03e9, rel=0.001)


def test_weight_gradients_are_told_apart() -> None:
    unit = gpt(1, 64, 4, 32, 500).sheet(2).units[1]
    for_weights = sum(k.flops * k.count for k in unit.backward.kernels if k.for_weights and k.kind == "product")
    assert for_weights == 24 * 2 * 32 * 64**2
    assert not any(kernel.for_weights for kernel in unit.forward.kernels)


# ---- against real runs ----

CASES: dict[str, Any] = {
    "convnet": lambda: (convnet(), (torch.randn(4, 3, 32, 32), torch.randint(10, (4,))), F.cross_entropy),
    "transformer": lambda: (
        nn.Sequential(layer(), layer()),
        (torch.randn(4, 16, 32), torch.randn(4, 16, 32)),
        mean_loss,
    ),
    "unet": lambda: (UNet(), (torch.randn(2, 3, 32, 32), torch.randn(2, 3, 32, 32)), mean_loss),
}


@pytest.mark.parametrize("case", CASES)
def test_arithmetic_and_saved_bytes_are_those_of_a_real_run(case: str) -> None:
    model, batch, loss = CASES[case]()
    sheet = profile(model, batch, loss=loss).sheet(len(batch[0]))
    with FlopCounterMode(display=False) as counter, SavedBytes([*model.parameters(), *model.buffers()]) as saved:
        result = loss(model(batch[0]), batch[1])
    own = (
        0.0
        if case != "transformer"
        else sum(  # torch's counter leaves the CPU's attention kernel out
            k.flops * k.count for unit in sheet.units for k in unit.forward.kernels if k.kind == "attention"
        )
    )
    assert sum(arithmetic(unit.forward) for unit in sheet.units) == counter.get_total_flops() + own
    assert sum(unit.saved for unit in sheet.units) == saved.total
    with FlopCounterMode(display=False) as counter:
        result.backward()
    own *= 2.5
    assert sum(arithmetic(unit.backward) for unit in sheet.units) == counter.get_total_flops() + own


def peaks(model: nn.Module, batch: Any, loss: Any) -> list[float]:
    """The most bytes of a real forward, and of its backward."""
    found = []
    results: list[Tensor] = []
    parts: list[Any] = [
        lambda: results.append(loss(model(batch[0]), batch[1])),
        lambda: torch.autograd.backward(results.pop()),
    ]
    for part in parts:
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watched:
            part()
        events = watched.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        now = most = 0
        for _, change in changes:
            now += change
            most = max(most, now)
        found.append(float(most))
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["mlp", "layer"])
def test_peaks_are_those_of_a_real_run(kind: str, dropout: float) -> None:
    model = Alone(layer(dropout) if kind == "layer" else Mlp(dropout))
    batch = (torch.randn(64, 64, 32), torch.randn(64, 64, 32))
    (unit,) = profile(model, batch, loss=plain_loss).sheet(64).units
    forward, backward = peaks(model, batch, plain_loss)
    assert unit.forward_peak == pytest.approx(forward, rel=0.02)
    assert unit.backward_peak == pytest.approx(backward, rel=0.02)


# ---- samples ----


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("amp", [None, "bf16"])
def test_what_is_interpolated_is_what_would_be_measured(case: str, amp: str | None) -> None:
    model, batch, loss = CASES[case]()
    found = profile(model, batch, loss=loss)
    between = found.sheet(7, amp=amp).units
    measured = found._measured_at(1, amp, (7, 7), False).units(7)
    assert len(between) == len(measured)
    for one, other in zip(between, measured, strict=True):
        assert one.forward.flops == pytest.approx(other.forward.flops)
        assert one.backward.bytes == pytest.approx(other.backward.bytes)
        for name in ("saved", "received", "output", "forward_peak", "backward_peak"):
            assert getattr(one, name) == pytest.approx(getattr(other, name)), name


# ---- units ----


def test_units_that_are_alike_are_one_object_and_ties_are_known() -> None:
    found = gpt(6, 64, 4, 32, 500)
    units = found.sheet(2).units
    assert len(units) == 8
    assert len({id(unit) for unit in units}) == 3
    assert len({id(unit) for unit in units[1:7]}) == 1
    assert found.ties == ((0, 7),)
    assert found.sheet(2).tied == (500 * 64,)
    assert {unit for name, _, _, _, unit in found.parameters if name.startswith("3.")} == {3}


def test_skip_connections_are_received_where_they_end() -> None:
    model, batch, loss = CASES["unet"]()
    found = profile(model, batch, loss=loss)
    assert found.names == ("down.0", "down.1", "up.0", "up.1")
    units = found.sheet(2).units
    skip, last = 2 * 8 * 32 * 32 * 4, 2 * 8 * 16 * 16 * 4
    assert [unit.received for unit in units[1:]] == [skip, 2 * 16 * 16 * 16 * 4, skip + last]


def test_a_model_without_units_is_one() -> None:
    found = profile(Alone(nn.Linear(4, 4)), (torch.randn(3, 4), torch.randn(3, 4)), loss=mean_loss)
    assert found.names == ("",)
    assert found.splits == 1


class UnusedBlocks(nn.Module):
    """A model whose only repeated blocks are never called."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(blocks))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(x)


def test_a_model_with_unused_blocks_only_is_one_unit() -> None:
    """Its operations are those of the model without these blocks, which still take memory."""
    batch = (torch.randn(3, 4), torch.randn(3, 2))
    (unused,), (plain,) = (profile(UnusedBlocks(n), batch, loss=mean_loss).sheet(3).units for n in (4, 0))
    assert (unused.name, unused.weights - plain.weights) == ("", 4 * (4 * 4 + 4))
    assert (unused.forward, unused.backward, unused.saved) == (plain.forward, plain.backward, plain.saved)


class Cyclic(nn.Module):
    """Its results lie in cycles, which the collector looks for all the time in every other pass, else never."""

    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        Cyclic.passes += 1
        gc.set_threshold(1 if Cyclic.passes % 2 else 100_000)
        for _ in range(20):
            cycle: list[Any] = [torch.relu(x)]
            cycle.append(cycle)
            del cycle
        return self.inner(x)


def test_when_cycles_are_collected_makes_no_difference() -> None:
    threshold = gc.get_threshold()
    try:
        found = profile(Alone(Cyclic()), (torch.randn(4, 8), torch.randn(4, 8)), loss=mean_loss)
        first, second, third = (found.sheet(samples).units[0].forward_peak for samples in (4, 8, 12))
    finally:
        gc.set_threshold(*threshold)
    assert first > 20 * 4 * 8 * 4
    assert third - second == second - first == first - 4  # the loss is 4 bytes, whatever the batch


def test_batch_norms_are_counted() -> None:
    model, batch, loss = CASES["convnet"]()
    units = profile(model, batch, loss=loss).sheet(4).units
    assert sum(unit.norm_statistics for unit in units) == 2 * 16 + 1 + 2 * 32 + 1
    assert sum(unit.buffers for unit in units) == (2 * 16 + 2 * 32) * 4 + 2 * 8


def test_the_model_is_left_as_it_was() -> None:
    model, batch, loss = CASES["convnet"]()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    parameters, classes = list(map(id, model.parameters())), [type(module) for module in model.modules()]
    found = profile(model, batch, loss=loss)
    found.sheet(3, amp="bf16")
    assert found.splits >= 1
    assert list(map(id, model.parameters())) == parameters
    assert [type(module) for module in model.modules()] == classes
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(torch.get_rng_state(), random)


def test_a_model_that_cannot_run_on_shapes_says_so() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    with pytest.raises(echelon.base.errors.UsageError, match="'Odd' cannot be profiled: ValueError: no"):
        profile(Odd(), (torch.randn(2, 2),))


# ---- splits ----


def small_bert() -> nn.Module:
    torch.manual_seed(0)
    return bert_model(2, 32, 4, 16, 4096, 64, 0.1, True)


def test_what_is_marked_can_be_split() -> None:
    found = profile(small_bert(), (torch.zeros(4, 16, dtype=torch.long),) * 2, loss=token_loss)
    hows = {name: mark.how for name, mark in found.split_marks.items() if name.startswith(("0", "2", "3"))}
    assert hows == {
        "0.tokens": "auto", "2.mlp": "auto", "2.attention.qkv": "column", "2.attention.project": "row",
        "3.words": "auto",
    }  # fmt: skip
    assert found.splits == 4


@pytest.mark.parametrize(("vocabulary", "cut"), [(500, 1), (4096, 2)])
def test_a_tied_weight_is_as_large_as_the_split_leaves_it(vocabulary: int, cut: int) -> None:
    found = gpt(2, 64, 4, 32, vocabulary)
    assert ("0.tokens" in found.split_marks) == (cut == 2)  # a small table is not worth a split
    assert found.sheet(2, split=2).tied == (vocabulary * 64 / cut,)


def send(samples: int, marks: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    world = echelon.init()
    model = small_bert()
    group = torch.distributed.group.WORLD
    apply_split(model, marks, SplitAxis(group, world.rank, world.size))
    tokens = torch.zeros(samples, 16, dtype=torch.long)
    with Collectives() as forward:
        loss = token_loss(model(tokens), tokens)
    with Collectives() as backward:
        torch.autograd.backward(loss)
    return dict(forward.count), dict(backward.count)


def messages(units: tuple[ModelUnit, ...], way: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for unit in units:
        for message in getattr(unit, way).messages:
            kind = "all_gather" if message.kind == "gather_small" else message.kind
            found[kind] = found.get(kind, 0) + message.count
    return found


def test_messages_of_a_split_are_those_that_two_ranks_send() -> None:
    found: Profile = profile(small_bert(), (torch.zeros(4, 16, dtype=torch.long),) * 2, loss=token_loss)
    units = found.sheet(4, 2).units
    forward, backward = run(send, 4, found.split_marks, ranks=2)[0]
    assert (messages(units, "forward"), messages(units, "backward")) == (forward, backward)
    assert units[1].forward.messages[0].bytes == 4 * 16 * 32 * 4
    whole = found.sheet(4).units[1]
    assert arithmetic(units[1].forward) == arithmetic(whole.forward) / 2
