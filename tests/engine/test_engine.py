"""Use of an engine, each case compared with plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import run
from reference import round16, sum_on_the_wire
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from zoo import QUIET, batch_for, build, sgd

import echelon
from echelon import Reduction, Strategy
from echelon.plan import Plan, make_plan


def rows(batch: tuple[Tensor, ...]) -> list[Tensor]:
    """This rank's part of a global batch."""
    size = len(batch[0]) // echelon.world_size()
    return [part[echelon.rank() * size : (echelon.rank() + 1) * size] for part in batch]


# ---- beside DDP ----


def beside_ddp(model: str) -> tuple[list[Tensor], list[Tensor]]:
    """Ten steps of ours (statistics per replica, as DDP keeps them) and of DDP, from the same weights."""
    echelon.init()
    net, loss = build(model)
    reference = DistributedDataParallel(copy.deepcopy(net))
    optimizer = sgd(reference)
    engine = echelon.distribute(net, loss=loss, optimizer=sgd(net), strategy=Strategy(sync_batch_norm=False), log=QUIET)
    for step in range(10):
        batch = rows(batch_for(model, 8, step))
        engine.step(*batch)
        optimizer.zero_grad()
        loss(reference(*batch[:-1]), batch[-1]).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()], [p.detach() for p in reference.parameters()]


@pytest.mark.parametrize("model", ["convnet", "transformer"])
def test_equals_ddp(model: str) -> None:
    for mine, theirs in run(beside_ddp, model, ranks=2):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# ---- beside a hand-written loop ----


def by_engine(model: str, merge: int, clip: float | None) -> list[Tensor]:
    echelon.init()
    net, loss = build(model)
    strategy = Strategy(gradient_merge=merge, clip=clip)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    engine = echelon.distribute(net, loss=loss, optimizer=optimizer, strategy=strategy, log=QUIET)
    for step in range(6):
        engine.step(*batch_for(model, 4, step))
    return [p.detach() for p in net.parameters()]


def by_hand(model: str, merge: int, clip: float | None) -> list[Tensor]:
    net, loss = build(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(6):
        batch = batch_for(model, 4, step)
        (loss(net(*batch[:-1]), batch[-1]) / merge).backward()
        if step % merge == merge - 1:
            if clip is not None:
                _clip_by_hand(net, clip)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]


def _clip_by_hand(net: nn.Module, clip: float) -> None:
    grads = [p.grad.to_dense() for p in net.parameters() if p.grad is not None]
    norm = torch.cat([grad.flatten() for grad in grads]).norm()
    assert norm > clip, "the test must clip"
    for p in net.parameters():
        if p.grad is not None:
            p.grad = p.grad.coalesce() * (clip / norm) if p.grad.is_sparse else p.grad * (clip / norm)


@pytest.mark.parametrize("model", ["convnet", "transformer", "sparse", "partial"])
def test_one_process_is_bit_equal_to_a_hand_written_loop(model: str) -> None:
    (engines,), (hands,) = run(by_engine, model, 1, None, ranks=1), run(by_hand, model, 1, None, ranks=1)
    for mine, expected in zip(engines, hands, strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize(("merge", "clip"), [(3, None), (1, 0.1), (3, 0.1)])
@pytest.mark.parametrize("model", ["transformer", "sparse"])
def test_merging_and_clipping_equal_a_hand_written_loop(model: str, merge: int, clip: float | None) -> None:
    (engines,), (hands,) = run(by_engine, model, merge, clip, ranks=1), run(by_hand, model, merge, clip, ranks=1)
    for mine, expected in zip(engines, hands, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


# ---- inexact modes against numpy ----


def reduced_on_the_wire(wire: str) -> tuple[np.ndarray, np.ndarray]:
    echelon.init()
    net = nn.Linear(4, 3, bias=False)
    nn.init.constant_(net.weight, 0.5)
    strategy = Strategy(fp16_allreduce=wire)  # type: ignore[arg-type]
    engine = echelon.distribute(net, loss=F.mse_loss, optimizer=sgd(net), strategy=strategy, log=QUIET)
    x, y = (torch.randn(6, n, generator=torch.Generator().manual_seed(5 + n)) for n in (4, 3))
    engine.step(*rows((x, y)))
    assert net.weight.grad is not None
    assert net.weight.grad.dtype == torch.float32
    return net.weight.grad.numpy(), _numpy_wire(x.numpy(), y.numpy(), wire)


def _numpy_wire(x: np.ndarray, y: np.ndarray, wire: str) -> np.ndarray:
    """Each rank's gradient sum over the global count, with a flag behind it, added as the wire adds."""
    rows = []
    for half in (slice(0, 3), slice(3, 6)):
        error = x[half] @ np.full((4, 3), 0.5, np.float32) - y[half]
        gradient = 2 * error.T @ x[half] / 3 / 6  # mse averages over 3 outputs; 6 samples in all
        rows.append(np.append(gradient.ravel(), np.abs(gradient).max()))
    return sum_on_the_wire(rows, wire)[:-1].reshape(3, 4)


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_sixteen_bits_on_the_wire_equal_a_numpy_reference(wire: str) -> None:
    last_place = {"fp16": 2**-10, "bf16": 2**-7}[wire]  # one unit: torch's sum over samples has another order
    for mine, reference in run(reduced_on_the_wire, wire, ranks=2):
        np.testing.assert_allclose(mine, reference, rtol=last_place, atol=1e-6)
        assert np.array_equal(mine, round16(mine, wire)), "what came back did not travel in 16 bits"


def summed() -> tuple[Tensor, float]:
    echelon.init()
    net = nn.Linear(2, 1, bias=False)
    nn.init.ones_(net.weight)
    strategy = Strategy(reduction=Reduction(op="sum"))
    engine = echelon.distribute(net, loss=lambda out: out.mean(), optimizer=sgd(net), strategy=strategy, log=QUIET)
    loss = engine.step(torch.full((3, 2), 1.0 + echelon.rank()))
    return net.weight.grad, float(loss)


def test_sum_adds_the_replicas_means() -> None:
    for gradient, loss in run(summed, ranks=2):
        assert gradient.tolist() == [[3.0, 3.0]]
        assert loss == 6.0


# ---- batches and losses of every shape ----


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x) * scale


class OwnLoss(Named):
    def forward(self, x: Tensor, scale: Tensor) -> Any:  # type: ignore[override]
        return {"loss": super().forward(x, scale).square().mean(), "logits": None}


def one_step(net: nn.Module, loss: Any, *batch: Any, **named: Any) -> tuple[float, Tensor]:
    torch.manual_seed(3)
    for p in net.parameters():
        nn.init.normal_(p)
    engine = echelon.distribute(net, loss=loss, optimizer=sgd(net), log=QUIET)
    return float(engine.step(*batch, **named)), net.linear.weight.detach().clone()  # type: ignore[union-attr, operator]


def every_kind_of_batch() -> list[tuple[float, Tensor]]:
    echelon.init()
    x, scale = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), torch.full((4, 1), 2.0)
    y = torch.zeros(4, 2)
    batch = {"x": x, "scale": scale, "y": y}
    return [
        one_step(Named(), F.mse_loss, x, scale, y),
        one_step(Named(), F.mse_loss, (x, scale, y)),
        one_step(Named(), lambda out, b: F.mse_loss(out, b["y"]), batch),
        one_step(Named(), lambda out, b: F.mse_loss(out, b["y"]), **batch),
        one_step(OwnLoss(), None, x, scale),
        one_step(OwnLoss(), None, {"x": x, "scale": scale}),
    ]


def test_batch_by_position_by_name_and_model_loss_agree() -> None:
    """Batches given by position, by name and to models with their own loss give the same losses and weights."""
    for results in run(every_kind_of_batch, ranks=2):
        for loss, weight in results[1:]:
            assert loss == pytest.approx(results[0][0], rel=1e-6)
            torch.testing.assert_close(weight, results[0][1])


def stepped_schedule() -> tuple[list[float], list[float]]:
    echelon.init()
    net, plain = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, reference = sgd(net, 1.0), sgd(plain, 1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    expected = torch.optim.lr_scheduler.StepLR(reference, 2, 0.1)
    engine = echelon.distribute(
        net, loss=F.mse_loss, optimizer=optimizer, scheduler=schedule, strategy=Strategy(gradient_merge=2), log=QUIET
    )
    mine, theirs = [], []
    for _ in range(5):
        for _ in range(2):
            engine.step(torch.randn(2, 3), torch.randn(2, 1))
        reference.step()
        expected.step()
        mine.append(optimizer.param_groups[0]["lr"])
        theirs.append(reference.param_groups[0]["lr"])
    return mine, theirs


def test_schedulers_step_once_per_update_not_per_process() -> None:
    for mine, theirs in run(stepped_schedule, ranks=2):
        assert mine == theirs


# ---- a loop of one's own: two models, two optimizers ----


class Pair(nn.Module):
    """Two nets that the loop calls by themselves, in a model that is never called as a whole."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 4))
        self.judge = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 1))

    def __getitem__(self, name: str) -> nn.Module:
        return getattr(self, name)

    def forward(self, noise: Tensor) -> Tensor:
        return self.judge(self.generator(noise))


NETS: dict[str, Callable[[], nn.Module]] = {
    "example": lambda: nn.ModuleDict({"generator": nn.Linear(3, 4), "judge": nn.Linear(4, 1)}),
    "small": lambda: Pair(16),  # at level 3 all of it is one unit
    "large": lambda: Pair(1200),  # nets are units of their own
    "large, held": lambda: nn.ModuleDict(Pair(1200).named_children()),
}


def made_nets(kind: str) -> tuple[Any, dict[str, torch.optim.Optimizer]]:
    torch.manual_seed(1)
    nets = NETS[kind]().double()
    return nets, {name: torch.optim.Adam(nets[name].parameters(), lr=0.01, eps=1e-3) for name in ("generator", "judge")}


def adversarial(strategies: Sequence[tuple[str, Strategy]], steps: int = 6) -> list[dict[str, Tensor]]:
    echelon.init()
    return [adversarial_with(kind, strategy, steps) for kind, strategy in strategies]


def adversarial_with(kind: str, strategy: Strategy, steps: int) -> dict[str, Tensor]:
    nets, optimizers = made_nets(kind)
    engine = echelon.distribute(nets, optimizer=optimizers, strategy=strategy, log=QUIET)
    for step in range(steps):
        noise, real = rows(noise_and_real(step))
        fake = nets["generator"](noise)
        engine.backward(F.softplus(-nets["judge"](real)).mean())
        engine.backward(F.softplus(nets["judge"](fake.detach())).mean())
        engine.update("judge")
        engine.backward(F.softplus(-nets["judge"](fake)).mean())
        engine.update("generator")
    return {name: value.clone() for name, value in engine.whole_state().items()}


def noise_and_real(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, generator=g).double(), torch.randn(8, 4, generator=g).double()


def adversarial_by_hand(kind: str, steps: int = 6) -> dict[str, Tensor]:
    nets, optimizers = made_nets(kind)
    for step in range(steps):
        noise, real = noise_and_real(step)
        fake = nets["generator"](noise)
        optimizers["judge"].zero_grad()
        loss = F.softplus(-nets["judge"](real)).mean() + F.softplus(nets["judge"](fake.detach())).mean()
        loss.backward()
        optimizers["judge"].step()
        optimizers["generator"].zero_grad()
        F.softplus(-nets["judge"](fake)).mean().backward()
        optimizers["generator"].step()
    return dict(nets.state_dict())


def check_adversarial(strategies: Sequence[tuple[str, Strategy]], ranks: int) -> None:
    expected = {kind: adversarial_by_hand(kind) for kind, _ in strategies}
    for trained in run(adversarial, strategies, ranks=ranks):
        for (kind, strategy), weights in zip(strategies, trained, strict=True):
            for name, value in expected[kind].items():
                torch.testing.assert_close(
                    weights[name], value, rtol=0, atol=1e-10, msg=f"{name} of {kind} with shard {strategy.shard}"
                )


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_optimizers_in_own_loop_equal_plain_pytorch(ranks: int) -> None:
    check_adversarial([("example", Strategy())], ranks)


def test_two_optimizers_in_own_loop_sharded_equal_plain_pytorch() -> None:
    """The judge is stepped between forward and backward of the generator, whose weights must stay as they are."""
    kinds = [(kind, 3) for kind in NETS] + [("example", 1), ("example", 2), ("small", 1)]
    check_adversarial([(kind, Strategy(shard=level)) for kind, level in kinds], ranks=2)


# ---- start: equal replicas ----


def different_start() -> Tensor:
    echelon.init()
    torch.manual_seed(echelon.rank())
    net = nn.Linear(3, 2)
    echelon.distribute(net, loss=F.mse_loss, optimizer=sgd(net), log=QUIET)
    return net.weight.detach()


def test_replicas_start_from_rank_0s_weights() -> None:
    first, second = run(different_start, ranks=2)
    assert torch.equal(first, second)


def own_dropout() -> list[float]:
    echelon.init(seed=11)
    net = nn.Linear(1, 1)
    echelon.distribute(net, loss=F.mse_loss, optimizer=sgd(net), log=QUIET)
    return torch.rand(3).tolist()


def test_every_rank_has_its_own_random_stream() -> None:
    first, second = run(own_dropout, ranks=2)
    assert first != second


# ---- a plan of one's own ----


def planned() -> tuple[int, list[Tensor], list[Tensor]]:
    """Train by the plan made from a strategy, and by a plan that came through JSON with more, smaller buckets."""
    echelon.init()
    trained, buckets = [], 0
    for small in (False, True):
        net, loss = build("transformer")
        optimizer, plan = sgd(net), None
        if small:
            strategy = Strategy(reduction=Reduction(bucket_mb=0.002, first_bucket_mb=0.002))
            made = make_plan(net, {"main": optimizer}, strategy, echelon.world_size())
            plan = Plan.from_json(made.to_json())
        engine = echelon.distribute(net, loss=loss, optimizer=optimizer, plan=plan, log=QUIET)
        buckets = len(engine.plan.buckets)
        for step in range(3):
            engine.step(*rows(batch_for("transformer", 8, step)))
        trained.append([p.detach() for p in net.parameters()])
    return buckets, trained[0], trained[1]


def test_a_plan_given_as_json_is_the_one_that_runs() -> None:
    for buckets, made, given in run(planned, ranks=2):
        assert buckets > 4
        for a, b in zip(made, given, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
