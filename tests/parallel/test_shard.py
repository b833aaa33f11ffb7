"""Sharding over replicas: the numbers of one process at every level, in a part of the memory."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from harness import run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import echelon
from echelon.distributed.tensor_layout import Layout
from echelon.parallel.activation_checkpoint import apply_recompute
from echelon.parallel.data.sync_batch_norm import synchronize
from echelon.parallel.zero import Shards
from echelon.parallel.zero.row_partition import cut_all
from echelon.parallel.zero.wrap_policy import find_units
from echelon.plan.batch_norms import batch_norm_names
from echelon.plan.segments import find_segments

# ---- a small training loop of its own: one process without Shards, or any number with them ----


@dataclass
class Job:
    """A training task. Without a level: as in one process."""

    model: str = "transformer"
    level: int = 0
    optimizer: str = "adamw"
    steps: int = 6
    merge: int = 1
    shares: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)  # of Shards
    recompute: str = ""  # is applied "before" or "after" the model is sharded
    autocast: bool = False
    evaluate: bool = False
    schedule: bool = False
    buckets: int = 3
    divided: bool = True  # or the whole batch on every rank


@dataclass
class Trained:
    weights: dict[str, Tensor]
    losses: list[float]
    evaluations: list[float]
    ungraded: set[str]  # shards without a gradient after the last step
    begun: dict[str, int]
    memory: dict[str, int]


def train(job: Job) -> Trained:
    echelon.init()
    return train_here(job)


def train_many(jobs: list[Job]) -> list[Trained]:
    echelon.init()
    return [train_here(job) for job in jobs]


def train_here(job: Job) -> Trained:
    model, loss_function = build(job.model)
    optimizer = make_optimizer(job.optimizer, model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if job.schedule else None
    if echelon.world_size() > 1:
        synchronize(model, batch_norm_names(model), dist.new_group())
    if job.recompute == "before":
        recompute(model)
    shards = shard(model, optimizer, job) if job.level else None
    if job.recompute == "after":
        recompute(model)
    losses, evaluations = [], []
    for step in range(job.steps):
        losses.append(train_step(model, loss_function, optimizer, shards, job, step))
        if schedule is not None:
            schedule.step()
        if job.evaluate:
            evaluations.append(evaluate(model, loss_function, job))
    return report(model, shards, losses, evaluations)


def train_step(
    model: nn.Module, loss_function: Any, optimizer: Any, shards: Shards | None, job: Job, step: int
) -> float:
    optimizer.zero_grad()
    total = 0.0
    for merged in range(job.merge):
        batch, share = mine(zoo.batch_for(job.model, 12, step * job.merge + merged), job)
        armed = shards is not None and (job.level > 1 or merged == job.merge - 1)
        if armed:
            shards.reducer("main").arm()
        with torch.autocast("cpu", torch.bfloat16, enabled=job.autocast):
            loss = loss_function(model(*batch[:-1]), batch[-1]) * (share / job.merge)
        loss.backward()
        if armed:
            shards.reducer("main").finish()
        total += float(loss.detach())
    optimizer.step()
    if shards is not None:
        assert all(p.grad is None for p in model.parameters())
        shards.after_step(["main"])
    return total


def mine(batch: tuple[Tensor, ...], job: Job) -> tuple[tuple[Tensor, ...], float]:
    """This rank's part of the batch, and what part of it that is."""
    if not job.divided:
        return batch, 1.0
    world, rank = echelon.world_size(), echelon.rank()
    shares = job.shares if job.shares and world > 1 else (len(batch[0]) // world,) * world
    begin = sum(shares[:rank])
    return tuple(part[begin : begin + shares[rank]] for part in batch), shares[rank] / len(batch[0])


def evaluate(model: nn.Module, loss_function: Any, job: Job) -> float:
    model.eval()
    *inputs, target = zoo.batch_for(job.model, 4, 99)
    with torch.no_grad():
        loss = float(loss_function(model(*inputs), target))
    with torch.inference_mode():
        assert float(loss_function(model(*inputs), target)) == loss
    model.train()
    return loss


def report(model: nn.Module, shards: Shards | None, losses: list[float], evaluations: list[float]) -> Trained:
    held = {} if shards is None else shards.memory()
    ungraded = {name for name, s in shards.shards.items() if s.grad is None} if shards else set()
    begun = dict(shards.exchange.begun) if shards else {}
    with shards.gathered() if shards else contextlib.nullcontext():
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    return Trained(weights, losses, evaluations, ungraded, begun, held)


def shard(model: nn.Module, optimizer: Any, job: Job) -> Shards:
    parameters = dict(model.named_parameters())
    layouts = {name: Layout(tuple(p.shape)) for name, p in parameters.items()}
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [name for name, p in reversed(parameters.items()) if p.requires_grad and id(p) in owned]
    size = -(-len(trained) // job.buckets)
    buckets = [tuple(trained[at : at + size]) for at in range(0, len(trained), size)]
    group = dist.new_group() if echelon.world_size() > 1 else None
    return Shards(
        model,
        parameters,
        layouts,
        {"main": optimizer},
        group,
        {"main": buckets},
        job.level,
        **{"small": 0, **job.options},
    )


def recompute(model: nn.Module) -> None:
    apply_recompute(model, find_segments(model, "auto"), (), offload=False, group=None)


EPS = 1e-3  # a gradient that is 0 but for rounding (the bias before a batch norm) must not count as one that is 1


def make_optimizer(kind: str, model: nn.Module) -> Any:
    if kind == "sgd":
        return zoo.sgd(model)
    if kind == "groups":
        named = list(model.named_parameters())
        return torch.optim.AdamW(
            [
                {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.2},
                {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
            ],
            lr=0.01,
            eps=EPS,
        )
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=EPS)


def build(name: str) -> tuple[nn.Module, Any]:
    if name in MODELS:
        torch.manual_seed(7)
        return MODELS[name](), F.cross_entropy
    return zoo.build(name)


# ---- models, each with something that sharding easily gets wrong ----


class Odd(nn.Module):
    """Weights used past their module, in a list, without dimensions, with one row, twice, in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.offset = nn.Parameter(torch.randn(1, 6))
        self.several = nn.ParameterList([torch.randn(6, 6) * 0.3, torch.randn(6)])
        self.twice = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.borrowed = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.twice(self.twice(x + self.offset) * self.scale)
        h = F.linear(h, self.several[0].t(), self.several[1]) + F.linear(x, self.borrowed.weight.t())
        h = self.attention(h[:, None], h[:, None], h[:, None])[0][:, 0] + self.borrowed(h)
        return self.last(h)


class Mixed(nn.Module):
    """Two dtypes in one unit, and a channels-last convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(6, 9).to(torch.float64)
        self.conv = nn.Conv2d(2, 5, 2).to(memory_format=torch.channels_last)
        self.head = nn.Linear(9, 3)
        self.both = nn.Sequential(self.head)

    def forward(self, x: Tensor) -> Tensor:
        h = self.narrow(x.double()).float()
        images = x[:, :4].reshape(-1, 1, 2, 2).expand(-1, 2, -1, -1)
        return self.both(h + self.conv(images).mean((1, 2, 3), keepdim=True)[:, 0, 0])


class Adapted(nn.Module):
    """Pre-norm blocks of which only ``q`` is trained, as LoRA does: frozen weights are needed behind the last gradient.

    ``checkpointed``: blocks recompute themselves, as those of transformers do.
    """

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(AdaptedBlock() for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.checkpointed = checkpointed
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(".q." in name)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


class AdaptedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rnn = nn.LayerNorm(6), nn.GRU(6, 6, batch_first=True)
        self.q, self.o = nn.Linear(6, 6), nn.Linear(6, 6)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.rnn(F.linear(self.norm(x), self.o.weight)[:, None])[0][:, 0]
        x = x + self.o(torch.tanh(self.q(h)))
        return x + self.down(F.gelu(self.up(x)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "odd": Odd,
    "mixed": Mixed,
    "adapted": Adapted,
    "adapted, checkpointed": functools.partial(Adapted, checkpointed=True),
}


# ---- the law ----


def same(job: Job, ranks: int, atol: float = 1e-5) -> list[Trained]:
    return all_same([job], ranks, atol)[0]


def all_same(jobs: list[Job], ranks: int, atol: float = 1e-5) -> list[list[Trained]]:
    """Every job on ``ranks`` ranks and in one process: losses, weights and evaluations are the same."""
    per_rank = run(train_many, jobs, ranks=ranks)
    plain = {}
    for job in jobs:
        alone = replace(job, level=0)
        key = str(alone)
        plain[key] = plain.get(key) or train_here(alone)
        together = [trained[jobs.index(job)] for trained in per_rank]
        for trained in together:
            for name, value in plain[key].weights.items():
                torch.testing.assert_close(trained.weights[name], value, rtol=0, atol=atol, msg=told(job, name))
            torch.testing.assert_close(trained.evaluations, plain[key].evaluations, rtol=0, atol=10 * atol)
        summed = [sum(losses) for losses in zip(*(trained.losses for trained in together), strict=True)]
        torch.testing.assert_close(summed, plain[key].losses, rtol=0, atol=10 * atol)
    return [list(trained) for trained in zip(*per_rank, strict=True)]


def told(job: Job, name: str) -> Callable[[str], str]:
    return lambda difference: f"{name} of {job}: {difference}"


def test_every_level_gives_the_numbers_of_one_process() -> None:
    models, optimizers = ("convnet", "transformer", "partial", "odd", "mixed"), ("sgd", "adamw")
    all_same([Job(*chosen) for chosen in itertools.product(models, (1, 2, 3), optimizers)], ranks=2)


def test_shard_uneven_merged_groups_schedule_eval_match() -> None:
    """Uneven shares, merged passes, parameter groups, schedules and evaluation together give the same numbers."""
    jobs = [
        Job(model, level, "groups", merge=2, shares=(5, 4, 3), schedule=True, evaluate=True)
        for model in ("transformer", "odd")
        for level in (1, 2, 3)
    ]
    all_same(jobs, ranks=3)


def test_recomputed_blocks_applied_before_or_after_sharding() -> None:
    all_same(
        [Job("transformer", level, recompute=when, merge=2) for when in ("before", "after") for level in (2, 3)],
        ranks=2,
    )


def test_shard_recompute_frozen_weights_equals_one_process() -> None:
    """A block's last gradient is made before backward has gone through its frozen norm."""
    jobs = [Job("adapted", level, recompute=when) for when in ("", "before", "after") for level in (1, 2, 3)]
    jobs += [Job("adapted, checkpointed", level) for level in (1, 2, 3)]
    all_same(jobs, ranks=2)


def test_shard_autocast_same_bits_at_every_level_no_copies() -> None:
    jobs = [Job("transformer", level, "sgd", autocast=True, steps=5) for level in (1, 2, 3)]
    jobs.append(Job("transformer", 3, "sgd", autocast=True, steps=5, recompute="before"))
    first, *others = all_same(jobs, ranks=2, atol=5e-3)
    for other in others:
        for name, value in first[0].weights.items():
            assert torch.equal(value, other[0].weights[name]), name


def test_shard_layer_used_by_some_ranks_no_hang_unused_unchanged() -> None:
    """With shares so uneven, the rank with one sample often runs without 'sometimes'."""
    jobs = [Job("partial", level, "adamw", shares=(10, 1, 1), steps=8, buckets=5) for level in (1, 2, 3)]
    alone = [not bool((zoo.batch_for("partial", 12, step)[0][11:, 0] > 0).any()) for step in range(8)]
    assert any(alone)
    assert not all(alone)
    for trained in itertools.chain.from_iterable(all_same(jobs, ranks=3)):
        idle = {"unused.weight", "unused.bias"}
        assert idle <= trained.ungraded <= idle | {"frozen.weight", "frozen.bias"}


def test_host_offload_on_a_cpu_changes_nothing() -> None:
    jobs = [Job("transformer", level, options={"offload": where}) for level, where in OFFLOADS]
    plain = [Job("transformer", level) for level, _ in OFFLOADS]
    results = all_same(jobs + plain, ranks=2)
    for moved, kept in zip(results[: len(jobs)], results[len(jobs) :], strict=True):
        assert all(torch.equal(value, kept[0].weights[name]) for name, value in moved[0].weights.items())


OFFLOADS = [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "parameters")]


def test_one_rank_alone_trains_as_well() -> None:
    """Without a group there is no rank to share with; only the place of the state remains."""
    for level in (1, 2, 3):
        assert_same_weights(train_here(Job("odd", level)), train_here(Job("odd")))


def assert_same_weights(one: Trained, other: Trained, atol: float = 1e-6) -> None:
    for name, value in other.weights.items():
        torch.testing.assert_close(one.weights[name], value, rtol=0, atol=atol)


# ---- what it costs ----


class Deep(nn.Module):
    """Eight blocks of 256 KB."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 256)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8))
        self.head = nn.Linear(256, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


MODELS["deep"] = Deep


def all_bytes() -> int:
    """Return the bytes of all tensors in this process."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
        tensors = [tensor for tensor in tensors if tensor.layout is torch.strided]
    tensors = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]  # which has no memory
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def measure(level: int) -> dict[str, Any]:
    before = all_bytes()
    model, loss_function = build("deep")
    optimizer = make_optimizer("adamw", model)
    shards = shard(model, optimizer, Job("deep", level, buckets=10))
    for step in range(3):
        begun = dict(shards.exchange.begun)
        train_step(model, loss_function, optimizer, shards, Job("partial", level), step)
    counted = {kind: number - begun.get(kind, 0) for kind, number in shards.exchange.begun.items()}
    return {**shards.memory(), "all": all_bytes() - before, "counted": counted}


def measure_levels() -> list[dict[str, Any]]:
    echelon.init()
    measured = [measure(level) for level in (1, 2, 3)]
    return [*measured, {"left": all_bytes()}]


def test_each_rank_holds_its_part_and_nothing_else_between_steps() -> None:
    whole = 4 * sum(p.numel() for p in Deep().parameters())
    part = whole / 4
    for *levels, after in run(measure_levels, ranks=4):
        for level, held in enumerate(levels, start=1):
            parameters = part if level == 3 else whole
            assert held["optimizer"] == pytest.approx(2 * part, rel=0.1)
            assert held["gradients"] == pytest.approx(part, rel=0.1)
            assert held["parameters"] == pytest.approx(parameters, rel=0.1)
            assert held["all"] == pytest.approx(3 * part + parameters, rel=0.1)  # nothing that memory() misses
            assert held["counted"] == {"sum": 10, "gather": 20 if level == 3 else 10}  # a unit comes twice a step
        assert levels[2]["whole"] < whole / 3  # a block, and what it is inside of
        assert after["left"] < part / 10  # nothing outlives the model


@pytest.mark.parametrize("autocast", [False, True])
def test_no_weight_is_kept_between_forward_and_backward(autocast: bool) -> None:
    model, _ = build("deep")
    shards = shard(model, make_optimizer("sgd", model), Job("deep", 3))
    before = all_bytes()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(torch.randn(2, 6))
    assert all_bytes() - before < 2 * 256 * 256  # one block in 16 bits
    output.float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert 0 < shards.memory()["whole"] < 3 * 4 * (256 * 256 + 256)


# ---- whole parameters, checkpoints, several passes at once ----


def in_and_out_levels() -> list[dict[str, Any]]:
    echelon.init()
    return [in_and_out(level) for level in (1, 2, 3)]


def in_and_out(level: int) -> dict[str, Any]:
    model, loss_function = build("odd")
    optimizer = make_optimizer("adamw", model)
    job = Job("odd", level)
    shards = shard(model, optimizer, job)
    train_step(model, loss_function, optimizer, shards, job, 0)
    with torch.no_grad():
        for name, value in shards.shards.items():
            value.fill_(len(name))
    shards.refresh()
    with shards.gathered():
        filled = {name: float(value.mean()) for name, value in model.named_parameters()}
        with torch.no_grad():
            for value in model.parameters():
                value.mul_(2)
        twin = copy.deepcopy(model)
    x = zoo.batch_for("odd", 4, 0)[0]
    with torch.no_grad():
        outputs = model(x), twin(x)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    shards.close()
    return {"filled": filled, "outputs": outputs, "shapes": shapes, "closed": model(x).detach()}


def test_shard_loaded_or_changed_values_are_used_in_forward() -> None:
    """Values loaded into the shards or changed in the whole parameters are those that forward uses."""
    for seen in itertools.chain.from_iterable(run(in_and_out_levels)):
        assert seen["filled"] == {name: len(name) for name, _ in Odd().named_parameters()}
        assert seen["shapes"] == {name: tuple(p.shape) for name, p in Odd().named_parameters()}
        torch.testing.assert_close(*seen["outputs"])
        torch.testing.assert_close(seen["outputs"][0], seen["closed"])


def several_levels() -> list[dict[str, Tensor]]:
    echelon.init()
    return [several(level) for level in (2, 3)]


def several(level: int) -> dict[str, Tensor]:
    """Two forwards are under way before the first backward, which comes last; then the same graph twice."""
    model, loss_function = build("transformer")
    optimizer = make_optimizer("sgd", model)
    job = Job("transformer", level)
    shards = shard(model, optimizer, job) if level else None
    for step in range(3):
        optimizer.zero_grad()
        losses = []
        for number in range(2):
            (x, target), share = mine(zoo.batch_for("transformer", 12, 2 * step + number), job)
            losses.append(loss_function(model(x), target) * share)
        if shards:
            shards.reducer("main").arm(passes=lambda name: 2)
        losses[1].backward()
        losses[0].backward(retain_graph=True)
        if shards:
            shards.reducer("main").finish()
            shards.reducer("main").arm()
        losses[0].backward()
        if shards:
            shards.reducer("main").finish()
        optimizer.step()
        if shards:
            shards.after_step(["main"])
    return report(model, shards, [], []).weights


def test_several_forwards_before_backward_and_a_graph_used_twice() -> None:
    alone = several(0)
    for weights in itertools.chain.from_iterable(run(several_levels)):
        for name, value in alone.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)


def trained_before_levels() -> list[dict[str, Tensor]]:
    echelon.init()
    return [trained_before(level) for level in (1, 2, 3)]


def trained_before(level: int) -> dict[str, Tensor]:
    """Four steps; with a level, sharded in the middle of them, with the state the optimizer has by then."""
    model, loss_function = build("odd")
    optimizer = make_optimizer("groups", model)
    whole = Job("odd", divided=False)
    for step in range(2):
        train_step(model, loss_function, optimizer, None, whole, step)
    shards = shard(model, optimizer, Job("odd", level)) if level else None
    for step in range(2, 4):
        train_step(model, loss_function, optimizer, shards, Job("odd", level) if level else whole, step)
    return report(model, shards, [], []).weights


def test_an_optimizer_that_has_taken_steps_keeps_its_state() -> None:
    alone = trained_before(0)
    for weights in itertools.chain.from_iterable(run(trained_before_levels)):
        for name, value in alone.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)


# ---- mistakes ----


def mistaken(which: str) -> None:
    echelon.init()
    job = Job("sparse" if which == "sparse" else "partial", 3, "sgd")
    model, loss_function = build(job.model)
    optimizer = torch.optim.Adafactor(model.parameters()) if which == "factors" else make_optimizer("sgd", model)
    if which == "offload":
        job = replace(job, level=2, options={"offload": "parameters"})
    shards = shard(model, optimizer, replace(job, level=4 if which == "level" else job.level))
    x, target = zoo.batch_for("partial", 4, 0)
    loss = loss_function(model(x), target)
    if which == "stepped":
        for value in shards.shards.values():
            value.grad = torch.ones_like(value)
        optimizer.step()
    loss.backward()


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("sparse", "UsageError: sharding: 'words.weight' has sparse gradients, and shards are dense"),
        ("factors", "UsageError: optimizer 'main' is Adafactor, whose step needs whole parameters"),
        ("offload", "UsageError: offload='parameters' needs level 3, got level 2"),
        ("level", "UsageError: sharding has levels 1, 2 and 3, got 4"),
        ("stepped", "UsageError: a weight changed between forward and backward"),
    ],
)
def test_mistakes_are_told_in_one_line(which: str, words: str) -> None:
    with pytest.raises(echelon.base.errors.EchelonError) as caught:
        mistaken(which)
    line = f"{type(caught.value).__name__}: {caught.value}"
    assert line.startswith(words)
    assert "\n" not in line


# ---- decisions ----


@given(
    shapes=st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=12),
    ranks=st.integers(1, 5),
)
@settings(max_examples=60)
def test_shards_tile_every_parameter(shapes: list[tuple[int, ...]], ranks: int) -> None:
    """Also where the parameter is itself a part: the second half of a whole that was split by rows."""
    cuts = cut_all({str(i): shape for i, shape in enumerate(shapes)}, ranks)
    for name, cut in cuts.items():
        shape = shapes[int(name)]
        counted = torch.zeros((2 * shape[0], *shape[1:]) if shape else ())
        given = Layout(tuple(counted.shape)).cut(0, shape[0], 2 * shape[0]) if shape else Layout(())
        for rank in range(ranks):
            layout = cut.layout(given, rank)
            assert layout.local_shape == cut.part_shape(rank)
            for offsets, sizes, _ in layout.boxes():
                where = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                counted[where] += 1
        if shape:
            assert not counted[: shape[0]].any()
            assert bool((counted[shape[0] :] == 1).all())
        else:
            assert counted == ranks


def test_remainders_even_out() -> None:
    cuts = cut_all({str(i): (5, 3) for i in range(40)}, 4)
    held = [sum(cut.part_shape(rank)[0] for cut in cuts.values()) for rank in range(4)]
    assert held == [50, 50, 50, 50]


def test_find_units_blocks_or_modules_shared_go_to_outer_unit() -> None:
    """Units are blocks or modules with parameters, and shared parameters belong to the unit around them."""

    def units(model: nn.Module, small: int = 0) -> dict[str, list[str]]:
        return find_units(model, dict(model.named_parameters()), small)

    transformer = units(zoo.TiedTransformer())
    assert list(transformer) == ["", "layers.layers.0", "layers.layers.1"]
    assert transformer[""] == ["embed.weight"]
    odd = units(Odd())
    assert set(odd) == {"", "last", "twice.0", "borrowed", "attention"}
    assert odd[""] == ["scale", "offset", "several.0", "several.1"]
    assert len(odd["attention"]) == 4  # its output layer is never called, only asked for its weight
    assert set(units(Deep(), small=4096)) == {"", *(f"blocks.{i}" for i in range(8))}
