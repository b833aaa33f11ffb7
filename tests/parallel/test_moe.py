"""A mixture of experts: against a loop over tokens on one process, and against one process when split over ranks."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import echelon
from echelon.base.errors import UsageError
from echelon.nn import MoE, take_auxiliary_loss
from echelon.parallel.data import batch_norm
from echelon.parallel.expert.split_moe import STACKED, count_together, split_moe
from echelon.parallel.tensor import SplitAxis
from echelon.strategy.annotations.marks import Split

DIM = 6


def make(experts: int, **options: Any) -> MoE:
    torch.manual_seed(3)
    layer = MoE(DIM, experts, 10, auxiliary=0.5, **options).double()
    torch.nn.init.normal_(layer.gate.weight)  # decided choices, so that capacity matters
    return layer


def tokens_for(count: int) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(count), dtype=torch.double)


def by_loop(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """One token after the other, as the text of the papers reads: outputs, auxiliary loss, dropped assignments."""
    probabilities = (x @ layer.gate.weight.T).softmax(-1)
    room = math.ceil(layer.capacity * layer.top * len(x) / layer.experts)
    ranked = [sorted(range(layer.experts), key=lambda e, row=row: -row[e]) for row in probabilities.tolist()]
    outputs, load, dropped = [torch.zeros(DIM, dtype=x.dtype) for _ in x], [0] * layer.experts, 0
    for choice in range(layer.top):
        for t in range(len(x)):
            e, weight = ranked[t][choice], probabilities[t, ranked[t][choice]]
            if layer.top == 2:
                weight = weight / (probabilities[t, ranked[t][0]] + probabilities[t, ranked[t][1]])
            if load[e] == room:
                dropped += 1
                continue
            load[e] += 1
            inner = torch.nn.functional.gelu(x[t] @ layer.w1[e] + layer.b1[e])
            outputs[t] = outputs[t] + weight * (inner @ layer.w2[e] + layer.b2[e])
    fractions = [sum(order[0] == e for order in ranked) / len(x) for e in range(layer.experts)]
    uneven = sum(f * probabilities[:, e].mean() for e, f in enumerate(fractions))
    return torch.stack(outputs), layer.auxiliary * layer.experts * uneven, dropped


def loss_of(output: Tensor) -> Tensor:
    return (output * torch.linspace(-1, 2, DIM, dtype=output.dtype)).square().sum(-1).mean()


def gradients(layer: MoE, x: Tensor, loss: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in layer.named_parameters()]
    found = torch.autograd.grad(loss, [x, *layer.parameters()])
    return dict(zip(["x", *names], found, strict=True))


CASES = [
    {"experts": 4, "top": 1, "count": 24},
    {"experts": 4, "top": 2, "count": 24},
    {"experts": 5, "top": 1, "count": 17, "capacity": 0.5},
    {"experts": 3, "top": 2, "count": 11, "capacity": 0.4},
    {"experts": 9, "top": 2, "count": 5, "capacity": 0.01},  # more experts than tokens, room for one each
    {"experts": 2, "top": 2, "count": 7, "capacity": 3.0},
    {"experts": 1, "top": 1, "count": 3},
]


def built(case: dict[str, Any]) -> tuple[MoE, Tensor]:
    options = {key: value for key, value in case.items() if key != "count"}
    return make(**options), tokens_for(case["count"]).requires_grad_()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_process_equals_a_loop_over_tokens(case: dict[str, Any]) -> None:
    layer, x = built(case)
    wanted, auxiliary, dropped = by_loop(layer, x)
    output = layer(x)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(layer.auxiliary_loss, auxiliary)
    assert round(float(layer.dropped) * layer.top * len(x)) == dropped
    expected = gradients(layer, x, loss_of(wanted) + auxiliary)
    torch.testing.assert_close(gradients(layer, x, loss_of(output) + layer.auxiliary_loss), expected)


@settings(max_examples=30)
@given(st.integers(2, 7), st.integers(1, 20), st.floats(0.05, 3), st.sampled_from([1, 2]))
def test_any_size_equals_the_loop(experts: int, count: int, capacity: float, top: int) -> None:
    layer, x = make(experts, top=top, capacity=capacity), tokens_for(count)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), by_loop(layer, x)[0])


def test_dropping_happens_in_these_cases_and_not_only_there() -> None:
    dropped = [by_loop(*built(case))[2] for case in CASES]
    assert any(dropped)
    assert not all(dropped)


def test_moe_equal_tokens_fill_first_experts_rest_dropped() -> None:
    """Equal tokens go to the first experts, and those beyond the capacity are dropped."""
    layer = make(4, top=2, capacity=1.0)
    output = layer(torch.zeros(2, 4, DIM, dtype=torch.double))  # as padding: all experts are equally probable
    kept = output.flatten(0, 1).abs().sum(1) > 0
    assert kept.tolist() == [True] * 4 + [False] * 4  # room for 4 tokens at experts 0 and 1
    assert float(layer.dropped) == 0.5


def test_shapes_no_tokens_and_evaluation() -> None:
    layer = make(4)
    assert layer(torch.randn(2, 3, DIM, dtype=torch.double)).shape == (2, 3, DIM)
    assert layer(torch.zeros(0, DIM, dtype=torch.double)).shape == (0, DIM)
    assert layer.auxiliary_loss.detach() == 0
    layer.eval()(tokens_for(3))
    assert layer.auxiliary_loss is None


def test_the_auxiliary_losses_of_a_model_are_taken_once() -> None:
    model = torch.nn.Sequential(make(3), make(3))
    model(tokens_for(8))
    total = sum(layer.auxiliary_loss for layer in model)
    torch.testing.assert_close(take_auxiliary_loss(model), total)
    assert take_auxiliary_loss(model) is None


def test_a_layer_can_be_copied_after_a_forward_pass() -> None:
    layer, x = make(3), tokens_for(8)
    layer(x).sum().backward()
    other = copy.deepcopy(layer)
    assert other.auxiliary_loss is None
    torch.testing.assert_close(other(x), layer(x))


def test_experts_of_ones_own_and_noise() -> None:
    layer = make(4, expert=lambda x, w1, b1, w2, b2: x * 3, capacity=4.0)
    x = tokens_for(9)
    weight = (x @ layer.gate.weight.T).softmax(-1).max(-1).values
    torch.testing.assert_close(layer(x), x * 3 * weight[:, None])
    noisy = make(4, noise=0.5, top=2, random_second=True, capacity=4.0)
    plain = make(4, top=2, capacity=4.0)
    assert not torch.allclose(noisy(x), plain(x))
    torch.testing.assert_close(noisy.eval()(x), plain.eval()(x))


def test_moe_second_expert_probability_is_twice_its_weight() -> None:
    """With random_second, the second expert is used with twice its weight as the probability."""
    layer = make(3, top=2, random_second=True, capacity=3.0, expert=lambda x, w1, b1, w2, b2: torch.ones_like(x))
    x = tokens_for(1).expand(4000, DIM)
    second = (x[0] @ layer.gate.weight.T).detach().softmax(-1).sort(descending=True).values[:2]
    weight = float(second[1] / second.sum())
    used = (layer(x).detach()[:, 0] > 1 - 1e-9).double().mean()
    assert abs(float(used) - min(1.0, 2 * weight)) < 0.04  # five standard deviations


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (lambda: MoE(4, 4, top=3), "MoE(top=3): expected 1 or 2"),
        (lambda: MoE(4, 1, top=2), "MoE(top=2, experts=1): expected no more than there are experts"),
        (lambda: MoE(4, 0), "MoE(experts=0): expected 1 or more"),
        (lambda: MoE(0, 2), "MoE(dim=0): expected 1 or more"),
        (lambda: MoE(4, 2, capacity=0), "MoE(capacity=0): expected a factor above 0"),
        (lambda: MoE(4, 2, auxiliary=-1), "MoE(auxiliary=-1): expected 0 or more"),
        (lambda: MoE(4, 2, noise=1.0), "MoE(noise=1.0): expected 0 up to but below 1"),
        (lambda: MoE(4, 2)(torch.zeros(3, 5)), "MoE(dim=4) got an input of shape (3, 5); make its last size 4"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: Callable[[], Any], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        wrong()
    assert str(caught.value) == line


# -- split over ranks --------------------------------------------------------------------------------------------------


def whole(case: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Tensor], float]:
    """Output, auxiliary loss, gradients and drops of one process on all tokens."""
    layer, x = built(case)
    output = layer(x)
    assert layer.auxiliary_loss is not None
    found = gradients(layer, x, loss_of(output) + layer.auxiliary_loss)
    return output.detach(), layer.auxiliary_loss.detach(), found, float(layer.dropped) * layer.top * len(x)


def uneven(count: int, ranks: int) -> list[int]:
    """The last rank has none, the first the most."""
    sizes = [count // ranks] * ranks
    sizes[0] += count - sum(sizes) + sizes[-1]
    sizes[-1] = 0
    return sizes


def check_spread(case: dict[str, Any], group: Any, split: Any, sizes: list[int]) -> None:
    """Every rank of ``group`` its own tokens; experts over ``split``. Gradients add up as the engine adds them."""
    me, size = dist.get_rank(split) if split else 0, dist.get_world_size(split) if split else 1
    at = dist.get_rank(group)
    output, auxiliary, wanted, dropped = whole(case)
    layer, x = built(case)
    layouts = split_moe(layer, SplitAxis(split, me, size, batch_per_rank=True))
    count_together(layer, group)
    begin, share = sum(sizes[:at]), sizes[at] / sum(sizes)
    mine = x.detach()[begin : begin + sizes[at]].requires_grad_()
    got = layer(mine)
    torch.testing.assert_close(got, output[begin : begin + sizes[at]])
    own = loss_of(got) if len(got) else got.sum()
    found = gradients(layer, mine, (own + layer.auxiliary_loss) * share if share else own + 0 * layer.auxiliary_loss)
    torch.testing.assert_close(found["x"], wanted["x"][begin : begin + sizes[at]])
    torch.testing.assert_close(summed(found["gate.weight"], group), wanted["gate.weight"])
    replicas = [dist.get_process_group_ranks(group)[i] for i in range(me, dist.get_world_size(group), size)]
    check_experts(found, wanted, layouts, dist.new_group(replicas, use_local_synchronization=True) if split else group)
    torch.testing.assert_close(summed(layer.auxiliary_loss.detach() * share, group), auxiliary)
    assert round(float(summed(layer.dropped.double() * layer.top * len(mine), group))) == round(dropped)


def check_shared(case: dict[str, Any], group: Any) -> None:
    """Every rank the same tokens: outputs and gradients are those of one process on each of them."""
    output, auxiliary, wanted, _ = whole(case)
    layer, x = built(case)
    layouts = split_moe(layer, SplitAxis(group, dist.get_rank(group), dist.get_world_size(group)))
    got = layer(x)
    torch.testing.assert_close(got.detach(), output)
    torch.testing.assert_close(layer.auxiliary_loss.detach(), auxiliary)
    found = gradients(layer, x, loss_of(got) + layer.auxiliary_loss)
    for name in ("x", "gate.weight"):
        torch.testing.assert_close(found[name], wanted[name])
    check_experts(found, wanted, layouts, None)


def check_weights(case: dict[str, Any], group: Any) -> None:
    """The first device is twice as fast as the others, and has twice the experts."""
    output = whole(case)[0]
    layer, x = built(case)
    ranks = dist.get_world_size(group)
    mark = Split(weights=(2.0, *[1.0] * (ranks - 1)))
    layouts = split_moe(layer, SplitAxis(group, dist.get_rank(group), ranks), mark)
    here = round(case["experts"] * (2 if dist.get_rank(group) == 0 else 1) / (ranks + 1))
    assert layouts["w1"].local_shape[0] == here
    torch.testing.assert_close(layer(x), output)


def check_experts(found: dict[str, Tensor], wanted: dict[str, Tensor], layouts: dict[str, Any], replicas: Any) -> None:
    assert set(layouts) == set(STACKED)
    for name, layout in layouts.items():
        assert found[name].shape == layout.local_shape
        total = found[name] if replicas is None else summed(found[name], replicas)
        torch.testing.assert_close(total, layout.take(wanted[name]))


def summed(x: Tensor, group: Any) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def split_in_every_way() -> None:
    echelon.init()
    world = dist.group.WORLD
    ranks = dist.get_world_size()
    for case in CASES:
        check_shared(case, world)
        check_spread(case, world, world, uneven(case["count"], ranks))
    check_weights({"experts": 2 * (ranks + 1), "top": 2, "count": 13}, world)


@pytest.mark.parametrize("ranks", [2, 4])
def test_split_experts_equal_one_process(ranks: int) -> None:
    run(split_in_every_way, ranks=ranks)


def own_batches() -> None:
    """Two replicas of a split over two ranks, each with tokens of its own; and four with all experts."""
    world, rank = dist.group.WORLD, dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for case in CASES[:4]:
        check_spread(case, world, groups[rank // 2], uneven(case["count"], 4))
        check_spread(case, world, None, uneven(case["count"], 4))  # experts whole on every rank


def shared_batches() -> None:
    """Two replicas with a batch each, on two ranks that share it."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    for case in CASES[:4]:
        output, auxiliary, wanted, _ = whole(case)
        layer, x = built(case)
        layouts = split_moe(layer, SplitAxis(groups[rank // 2], rank % 2, 2))
        count_together(layer, dist.group.WORLD)
        half = slice(0, 4) if rank < 2 else slice(4, None)
        mine = x.detach()[half].requires_grad_()
        share, got = len(mine) / len(x), layer(mine)
        torch.testing.assert_close(got, output[half])
        found = gradients(layer, mine, (loss_of(got) + layer.auxiliary_loss) * share)
        torch.testing.assert_close(found["x"], wanted["x"][half])
        torch.testing.assert_close(summed(found["gate.weight"], across), wanted["gate.weight"])
        torch.testing.assert_close(summed(layer.auxiliary_loss.detach() * share, across), auxiliary)
        check_experts(found, wanted, layouts, across)


def replicas() -> None:
    echelon.init()
    own_batches()
    shared_batches()


def test_capacity_and_load_are_counted_over_replicas_too() -> None:
    run(replicas, ranks=4)


def idle_and_noise() -> tuple[Tensor, Tensor, float]:
    echelon.init()
    world, rank = dist.group.WORLD, dist.get_rank()
    case = CASES[3]
    output, auxiliary, wanted, _ = whole(case)
    layer, x = built(case)
    split_moe(layer, SplitAxis(world, rank, 2, batch_per_rank=True))
    mine = x if rank == 0 else tokens_for(5).requires_grad_()
    with batch_norm.stand_in_batch(rank == 1):
        got = layer(mine)
    found = gradients(layer, mine, (loss_of(got) + layer.auxiliary_loss) * (rank == 0))
    if rank == 0:
        torch.testing.assert_close(got, output)
        torch.testing.assert_close(layer.auxiliary_loss, auxiliary)
        torch.testing.assert_close(found["x"], wanted["x"])
    noisy = make(4, noise=0.9, capacity=4.0, expert=lambda x, w1, b1, w2, b2: x)
    split_moe(noisy, SplitAxis(world, rank, 2))
    torch.manual_seed(5)  # ranks that share a batch share their random numbers, outside of split layers
    same = tokens_for(1).expand(6, DIM)
    return noisy(same).detach(), torch.rand(3), float(layer.dropped)


def test_moe_stand_in_batch_ignored_and_noise_differs_by_share() -> None:
    """A stand-in batch does not count, and the noise differs between the ranks' shares."""
    (first, after, _), (second, after_too, dropped) = run(idle_and_noise, ranks=2)
    torch.testing.assert_close(first, second)
    assert len({round(float(row[0]), 12) for row in first}) == 6
    assert torch.equal(after, after_too)
    assert dropped == 0


def test_the_gate_computes_in_32_bits_also_for_16_bit_tokens() -> None:
    layer, x = make(4).float(), tokens_for(9).bfloat16()
    exact = (x.float() @ layer.gate.weight.T).softmax(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer._choose(x, layer.gate.weight).probabilities, exact)


@pytest.mark.parametrize(
    ("mark", "line"),
    [
        (Split(how="row"), "has split(how='row'), but a mixture of experts is split by experts; leave how out"),
        (Split(sequence=True), "has split(sequence=True), but a mixture of experts has no layers to cut it for"),
        (Split(gather=False), "has split(gather=False), but a mixture of experts has no part to hand on"),
        (Split(weights=(1.0, 2.0)), "has split(weights=...) of 2 numbers, but 1 devices share it"),
    ],
)
def test_splits_that_experts_do_not_have(mark: Split, line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(line)):
        split_moe(make(4), SplitAxis(None, 0, 1), mark)


def sixteen_bits() -> None:
    echelon.init()
    world = dist.group.WORLD
    torch.manual_seed(0)
    layer, x = MoE(DIM, 4, 10, top=2), torch.randn(12, DIM)
    alone = copy.deepcopy(layer)
    split_moe(layer, SplitAxis(world, dist.get_rank(), 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, got = alone(x), layer(x)
    assert got.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(got, wanted)


def test_autocast_routes_as_without_and_computes_in_16_bits() -> None:
    run(sixteen_bits, ranks=2)
