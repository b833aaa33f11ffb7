"""``echelon verify``: scripts on real ranks against one process; what is the same, what is not, which layer it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from verifying import STEPS, recorded, verified

import echelon
from echelon import Strategy, pipeline, split, stage
from echelon.distributed.tensor_layout import Layout, Part
from echelon.plan import make_plan
from echelon.strategy.annotations.annotate import collect
from echelon.strategy.annotations.slices import Slices
from echelon.tools.verify.batches import concat_batches, describe, merge_replica_batches, read_batch, write_batch
from echelon.tools.verify.differences import (
    TensorDifference,
    gradient_differences,
    movement_differences,
    rounding,
    weight_differences,
)
from echelon.tools.verify.expected_differences import expected
from echelon.tools.verify.loop_events import put_together
from echelon.tools.verify.module_outputs import ModuleOutputSums, output_difference
from echelon.tools.verify.randomness import disable_dropout, measure_randomness
from echelon.tools.verify.replica_drift import find_drift, sums_of
from echelon.tools.verify.verdict import apply_float64_verdict, compare_runs
from echelon.tools.verify.verdict_text import as_json, conclusion, notes

# ---- scripts ----


def batches(shared: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's batches: one row more than on the rank before it, or the same for all."""
    number = 0 if shared else echelon.rank()
    made = torch.Generator().manual_seed(7 + number)
    rows = 6 + number
    return [(torch.randn(rows, 6, generator=made), torch.randint(3, (rows,), generator=made)) for _ in range(2 * STEPS)]


class Layers(nn.Module):
    """Its middle layer does what it is told; ``first`` is frozen."""

    def __init__(self, middle: nn.Module, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.middle, self.last = nn.Linear(6, 8), middle, nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(self.drop(self.norm(self.first(x))))))


def middle() -> nn.Module:
    torch.manual_seed(5)
    return nn.Linear(8, 8)


class ByRank(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 + 0.5 * echelon.rank())


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1.0 + 0.5 * echelon.rank())


class WrongBackward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Wrong.apply(x))  # type: ignore[no-untyped-call]


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, training=True)


class OwnLoss(nn.Module):
    """A dict in, a loss out; one weight at both ends, one parameter frozen, one never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.inner, self.head = nn.Embedding(11, 8), middle(), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.inner.bias.requires_grad_(False)
        self.idle = nn.Linear(2, 2)

    def forward(self, words: Tensor, scale: float) -> Tensor:
        logits = self.head(torch.relu(self.inner(self.embed(words)))) * scale
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def train(model: nn.Module, strategy: Strategy | None = None, loss: Any = F.cross_entropy, **given: Any) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0 / (1 + echelon.world_size()))
    engine = echelon.distribute(
        model, optimizer=optimizer, loss=loss, strategy=strategy, scheduler=schedule, log=echelon.Log(every=1), **given
    )
    for x, y in batches(shared=engine.plan.is_model_parallel):
        engine.step(x, y)


def with_batch_norm() -> None:
    """Uneven batches, passes merged, gradients clipped, a schedule that goes by the number of ranks."""
    train(Layers(middle(), norm=True), Strategy(gradient_merge=2, clip=0.05))


def sharded() -> None:
    train(Layers(middle()), Strategy(shard=3, lr_scaling="linear"))


def summed() -> None:
    train(Layers(middle()), Strategy(reduction=echelon.Reduction(op="sum")))


def split_up() -> None:
    train(echelon.annotate(Layers(middle()), {"first": split(), "middle": split(), "last": split()}))


def in_stages() -> None:
    """Micro-batches, and batch norm that sees them one by one."""
    marks = {"first": stage(0), "norm": stage(0), "middle": stage(1), "last": stage(1), "": pipeline(micro_batches=2)}
    train(echelon.annotate(Layers(middle(), norm=True), marks))


def own_loss() -> None:
    model = OwnLoss()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    engine = echelon.distribute(model, optimizer=optimizer, log=echelon.Log(console=False))
    made = torch.Generator().manual_seed(echelon.rank())
    for _ in range(STEPS):
        words = torch.randint(11, (5, 4 + echelon.rank()), generator=made)  # rows that do not fit into one batch
        engine.step({"words": words, "scale": 0.5}, samples=words.shape[0] * (words.shape[1] - 1))


def by_rank() -> None:
    train(Layers(ByRank(8, 8)))


def backward_by_rank() -> None:
    train(Layers(WrongBackward(8, 8)))


class LateByRank(nn.Linear):
    """A layer that is right in the first step, which is checked twice."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training and torch.is_grad_enabled()
        return super().forward(x) * (1.0 + 0.01 * echelon.rank() * (self.calls > 2))


def late_by_rank() -> None:
    train(Layers(LateByRank(8, 8)))


def loss_is_a_sum() -> None:
    model = Layers(middle())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    averaged = Strategy(reduction=echelon.Reduction(op="mean"))  # which a sum is not by itself
    engine = echelon.distribute(
        model, optimizer=optimizer, loss=lambda out, y: F.cross_entropy(out, y, reduction="sum"), strategy=averaged
    )
    for _ in range(STEPS):
        engine.step(torch.ones(4, 6), torch.ones(4, dtype=torch.long))


def noisy() -> None:
    train(Layers(Noisy(8, 8)))


class SmallSteps(torch.optim.SGD):
    """Far below the tolerance of weights, and other ones: on each rank, or for each number of them."""

    by_rank = True

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = 1e-4 * (1 + (echelon.rank() if self.by_rank else echelon.world_size()))
        return super().step(closure)


class SmallStepsByNumber(SmallSteps):
    by_rank = False


def small_steps(kind: type[SmallSteps] = SmallSteps) -> None:
    model = Layers(middle())
    engine = echelon.distribute(model, optimizer=kind(model.parameters(), lr=1.0), loss=F.cross_entropy)
    for x, y in batches():
        engine.step(x, y)


def small_steps_by_number() -> None:
    small_steps(SmallStepsByNumber)


def own_statistics() -> None:
    train(Layers(middle(), norm=True), Strategy(sync_batch_norm=False))


def sixteen_bits() -> None:
    train(Layers(middle()), Strategy(fp16_allreduce="bf16"))


def alone_now_and_then() -> None:
    train(Layers(middle()), Strategy(localsgd=True))


def alone_and_by_rank() -> None:
    train(Layers(ByRank(8, 8)), Strategy(localsgd=True))


class Nets(nn.Module):
    """Two that train against each other; ``judged`` is a layer of the judge's."""

    def __init__(self, judged: nn.Module, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        inner = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.generator = nn.Sequential(nn.Linear(4, 8), inner, nn.Tanh(), nn.Linear(8, 6))
        self.judge = nn.Sequential(nn.Linear(6, 8), judged, nn.LeakyReLU(0.2), nn.Linear(8, 1))


def adversaries(
    judged: nn.Module, strategy: Strategy | None = None, *, samples: bool = True, noise: float = 0, penalty: bool = True
) -> None:
    """Batches of a loader, noise of the script's own, a penalty on gradients, several passes for an update, two
    optimizers. Without a strategy the last batch is uneven, and there is no batch norm."""
    nets = Nets(judged, norm=strategy is not None)
    optimizers = {
        "judge": torch.optim.Adam(nets.judge.parameters(), lr=0.01),
        "generator": torch.optim.SGD(nets.generator.parameters(), lr=0.1 * echelon.world_size(), momentum=0.9),
    }
    engine = echelon.distribute(nets, optimizer=optimizers, strategy=strategy, log=echelon.Log(console=False))
    data = torch.randn(12 if strategy else 9, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        for real in engine.loader(data, batch_size=3, uneven="join"):
            count = len(real) if samples else 1.0  # without it the loss itself tells
            fake = nets.generator(torch.randn(len(real), 4))
            engine.backward(F.softplus(-nets.judge(F.dropout(real, noise))).mean())
            if penalty:
                others = fake.detach()[torch.randperm(len(real))]  # of the rank's own rows
                mixed = torch.lerp(real, others, torch.rand(len(real), 1)).requires_grad_()
                [slope] = torch.autograd.grad(nets.judge(mixed).sum(), mixed, create_graph=True)
                engine.backward(slope.square().sum(1).mean())
            engine.backward(F.softplus(nets.judge(fake.detach())).mean())
            engine.update("judge", samples=count)
            if strategy is not None and strategy.shard:  # all weights are handed round after an update
                fake = nets.generator(torch.randn(len(real), 4))
            engine.backward(F.softplus(-nets.judge(fake)).mean())
            engine.update("generator", samples=count)


def own_loop() -> None:
    adversaries(middle())


def own_loop_sharded() -> None:
    adversaries(middle(), Strategy(shard=1, clip=0.5))


def own_loop_summed() -> None:
    """One optimizer, and data that the loop draws for itself, without a loader."""
    model = Layers(middle())
    summed = Strategy(reduction=echelon.Reduction(op="sum"))
    engine = echelon.distribute(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), strategy=summed)
    for _ in range(STEPS):
        engine.backward(F.mse_loss(model(torch.randn(5, 6)), torch.rand(5, 3)))
        engine.update()


def own_loop_by_rank() -> None:
    adversaries(ByRank(8, 8))


def own_loop_backward_by_rank() -> None:
    adversaries(WrongBackward(8, 8), penalty=False)


def own_loop_uneven() -> None:
    adversaries(middle(), samples=False)


def own_loop_with_dropout() -> None:
    adversaries(middle(), noise=0.5)


def step_and_loop() -> None:
    model = Layers(middle())
    engine = echelon.distribute(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy)
    for x, y in batches():
        engine.step(x, y)
        engine.backward(model(x).mean())


def two_models() -> None:
    for _ in range(2):
        model = Layers(middle())
        echelon.distribute(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy)


def on_servers() -> None:
    train(Layers(middle()), Strategy(ps="async"))


def strange_batch() -> None:
    model = Layers(middle())
    engine = echelon.distribute(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda out, batch: out.sum()
    )
    engine.step({"x": torch.ones(2, 6), "note": object()})


# ---- the same ----


@pytest.mark.parametrize(
    "body", [with_batch_norm, sharded, summed, split_up, in_stages, own_loss], ids=lambda f: f.__name__
)
def test_exact_plans_are_the_same(body: Callable[[], None], tmp_path: Path) -> None:
    verdict = verified(body, tmp_path)
    assert verdict.status == "same", conclusion(verdict)
    assert len(verdict.rows) == STEPS
    assert verdict.rows[0].loss != verdict.rows[1].loss
    for row in verdict.rows:
        assert row.loss == pytest.approx(row.reference, rel=2e-6)
        assert row.gradient is not None
        assert row.weight is not None
        assert max(row.gradient.relative, row.weight.relative) < 2e-5
    assert not verdict.alike
    if body is not own_loss:
        assert verdict.silenced == ("drop",)
        assert verdict.compared[0] >= 2  # outputs of some layers, too, whatever the plan
        assert "lr of group 0" in verdict.options  # which the ranks' own was taken for
    assert not verdict.unrest


# ---- loops of their own ----


@pytest.mark.parametrize("body", [own_loop, own_loop_sharded, own_loop_summed], ids=lambda f: f.__name__)
def test_loops_of_their_own_are_the_same(body: Callable[[], None], tmp_path: Path) -> None:
    steps = STEPS if body is own_loop_summed else 6  # through the uneven batch, and into the second epoch
    verdict = verified(body, tmp_path, steps)
    assert verdict.status == "same", conclusion(verdict)
    if body is not own_loop_summed:
        assert [row.optimizer for row in verdict.rows] == ["judge", "generator"] * 3
        assert "lr of group" in verdict.options
    for row in verdict.rows:
        assert row.loss == pytest.approx(row.reference, rel=2e-6)
        assert row.gradient is not None
        assert row.weight is not None
        assert row.gradient.relative < 2e-5
        assert row.gradient.name.startswith(row.optimizer), "what the other optimizer steps is not reduced"
    assert verdict.compared[0] >= 4
    assert not verdict.stray


def test_in_a_loop_of_its_own_the_layer_is_named_too(tmp_path: Path) -> None:
    parting = verified(own_loop_by_rank, tmp_path / "forward").parting
    assert parting is not None
    assert (parting.what, parting.where, parting.kind, parting.step) == ("outputs", "judge.1", "ByRank", 1)
    parting = verified(own_loop_backward_by_rank, tmp_path / "backward").parting
    assert parting is not None
    assert (parting.what, parting.step) == ("gradients", 1)
    assert parting.where in ("judge.0.weight", "judge.0.bias")


def test_uneven_batches_that_count_alike_are_told(tmp_path: Path) -> None:
    verdict = verified(own_loop_uneven, tmp_path, 6)
    assert verdict.parting is not None
    assert (verdict.parting.what, verdict.parting.step) == ("loss", 3)
    assert "give engine.update(samples=len(x))" in conclusion(verdict)


def test_random_numbers_that_cannot_be_followed_are_named(tmp_path: Path) -> None:
    verdict = verified(own_loop_with_dropout, tmp_path)
    assert verdict.status == "differs"
    assert verdict.stray == ("dropout",)
    assert any("random numbers are in play that each rank draws for itself: dropout" in line for line in notes(verdict))


# ---- not the same ----


def test_the_first_layer_that_computes_something_else_is_named(tmp_path: Path) -> None:
    verdict = verified(by_rank, tmp_path)
    assert verdict.status == "differs"
    assert verdict.parting is not None
    assert (verdict.parting.what, verdict.parting.where, verdict.parting.step) == ("outputs", "middle", 1)
    assert "the first layer that computes something else is 'middle' (ByRank)" in conclusion(verdict)


def test_wrong_backward_is_named_by_the_layer_next_to_it(tmp_path: Path) -> None:
    """All before it receive what it passes on: ``first`` alone, whose output is where gradients part."""
    verdict = verified(backward_by_rank, tmp_path)
    assert verdict.parting is not None
    assert (verdict.parting.what, verdict.parting.step) == ("gradients", 1)
    assert verdict.parting.where in ("first.weight", "first.bias")


def test_small_updates_that_are_other_ones_are_seen(tmp_path: Path) -> None:
    drifted_apart = verified(small_steps, tmp_path / "drift")
    assert drifted_apart.parting is not None
    assert (drifted_apart.parting.what, drifted_apart.parting.step) == ("replicas", 1)
    assert "rank 1 has other values there than rank 0" in conclusion(drifted_apart)
    elsewhere = verified(small_steps_by_number, tmp_path / "moves")
    assert elsewhere.parting is not None
    assert (elsewhere.parting.what, elsewhere.parting.where, elsewhere.parting.step) == ("moves", "first.weight", 1)
    assert elsewhere.parting.difference == pytest.approx(1 / 3, rel=0.01)
    assert "'first.weight' (Linear) is apart by 33" in conclusion(elsewhere)
    for verdict in (drifted_apart, elsewhere):
        assert verdict.rows[0].weight is not None
        assert verdict.rows[0].weight.relative < 5e-4, "which is why they were not"


def test_a_loss_that_is_a_sum_is_told_from_layers_that_differ(tmp_path: Path) -> None:
    verdict = verified(loss_is_a_sum, tmp_path)
    assert verdict.parting is not None
    assert (verdict.parting.what, verdict.parting.step) == ("loss", 1)
    assert verdict.rows[0].reference == pytest.approx(2 * verdict.rows[0].loss, rel=1e-5)
    assert "a sum, not a mean?" in conclusion(verdict)
    assert any(line.startswith("all replicas were given the same samples in every step") for line in notes(verdict))


def test_random_numbers_are_noticed(tmp_path: Path) -> None:
    verdict = verified(noisy, tmp_path)
    assert verdict.status == "differs"
    assert verdict.unrest > 1e-3
    assert any("random numbers are in play" in line for line in notes(verdict))


def test_a_fault_is_as_large_in_64_bits_and_rounding_is_not(tmp_path: Path) -> None:
    narrow = verified(late_by_rank, tmp_path / "narrow", steps=4)
    assert narrow.parting is not None
    assert narrow.parting.step > 1
    wide = verified(late_by_rank, tmp_path / "wide", steps=4, wide=True)
    assert (wide.status, wide.parting and wide.parting.step) == ("differs", narrow.parting.step)
    assert apply_float64_verdict(narrow, wide) is narrow
    right = verified(in_stages, tmp_path / "right", wide=True)
    assert right.status == "same"
    assert all(row.difference < 1e-14 and row.gradient and row.gradient.relative < 1e-12 for row in right.rows)
    cleared = apply_float64_verdict(narrow, right)
    assert cleared.status == "same"
    assert conclusion(cleared).startswith("same but for rounding: in 64 bits 4 steps on 2 processes give what one")


# ---- what is expected ----


@pytest.mark.parametrize(
    ("body", "setting"), [(own_statistics, "sync_batch_norm=False"), (sixteen_bits, "fp16_allreduce='bf16'")]
)
def test_inexact_strategies_differ_as_expected(body: Callable[[], None], setting: str, tmp_path: Path) -> None:
    verdict = verified(body, tmp_path)
    assert [one.setting for one in verdict.expected] == [setting]
    assert verdict.status == "expected", conclusion(verdict)
    assert setting in conclusion(verdict)


def test_a_strategy_does_not_excuse_a_layer(tmp_path: Path) -> None:
    """If replicas step alone, their first forward is still that of one process."""
    right = verified(alone_now_and_then, tmp_path / "right")
    assert right.status == "expected"
    assert right.rows[-1].weight is not None
    assert right.rows[-1].weight.relative > 1e-3  # what is so, and not only what rounding leaves
    verdict = verified(alone_and_by_rank, tmp_path / "wrong")
    assert verdict.status == "differs"
    assert verdict.parting is not None
    assert verdict.parting.where == "middle"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (step_and_loop, "trains by engine.step() and by engine.backward()"),
        (two_models, "distribute() more than once"),
        (on_servers, "parameter servers are not followed"),
        (strange_batch, "the batch holds a object"),
    ],
)
def test_what_cannot_be_verified_is_one_line(body: Callable[[], None], says: str, tmp_path: Path) -> None:
    refused = recorded(body, tmp_path).noted("refused")
    assert refused is not None
    assert says in refused
    assert "\n" not in refused


@pytest.mark.parametrize(
    ("strategy", "steps", "settings"),
    [
        (Strategy(), 5, []),
        (Strategy(shard=3, gradient_merge=4, clip=1.0, lr_scaling=True), 5, []),
        (Strategy(amp="bf16"), 5, ["amp='bf16'"]),
        (Strategy(dgc=echelon.Dgc(rampup_begin_step=5)), 5, []),  # dense before that
        (Strategy(dgc=echelon.Dgc(rampup_begin_step=5)), 6, ["dgc"]),
        (Strategy(adaptive_localsgd=True), 5, ["adaptive_localsgd", "sync_batch_norm=False"]),
    ],
)
def test_expectations_are_read_from_the_plan(strategy: Strategy, steps: int, settings: list[str]) -> None:
    model = Layers(middle(), norm=True)
    optimizers = {"main": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}
    plan = make_plan(model, optimizers, strategy, 2, 2, collect(model), Slices())
    assert [one.setting for one in expected(plan, model, steps)] == settings


# ---- parts ----


def test_batches_come_back_as_they_were(tmp_path: Path) -> None:
    batch = {
        "x": torch.randn(3, 4),
        "pair": (torch.arange(3), [torch.ones(2, dtype=torch.bool), None]),
        "n": 5,
        "s": "a",
    }
    write_batch(tmp_path / "b", batch)
    back = read_batch(tmp_path / "b")
    (structure, tensors), (again, found) = describe(batch), describe(back)
    assert structure == again
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, found, strict=True))


def test_a_global_batch_is_the_rows_of_all_in_order() -> None:
    a, b, side = torch.randn(3, 2), torch.randn(5, 2), torch.ones(7)
    whole = concat_batches([{"x": a, "side": side}, {"x": b, "side": side}])
    assert torch.equal(whole["x"], torch.cat([a, b]))
    assert torch.equal(whole["side"], side)
    assert concat_batches([(a,), (torch.randn(3, 4),)]) is None  # longer rows
    assert concat_batches([{"x": a, "side": side}, {"x": b, "side": 2 * side}]) is None


def test_texts_of_rows_are_joined_as_rows_are() -> None:
    """Else batch norm would see the replicas' batches one by one, and be blamed for it."""
    a, b = torch.randn(2, 3), torch.randn(3, 3)
    whole = concat_batches(
        [{"x": a, "files": ["a", "b"], "size": (3, 3)}, {"x": b, "files": ["c", "d", "e"], "size": (3, 3)}]
    )
    assert (whole["files"], whole["size"]) == (["a", "b", "c", "d", "e"], (3, 3))
    whole = concat_batches([(a, ("a", "a"), None), (a, ("a", "a"), None)])
    assert whole[1:] == (("a", "a", "a", "a"), None)
    assert torch.equal(whole[0], torch.cat([a, a]))
    assert concat_batches([(a, ["a"]), (b, ["c", "d"])]) is None
    assert concat_batches([{"seed": 1}, {"seed": 2}]) is None  # nothing has rows


def test_draws_of_the_ranks_are_put_together_as_their_rows_are() -> None:
    first, second, own = torch.tensor([1, 0]), torch.tensor([2, 0, 1]), torch.arange(5)
    together_ = put_together([first, second], own, [2, 3], order=True)
    assert together_ is not None
    assert together_.tolist() == [1, 0, 4, 2, 3]  # rows of the second rank are taken from its own
    noise = torch.randn(4)
    assert put_together([noise, noise], noise, [4, 4]) is noise  # one for each feature, drawn alike everywhere
    assert put_together([noise, -noise], noise, [3, 3]) is None


def test_weights_of_pieces_add_up_to_the_mean_over_all() -> None:
    rows = [torch.randn(n, 2) for n in (4, 3)]
    batches = [(value,) for value in rows]
    mean = torch.cat(rows).mean()
    for pieces in (
        merge_replica_batches(batches, [4, 3], apart=False).pieces,
        merge_replica_batches(batches, [4, 3], apart=False, micro=2).pieces,
        merge_replica_batches([(rows[0],), (rows[1].T.T, None)], [4, 3], apart=False).pieces,
    ):
        assert math.isclose(sum(float(piece.batch[0].mean()) * piece.weight for piece in pieces), mean, rel_tol=1e-5)
    apart = merge_replica_batches(batches, [4, 3], apart=True).pieces
    assert [piece.weight for piece in apart] == [1.0, 1.0]


def test_differences_are_measured_by_the_scale_of_each_tensor() -> None:
    one = {"a": torch.tensor([4.0, -2.0]), "tiny": torch.tensor([1e-9]), "lost": torch.ones(1)}
    other = {"a": torch.tensor([4.0, -2.2]), "tiny": torch.tensor([-1e-9])}
    found = gradient_differences(other, one)
    assert found["a"] == pytest.approx((0.2, 0.05))
    assert found["tiny"].relative == pytest.approx(2e-9 / 0.4)  # a tenth of the largest of all
    assert found["lost"] == TensorDifference(math.inf, math.inf)
    assert gradient_differences({"a": torch.tensor([math.nan])}, {"a": torch.ones(1)})["a"].relative == math.inf


def test_weights_leave_out_what_only_rounding_has_moved() -> None:
    gradients = {"w": torch.tensor([1.0, 1e-9])}, {"w": torch.tensor([1.0 + 1e-6, -1e-9])}
    entries = rounding(*gradients)
    assert entries["w"].tolist() == [False, True]
    weights = {"w": torch.tensor([1.0, 0.3])}, {"w": torch.tensor([1.0, 0.1])}
    assert weight_differences(*weights)["w"].relative > 0.1
    assert weight_differences(*weights, entries)["w"] == (0.0, 0.0)


def test_movement_is_measured_by_what_training_has_changed() -> None:
    start, step = torch.randn(50), 1e-5 * torch.randn(50)
    initial, reference = {"w": start}, {"w": start + step}
    assert movement_differences({"w": start + 2 * step}, reference, initial, {}, 1)["w"] == pytest.approx(0.5, rel=0.05)
    assert movement_differences({"w": start}, {"w": start}, initial, {}, 1) == {"w": 0.0}
    nudged = torch.nextafter(start + step, torch.tensor(9.0))  # rounded otherwise
    assert movement_differences({"w": nudged}, reference, initial, {}, 1) == {"w": 0.0}
    everything = {"w": torch.ones(50, dtype=torch.bool)}
    assert movement_differences({"w": start + 2 * step}, reference, initial, everything, 1) == {"w": 0.0}


def test_ranks_are_compared_where_they_hold_the_same() -> None:
    rows = [Part(torch.randn(2, 3), Layout((4, 3), {0: ((begin, begin + 2),)})) for begin in (0, 2)]
    whole, last = torch.randn(5), torch.randn(4)
    held = [[sums_of("w", rows[rank]), sums_of("b", whole)] for rank in range(2)]
    assert find_drift(held, 1) is None
    held.append([sums_of("b", torch.nextafter(whole, torch.tensor(9.0))), sums_of("c", last)])
    assert find_drift(held, 1) is None
    held.append([sums_of("b", whole), sums_of("c", last * (1 + 1e-5))])
    found = find_drift(held, 1)
    assert found is not None
    assert (found[0], found[2:]) == ("c", [2, 3])
    assert found[1] == pytest.approx(2e-5, rel=0.02)


def test_output_sums_add_up_over_samples_or_are_not_compared() -> None:
    """Output sums add up over the samples, and are not compared where the samples are not the same number."""
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(6, 4)

    def heard(*pieces: Tensor) -> dict[str, Any]:
        outputs = ModuleOutputSums(model)
        with outputs.listening():
            for piece in pieces:
                model(piece)
        return outputs.found()

    whole, parts, fewer = heard(x), heard(x[:2], x[2:]), heard(x[:3])
    assert list(whole) == ["0", "1", ""]
    assert all(output_difference(parts[name], whole[name]) == pytest.approx(0.0, abs=1e-9) for name in whole)
    assert all(output_difference(fewer[name], whole[name]) is None for name in whole)
    count, linear, squares = whole["0"]
    put_out = model[0](x).detach()
    assert (count, linear) == (18, pytest.approx(float(put_out.sum()), rel=1e-5))
    assert squares == pytest.approx(float(put_out.square().sum()), rel=1e-5)
    assert not model[0]._forward_hooks


def test_dropout_is_switched_off_wherever_it_is() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3), nn.Dropout(0.2), nn.Linear(8, 8))
    x = torch.randn(3, 2, 8)
    assert measure_randomness(lambda: model(x).mean(), model, x.device) > 0
    assert set(disable_dropout(model)) == {"0.self_attn", "0.dropout", "0.dropout1", "0.dropout2", "1"}
    assert measure_randomness(lambda: model(x).mean(), model, x.device) == 0
    assert torch.equal(model.train()(x), model.eval()(x)) or torch.allclose(
        model.train()(x), model.eval()(x), atol=1e-6
    )


def test_statistics_that_go_on_are_no_random_numbers() -> None:
    """Spectral norm, a buffer that counts, a forward that takes gradients itself."""

    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + 1
            x = x.detach().requires_grad_()
            [slope] = torch.autograd.grad((x**3).sum(), x, create_graph=True)
            return slope * self.seen

    model, x = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), Slope()), torch.randn(3, 4)
    model(x)
    assert measure_randomness(lambda: model(x).mean(), model, x.device) == 0
    assert float(model[1].seen) == 1


def test_a_tolerance_that_is_given_judges_everything() -> None:
    step = {"loss": 1.0, "gradients": {"w": [1e-3, 2e-3]}, "weights": {"w": [0.0, 0.0]}, "moves": {}}
    plan = {
        "steps": [{"loss": 1.0}], "outputs": {}, "silenced": [], "ranks": 2, "replicas": 2, "mesh": {"replicate": 2},
        "apart": False, "micro": 1,
        "expected": [{"setting": "x", "says": "y", "outputs": 1e-4, "loss": 0.1, "gradients": 0.1, "weights": 0.1}],
    }  # fmt: skip
    reference = {
        "steps": [step], "outputs": [], "kinds": {}, "unrest": 0.0, "rounding": [], "options": "", "passes": 1
    }  # fmt: skip
    assert compare_runs(plan, reference).status == "expected"
    assert compare_runs({**plan, "expected": []}, reference).status == "differs"
    assert compare_runs(plan, reference, 1e-5).status == "differs"
    assert compare_runs(plan, reference, 1e-3).status == "same"
    nan = {"outputs": {"a": [1.0, math.nan, math.nan]}}
    broken = compare_runs({**plan, **nan, "expected": []}, {**reference, "outputs": [["a", [1.0, 1.0, 1.0]]]})
    assert broken.parting is not None
    assert (broken.parting.what, broken.parting.where) == ("outputs", "a")
    assert '"relative": 0.002' in as_json(compare_runs(plan, reference))
