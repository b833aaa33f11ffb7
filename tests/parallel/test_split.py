"""Every split layer gives what the whole layer gives: outputs, gradients of inputs, gradients of parameters."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from counting import Collectives
from harness import run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import echelon
from echelon.base.errors import UsageError
from echelon.parallel.activation_checkpoint import apply_recompute
from echelon.parallel.tensor import AppliedSplit, ShardedActivation, SplitAxis, apply_split, whole, why_not
from echelon.strategy.annotations.marks import Split

S = Split


# ---- the comparison ----


@dataclass(frozen=True)
class Case:
    """A module, how it is split, and what it is fed. In spread mode each rank has some rows of every input."""

    make: Callable[[], nn.Module]
    marks: Mapping[str, Split]
    inputs: Callable[[], tuple[Tensor, ...]]
    call: Callable[[nn.Module, Any], Any] = lambda module, inputs: module(*inputs)
    modes: tuple[str, ...] = ("shared", "spread")
    tolerance: float = 2e-6
    dtype: torch.dtype | None = None  # of autocast


def axis_of(world: Any, spread: bool = False) -> SplitAxis:
    return SplitAxis(dist.group.WORLD if world.size > 1 else None, world.rank, world.size, spread)


def own_rows(world: Any, x: Tensor) -> slice:
    return rows_of(world.rank, world.size, x)


def rows_of(rank: int, size: int, x: Tensor) -> slice:
    """Uneven: later ranks have fewer."""
    weights = range(size + 1, 1, -1)
    bounds = [round(len(x) * sum(weights[:i]) / sum(weights)) for i in range(size + 1)]
    return slice(bounds[rank], bounds[rank + 1])


def compare(case: Case, mode: str) -> None:
    world = echelon.init()
    torch.manual_seed(5)
    reference = case.make()
    ours = copy.deepcopy(reference)
    weights = {id(p) for p in ours.parameters()}
    applied = apply_split(ours, case.marks, axis_of(world, mode == "spread"))
    assert {id(p) for p in ours.parameters()} == weights
    assert applied.layouts or applied.partial
    given = case.inputs()
    cuts = [own_rows(world, x) if mode == "spread" else slice(None) for x in given]
    mine = [leaf(x[cut]) for x, cut in zip(given, cuts, strict=True)]
    alone = [leaf(x) for x in given]
    close = partial(torch.testing.assert_close, rtol=case.tolerance, atol=case.tolerance, check_dtype=True)
    with torch.autocast("cpu", dtype=case.dtype or torch.bfloat16, enabled=case.dtype is not None):
        out, expected = tensors(case.call(ours, mine)), tensors(case.call(reference, alone))
    seeds = [torch.randn(e.shape, generator=torch.Generator().manual_seed(i)) for i, e in enumerate(expected)]
    rows = cuts[0]
    for got, want in zip(out, expected, strict=True):
        close(got, want[rows] if mode == "spread" else want)
    backward(out, [s[rows] for s in seeds] if mode == "spread" else seeds)
    backward(expected, seeds)
    for got, want, cut in zip(mine, alone, cuts, strict=True):
        if want.requires_grad:
            close(got.grad, want.grad[cut])
    compare_gradients(ours, reference, applied, mode, close)


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_(x.is_floating_point())


def tensors(out: Any) -> list[Tensor]:
    return [whole(x) for x in (out if isinstance(out, tuple) else (out,)) if x is not None]


def backward(outputs: list[Tensor], seeds: list[Tensor]) -> None:
    sum((o.float() * s).sum() for o, s in zip(outputs, seeds, strict=True) if o.requires_grad).backward()


def compare_gradients(ours: nn.Module, reference: nn.Module, applied: AppliedSplit, mode: str, close: Any) -> None:
    expected = dict(reference.named_parameters())
    for name, p in ours.named_parameters():
        want = expected[name].grad
        assert p.grad is not None, name
        got = p.grad.to_dense() if p.grad.is_sparse else p.grad
        want = want.to_dense() if want.is_sparse else want
        if name in applied.layouts:
            want = applied.layouts[name].take(want)
            assert p.shape == applied.layouts[name].local_shape
        elif (name in applied.partial or mode == "spread") and dist.is_initialized():
            dist.all_reduce(got)
        close(got, want, msg=lambda text, name=name: f"{name}: {text}")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(3))


# ---- the cases ----


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, words: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 8)
        self.head = nn.Linear(8, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x)))


class HandMade(nn.Module):
    """Attention as people write it: projections, heads by view and transpose, a gated layer."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.gate, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.norm, self.scale = nn.LayerNorm(16), nn.Parameter(torch.ones(24))
        self.manual = manual

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (p(h).view(*h.shape[:2], 4, 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.manual:
            a = torch.softmax(q @ k.transpose(-2, -1) / 2.0, dim=-1) @ v
        else:
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(h.shape))
        return x + self.down(F.silu(self.gate(x)) * self.up(x) * self.scale)


HAND_MADE = {name: S(how="column") for name in ("q", "k", "v", "up", "gate")} | {n: S(how="row") for n in ("o", "down")}


class Grouped(nn.Module):
    """One layer for queries, keys and values of each head, cut apart; two queries share a key."""

    def __init__(self) -> None:
        super().__init__()
        self.qq, self.kv, self.o = nn.Linear(16, 48), nn.Linear(16, 24), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.qq(x).view(*x.shape[:2], 12, 4).transpose(1, 2)
        kv = self.kv(x).view(*x.shape[:2], 6, 4).transpose(1, 2)
        k, v = kv.unflatten(-1, (2, 2)).unbind(-2)
        k, v = (torch.cat(each.chunk(1, dim=-1) * 2, -1) for each in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(a.transpose(1, 2).reshape(*x.shape[:2], 48))


class Local(nn.Module):
    """User code computes with the parts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        assert isinstance(h, Tensor)
        return self.down(torch.relu(h))


class Glue(nn.Module):
    """Everything that may happen between a split layer and the next."""

    def __init__(self, rowwise: bool = False) -> None:
        super().__init__()
        self.rowwise = rowwise  # only what keeps the rows of a batch apart
        self.a, self.b = nn.Linear(5, 7), nn.Linear(5, 7)
        self.wide, self.single = nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Any:
        a, b = self.a(x), self.b(x)
        stays = torch.where(a > 0, a * self.wide, b / 3) - 2 * b.clamp(min=-0.5) + self.single
        stays = stays.unsqueeze(1).exp().mul(0.1)[:, 0]
        assert type(stays) is type(a)
        gathered = a.cumsum(-1) + torch.cat([b, stays], 0)[: len(x)] + a[:, [0]] + x.sum(1, keepdim=True) * b
        changed = x.sum(1, keepdim=True).expand(-1, 7).clone()
        changed += a
        a = F.relu(a - 0.1, inplace=True)
        if self.rowwise:
            return stays, gathered, changed, a, (a + 1).norm(dim=-1), b * x[:, :1]
        return changed, stays, gathered, a.flatten(), b.mean(0), a.T @ b, (a + 1).norm(dim=-1), len(x) + b


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), *between, nn.Linear(10, 7))


def attend(module: nn.Module, inputs: Any, **named: Any) -> Any:
    q, k, v = inputs if len(inputs) == 3 else [inputs[0]] * 3
    return module(q, k, v, **named)


def masked(shape: tuple[int, int]) -> Tensor:
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[1:, -2:] = True
    return mask


def attend_masked(module: nn.Module, inputs: Any) -> Any:
    x = inputs[0]
    causal = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    padding = (x.detach()[:, :, 0] > 1.5) & (torch.arange(5) > 0)
    return module(x, x, x, attn_mask=causal, key_padding_mask=padding)


def attend_per_head(module: nn.Module, inputs: Any) -> Any:
    x = inputs[0]
    bias = x.detach()[:, None, :, :1] * torch.linspace(-1, 1, 5) * torch.arange(1.0, 4.0)[:, None, None]
    return module(x, x, x, attn_mask=bias.flatten(0, 1), average_attn_weights=False)


def encoder_layer(**named: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(12, 3, 10, dropout=0.0, **{"batch_first": True, **named})


def encoder(**named: Any) -> nn.Module:
    return nn.TransformerEncoder(encoder_layer(**named), 2, nn.LayerNorm(12), enable_nested_tensor=False)


def decoder_layer(**named: Any) -> nn.Module:
    return nn.TransformerDecoderLayer(12, 3, 10, dropout=0.0, batch_first=True, **named)


class Sequenced(nn.Module):
    """Norm and dropout on parts of the sequence between split layers, as a user marks them one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 10), nn.Linear(10, 8)
        self.last = nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        return self.last(h)


SEQUENCED = {
    "embed": S(sequence=True),
    "norm": S(how="sequence"),
    "up": S(how="column"),
    "down": S(how="row", sequence=True),
    "last": S(how="sequence"),
}


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 5, 3, padding=1), nn.BatchNorm2d(5), nn.Conv2d(5, 7, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(7, 4),
    )  # fmt: skip


X2, X3 = partial(randn, 9, 6), partial(randn, 7, 5, 12)
SHARED = ("shared",)
CASES: dict[str, Case] = {
    "column": Case(lambda: nn.Sequential(nn.Linear(6, 7)), {"0": S()}, lambda: (X2(),)),
    "column, few": Case(lambda: nn.Sequential(nn.Linear(6, 2)), {"0": S()}, lambda: (X2(),)),
    "column, weights": Case(
        lambda: nn.Sequential(nn.Linear(6, 9)), {"0": S(weights=(3.0, 1.0))}, lambda: (X2(),)
    ),
    "column, no bias, 3d": Case(
        lambda: nn.Sequential(nn.Linear(12, 5, bias=False)), {"0": S(how="column")}, lambda: (X3(),)
    ),
    "row": Case(lambda: nn.Sequential(nn.Linear(6, 5)), {"0": S(how="row")}, lambda: (X2(),)),
    "row, few": Case(lambda: nn.Sequential(nn.Linear(2, 5)), {"0": S(how="row")}, lambda: (randn(9, 2),)),
    "pair": Case(mlp, {"": S()}, lambda: (X2(),)),
    "pair, one dimension": Case(mlp, {"": S()}, lambda: (randn(6),), modes=SHARED),
    "pair, weights": Case(mlp, {"": S(weights=(1.0, 3.0, 2.0))}, lambda: (X2(),)),
    "pair, norm between": Case(lambda: mlp(nn.LayerNorm(10)), {"": S()}, lambda: (X2(),)),
    "pair, bf16": Case(mlp, {"": S()}, lambda: (X2(),), tolerance=2e-2, dtype=torch.bfloat16),
    "column after column": Case(mlp, {"0": S(), "2": S(how="column")}, lambda: (X2(),)),
    "row after row": Case(mlp, {"0": S(how="row"), "2": S(how="row")}, lambda: (X2(),)),
    "no gather": Case(Local, {"up": S(gather=False), "down": S(how="row")}, lambda: (X2(),)),
    "glue": Case(Glue, {"a": S(), "b": S()}, lambda: (randn(8, 5),), modes=SHARED, tolerance=1e-5),
    "glue by rows": Case(partial(Glue, rowwise=True), {"a": S(), "b": S()}, lambda: (randn(8, 5),), tolerance=1e-5),
    "tied": Case(Tied, {"embed": S(), "head": S()}, lambda: (tokens(13, 7, 4),)),
    "tied, weights": Case(
        Tied, {"embed": S(weights=(1.0, 2.0)), "head": S(weights=(1.0, 2.0))}, lambda: (tokens(13, 7, 4),)
    ),
    "embedding": Case(
        lambda: nn.Sequential(nn.Embedding(7, 4, padding_idx=-2)), {"0": S()}, lambda: (tokens(7, 9, 5),)
    ),
    "embedding, few": Case(lambda: nn.Sequential(nn.Embedding(2, 4)), {"0": S()}, lambda: (tokens(2, 9),)),
    "embedding, sparse": Case(
        lambda: nn.Sequential(nn.Embedding(7, 4, padding_idx=1, sparse=True)), {"0": S()}, lambda: (tokens(7, 9, 3),)
    ),
    "embedding, columns": Case(
        lambda: nn.Sequential(nn.Embedding(7, 5, padding_idx=1, scale_grad_by_freq=True), nn.Tanh(), nn.Linear(5, 3)),
        {"0": S(how="column"), "2": S(how="row")},
        lambda: (tokens(7, 9),),
    ),
    "conv": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 5, 3, stride=2)), {"0": S()}, lambda: (randn(7, 3, 6, 6),), tolerance=1e-5
    ),
    "conv, row": Case(
        lambda: nn.Sequential(nn.Conv2d(5, 4, 3)), {"0": S(how="row")}, lambda: (randn(7, 5, 6, 6),), tolerance=1e-5
    ),
    "conv, groups": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 3, groups=4), nn.ReLU(), nn.Conv2d(16, 3, 1)),
        {"": S()},
        lambda: (randn(7, 3, 6, 6),),
        tolerance=1e-5,
        modes=SHARED,
    ),
    "conv net": Case(conv_net, {"": S()}, lambda: (randn(7, 3, 6, 6),), modes=SHARED, tolerance=1e-5),
    "attention": Case(
        lambda: nn.MultiheadAttention(12, 3, batch_first=True), {"": S()}, lambda: (X3(),), attend
    ),
    "attention, no bias, no weights": Case(
        lambda: nn.MultiheadAttention(12, 4, bias=False, batch_first=True),
        {"": S()},
        lambda: (X3(), X3(seed=1), X3(seed=2)),
        partial(attend, need_weights=False),
    ),
    "attention, other widths": Case(
        lambda: nn.MultiheadAttention(12, 4, kdim=5, vdim=6, batch_first=True),
        {"": S(weights=(2.0, 1.0, 1.0))},
        lambda: (X3(), randn(7, 4, 5), randn(7, 4, 6)),
        attend,
    ),
    "attention, sequence first": Case(
        lambda: nn.MultiheadAttention(12, 3), {"": S()}, lambda: (X3(),), attend, modes=SHARED
    ),
    "attention, one sample": Case(
        lambda: nn.MultiheadAttention(12, 3), {"": S()}, lambda: (randn(5, 12),), attend, modes=SHARED
    ),
    "attention, masks": Case(
        lambda: nn.MultiheadAttention(12, 3, batch_first=True), {"": S()}, lambda: (X3(),), attend_masked
    ),
    "attention, mask per head": Case(
        lambda: nn.MultiheadAttention(12, 3, batch_first=True), {"": S()}, lambda: (X3(),), attend_per_head
    ),
    "attention, bf16": Case(
        lambda: nn.MultiheadAttention(12, 3, batch_first=True),
        {"": S()},
        lambda: (X3(),),
        attend,
        tolerance=3e-2,
        dtype=torch.bfloat16,
    ),
    "hand-made attention": Case(HandMade, HAND_MADE, lambda: (randn(7, 5, 16),), tolerance=1e-5),
    "hand-made attention, by matmul": Case(
        partial(HandMade, manual=True), HAND_MADE, lambda: (randn(7, 5, 16),), tolerance=1e-5
    ),
    "hand-made attention, shared keys": Case(
        Grouped,
        {"qq": S(how="column"), "kv": S(how="column"), "o": S(how="row")},
        lambda: (randn(7, 5, 16),),
        tolerance=1e-5,
    ),
    "encoder layer": Case(encoder_layer, {"": S()}, lambda: (X3(),), tolerance=1e-5),
    "encoder layer, sequence first": Case(
        lambda: encoder_layer(batch_first=False), {"": S()}, lambda: (X3(),), tolerance=1e-5, modes=SHARED
    ),
    "encoder layer, sequence": Case(
        encoder_layer, {"": S(sequence=True)}, lambda: (X3(),), tolerance=1e-5, modes=SHARED
    ),
    "encoder, sequence, norm first": Case(
        lambda: encoder(norm_first=True, activation="gelu"),
        {"": S(sequence=True)},
        lambda: (X3(),),
        tolerance=1e-5,
        modes=SHARED,
    ),
    "encoder layer, bf16": Case(encoder_layer, {"": S()}, lambda: (X3(),), tolerance=6e-2, dtype=torch.bfloat16),
    "encoder layer, sequence, bf16": Case(
        encoder_layer, {"": S(sequence=True)}, lambda: (X3(),), tolerance=6e-2, dtype=torch.bfloat16, modes=SHARED
    ),
    "decoder layer": Case(decoder_layer, {"": S()}, lambda: (X3(), randn(7, 4, 12, seed=1)), tolerance=1e-5),
    "decoder layer, sequence": Case(
        lambda: decoder_layer(norm_first=True),
        {"": S(sequence=True)},
        lambda: (X3(), randn(7, 4, 12, seed=1)),
        tolerance=1e-5,
        modes=SHARED,
    ),
    "sequence, by hand": Case(Sequenced, SEQUENCED, lambda: (tokens(11, 6, 7),), tolerance=1e-5, modes=SHARED),
    "sequence of a Sequential": Case(
        lambda: nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 6), nn.RMSNorm(6)),
        {"": S(sequence=True, weights=(2.0, 1.0))},
        lambda: (X3(),),
        tolerance=1e-5,
        modes=SHARED,
    ),
}  # fmt: skip


def all_cases(few: bool) -> int:
    """``few``: only those where some rank gets nothing."""
    world, done = echelon.init(), 0
    for (name, case), mode in itertools.product(CASES.items(), ("shared", "spread")):
        weights = next(iter(case.marks.values())).weights
        fits = len(weights) == world.size if weights else name != "conv, groups" or world.size in (1, 2, 4)
        if mode in case.modes and fits and (not few or "few" in name or "encoder layer" in name):
            try:
                compare(case, mode)
            except BaseException as error:
                error.add_note(f"case '{name}', {mode}, rank {world.rank} of {world.size}")
                raise
            done += 1
    return done


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_layer_equals_the_whole_one(ranks: int) -> None:
    assert min(run(all_cases, few=False, ranks=ranks)) >= 60


def test_ranks_without_a_part_take_part() -> None:
    assert min(run(all_cases, few=True, ranks=4)) >= 10


# ---- what is sent ----


def counted(model: nn.Module, marks: Mapping[str, Split], *inputs: Any, spread: bool = False) -> tuple[Any, Any]:
    """Collectives forward and backward."""
    apply_split(model, marks, axis_of(echelon.init(), spread))
    with Collectives() as forward:
        out = model(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    local = out.local if isinstance(out, ShardedActivation) else out
    with Collectives() as backward:
        local.square().sum().backward()
    return dict(forward.count), dict(backward.count)


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(x)
        return self.q(h) * self.k(h) + self.v(h)


def traffic() -> dict[str, Any]:
    x = X3().requires_grad_()
    columns = {name: S() for name in "qkv"}
    cut = encoder_layer()  # what a block before it hands on
    apply_split(cut, {"": S(sequence=True)}, axis_of(echelon.init()))
    parts = cut(x)
    assert isinstance(parts, ShardedActivation)
    parts = parts.like(parts.local.detach().requires_grad_())
    return {
        "pair": counted(mlp(), {"": S()}, X2().requires_grad_()),
        "pair, spread": counted(mlp(), {"": S()}, X2().requires_grad_(), spread=True),
        "projections": counted(Projections(), columns, x),
        "projections of parts": counted(Projections(), columns, parts),
        "attention": counted(nn.MultiheadAttention(12, 3, batch_first=True), {"": S()}, x, x, x, None, False),
        "encoder layer": counted(encoder_layer(), {"": S()}, x),
        "encoder layer, sequence": counted(encoder_layer(), {"": S(sequence=True)}, parts),
        "hand-made": counted(HandMade(), HAND_MADE, randn(7, 5, 16).requires_grad_()),
    }


def test_no_more_is_sent_than_must_be() -> None:
    one, two = {"all_reduce": 1}, {"all_reduce": 2}
    swap = {"send": 1, "recv": 1}  # reduce-scatter between two ranks over Gloo
    for sent in run(traffic, ranks=2):
        assert sent["pair"] == (one, one)
        assert sent["pair, spread"] == ({"all_gather": 2} | swap, {"all_gather": 1} | swap)  # sizes, then rows
        assert sent["projections"] == ({}, one)
        assert sent["projections of parts"] == ({"all_gather": 1}, swap)
        assert sent["attention"] == (one, one)
        assert sent["encoder layer"] == (two, two)
        assert sent["encoder layer, sequence"] == ({"all_gather": 2, "send": 2, "recv": 2},) * 2
        assert sent["hand-made"] == (two, two | {"all_gather": 1})  # the gradient of a whole scale


# ---- chance, inference, memory ----


def same_on_all(x: Tensor) -> bool:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return all(torch.equal(part, parts[0]) for part in parts)


def chance() -> None:
    world = echelon.init()
    axis = axis_of(world)
    ones = nn.Sequential(nn.Linear(1, 400), nn.Dropout(0.5))
    nn.init.ones_(ones[0].weight)
    apply_split(ones, {"0": S()}, axis)
    dropped = ones(torch.ones(1, 1))
    kept = (dropped.whole() > 1).float()
    assert not torch.equal(kept[:, :200], kept[:, 200:])  # another mask on every rank
    assert 120 < kept.sum() < 280
    attention = nn.MultiheadAttention(12, 4, dropout=0.5, batch_first=True)
    apply_split(attention, {"": S()}, axis)
    x = X3()
    out, weights = attention(x, x, x, average_attn_weights=False)
    assert not torch.equal(weights.whole()[:, :2] == 0, weights.whole()[:, 2:] == 0)
    assert same_on_all(out)
    block = nn.TransformerEncoderLayer(12, 4, 10, dropout=0.3, batch_first=True)
    apply_split(block, {"": S()}, axis)
    assert same_on_all(block(x))  # dropout outside split layers is the same everywhere
    uneven = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5))
    apply_split(uneven, {"0": S()}, axis)
    uneven(torch.ones(4, 3))
    assert same_on_all(torch.rand(3))  # and so is what is drawn afterwards
    ones.eval()
    before = torch.get_rng_state()
    assert ones(torch.ones(1, 1)).whole().std() < 2
    assert torch.equal(before, torch.get_rng_state())


def inference() -> None:
    """In evaluation torch's transformer layers would read the weights themselves, and pack padded batches."""
    world = echelon.init()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 4, 10, batch_first=True)
    padding = masked((7, 5))
    for marks in (
        {"": S()},
        {"layers.0.self_attn": S(), "layers.1.linear1": S(), "layers.1.linear2": S(how="row")},
        {"layers.0": S(sequence=True), "layers.1.self_attn": S()},
    ):
        reference = nn.TransformerEncoder(layer, 2)
        ours = copy.deepcopy(reference)
        apply_split(ours, marks, axis_of(world))
        reference.eval()
        ours.eval()
        with torch.no_grad():
            got, want = whole(ours(X3(), src_key_padding_mask=padding)), reference(X3(), src_key_padding_mask=padding)
            torch.testing.assert_close(got[~padding], want[~padding], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(whole(ours(X3())), reference(X3()), rtol=1e-5, atol=1e-5)


def recomputed() -> None:
    """Segments that begin and end with parts, dropout inside: the gradients of a run that keeps everything."""
    world = echelon.init()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 4, 10, dropout=0.2, batch_first=True)
    kept = nn.Sequential(*(copy.deepcopy(layer) for _ in range(3)))
    apply_split(kept, {"": S(sequence=True)}, axis_of(world))
    again = copy.deepcopy(kept)
    apply_recompute(again, (("0",), ("1",), ("2",)), (), offload=False, group=None)
    for model in (kept, again):
        torch.manual_seed(9)
        whole(model(X3())).square().sum().backward()
    for p, q in zip(kept.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def forgotten() -> None:
    """State kept for the next layer goes with the batch."""
    axis = axis_of(echelon.init())
    model = Projections()
    apply_split(model, {name: S() for name in "qkv"}, axis)
    x = X3().requires_grad_() * 1
    out = model.q(x) + model.k(x)
    entered = weakref.ref(axis.memory.find(x, Tensor, x.dtype, None)[0])
    out.whole().sum().backward()
    del out, x
    assert entered() is None


def second_derivatives() -> None:
    torch.manual_seed(0)
    reference = mlp()
    ours = copy.deepcopy(reference)
    apply_split(ours, {"": S()}, axis_of(echelon.init()))
    results = []
    for model in (ours, reference):
        x = X2().requires_grad_()
        (slope,) = torch.autograd.grad(whole(model(x)).square().sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.square().sum(), x)
        results.append((slope.detach(), bend))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def surroundings() -> None:
    for check in (chance, inference, recomputed, forgotten, second_derivatives):
        check()


def test_chance_inference_recomputation_and_memory() -> None:
    run(surroundings, ranks=2)


# ---- what is refused ----


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(3, 3), nn.Linear(3, 3)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Split, str]] = {
    "a kind": (lambda: nn.LSTM(3, 3), S(), r"'part' \(LSTM\) cannot be split; Linear, Embedding, Conv2d"),
    "a container": (Custom, S(), "'part' \\(Custom\\) cannot be split.*inside it: 'inner', 'other'"),
    "max_norm": (lambda: nn.Embedding(4, 3, max_norm=1.0), S(), "has max_norm"),
    "own forward": (lambda: Scaled(3, 3), S(), r"has a forward\(\) of its own"),
    "weights": (lambda: nn.Linear(3, 3), S(weights=(1.0, 2.0, 3.0)), "3 numbers, but 2 devices"),
    "groups": (lambda: nn.Conv2d(6, 6, 1, groups=3), S(), "groups=3"),
    "few channels": (lambda: nn.Conv2d(3, 1, 1), S(), "fewer channels than the 2 devices"),
    "norm": (lambda: nn.BatchNorm1d(3), S(how="sequence"), "treats positions together"),
    "row without gather": (lambda: nn.Linear(3, 3), S(how="row", gather=False), "no part to hand on"),
    "bias_kv": (lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True), S(), "add_bias_kv"),
    "nothing inside": (lambda: nn.Sequential(nn.ReLU()), S(), "no layer that can be split"),
    "custom inside": (lambda: nn.Sequential(nn.Linear(3, 3), Custom()), S(), "cannot be split"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_split_is_refused_in_one_line(case: str) -> None:
    make, mark, line = REFUSED[case]
    model = nn.ModuleDict({"part": make()})
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(UsageError, match=line) as refusal:
        apply_split(model, {"part": mark}, SplitAxis(None, 0, 2))
    assert "\n" not in str(refusal.value)
    assert "'part'" in str(refusal.value)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])  # nothing was cut


def test_tied_weights_are_cut_in_one_way_or_refused() -> None:
    with pytest.raises(UsageError, match=r"'embed.weight' is also a weight of 'head', which is not split; mark both"):
        apply_split(Tied(), {"embed": S()}, SplitAxis(None, 0, 2))
    with pytest.raises(UsageError, match=r"'embed.weight' is shared by modules that would cut it differently"):
        apply_split(Tied(), {"embed": S(), "head": S(how="row")}, SplitAxis(None, 0, 2))


def test_sequence_and_spread_exclude_each_other() -> None:
    for mark in (S(sequence=True), S(how="sequence")):
        with pytest.raises(UsageError, match="cuts the sequence"):
            apply_split(encoder_layer(), {"": mark}, SplitAxis(None, 0, 2, batch_per_rank=True))


def test_what_is_split_stays_split() -> None:
    model = mlp()
    apply_split(model, {"": S()}, SplitAxis(None, 0, 1))
    with pytest.raises(UsageError, match="split already"):
        apply_split(model, {"0": S()}, SplitAxis(None, 0, 1))
    assert isinstance(model[0], nn.Linear)
    assert type(model[0]).__name__ == "SplitLinear"


def test_the_planner_learns_what_can_be_split() -> None:
    can = (nn.Linear(2, 2), nn.Embedding(3, 2), nn.Conv2d(2, 2, 1), encoder_layer(), encoder(), mlp(), decoder_layer())
    assert [why_not(module) for module in can] == [None] * len(can)
    assert (why_not(nn.LayerNorm(3)) or "").startswith("LayerNorm cannot be split; Linear")
    assert "'inner'" in (why_not(Custom()) or "")


def test_layouts_say_where_the_parts_belong() -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(12, 3), "n": nn.LayerNorm(4)})
    applied = apply_split(model, {"a": S(), "n": S(how="sequence")}, SplitAxis(None, 1, 2))
    assert applied.layouts["a.in_proj_weight"].parts == {0: ((8, 12), (20, 24), (32, 36))}
    assert applied.layouts["a.out_proj.weight"].parts == {1: ((8, 12),)}
    assert set(applied.layouts) == {"a.in_proj_weight", "a.in_proj_bias", "a.out_proj.weight"}
    assert applied.partial == {"n.weight", "n.bias"}
    assert model["a"].in_proj_weight.shape == (12, 12)


# ---- shapes, without any messages: each rank's part of the result is the part of the whole's result ----


OPERATIONS: list[Callable[[Any], Any]] = [
    lambda x: x.reshape(x.shape[0], -1),
    lambda x: x.flatten(0, 1),
    lambda x: x.view(x.shape[0], *x.shape[1:-1], x.shape[-1] // 2, 2),
    lambda x: x.reshape(-1, *x.shape[2:]),
    lambda x: torch.unflatten(x, 1, (2, -1)),
    lambda x: x.transpose(1, -1),
    lambda x: x.permute(0, *range(x.dim() - 1, 0, -1)),
    lambda x: x.unsqueeze(1),
    lambda x: x.unsqueeze(-1) * 2,
    lambda x: x[:, 1:],
    lambda x: x[:, ..., -1],
    lambda x: x[..., :2],
    lambda x: torch.softmax(x, dim=1),
    lambda x: x.mean(dim=(1,), keepdim=True) + x,
    lambda x: x.sum(-1),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: x @ x.transpose(-2, -1),
    lambda x: x.chunk(2, dim=-1)[1],
    lambda x: x.unbind(1)[0],
    lambda x: torch.split(x, 2, dim=2)[0],
]


@given(
    st.lists(st.sampled_from(range(len(OPERATIONS))), min_size=1, max_size=3),
    st.integers(1, 3),
    st.sampled_from([None, (3, 2)]),
)
@settings(derandomize=True, max_examples=200)
def test_parts_keep_their_place_through_changes_of_shape(chosen: list[int], along: int, rows: Any) -> None:
    full = randn(sum(rows) if rows else 5, 4, 6, 4)
    sizes = SplitAxis(None, 0, 2).sizes(full.shape[along], (1.0, 1.0) if along == 1 else (2.0, 1.0))
    axes = [SplitAxis(None, rank, 2, rows is not None) for rank in (0, 1)]
    parts: list[Any] = [
        ShardedActivation(x, along, sizes, a, rows) for a, x in zip(axes, full.split(sizes, along), strict=True)
    ]
    batches = list(full.split(rows)) if rows else [full]
    for operation in (OPERATIONS[i] for i in chosen):
        try:
            after = [operation(batch) for batch in batches]
        except (RuntimeError, IndexError):
            return  # not an operation for tensors of this shape
        kept = [_stays(operation, part) for part in parts]
        assert kept[0] == kept[1]  # or one rank would wait for the other
        if not kept[0]:
            return
        batches, parts = after, [operation(part) for part in parts]
        for rank, part in enumerate(parts):
            assert tuple(part.shape) == tuple(batches[rank if rows else 0].shape)
        joined = torch.cat([part.local for part in parts], parts[0].along)
        torch.testing.assert_close(joined, torch.cat(batches) if rows else batches[0])


def _stays(operation: Callable[[Any], Any], part: ShardedActivation) -> bool:
    """Return True if the operation needs no gather."""
    probe = part.like(part.local)
    try:
        return isinstance(operation(probe), ShardedActivation) and not probe.has_whole
    except (RuntimeError, IndexError):
        return False  # with half of the whole, which is all that one process has, torch may complain
