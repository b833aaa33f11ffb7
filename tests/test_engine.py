"""What a user may do with an engine, each against plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import errors, run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from zoo import batch_for, build

import echelon
from echelon import Reduction, Strategy
from echelon.errors import LossError, MismatchError, UsageError
from echelon.plan import Plan, make_plan

QUIET = echelon.Log(console=False)


def rows(batch: tuple[Tensor, ...]) -> list[Tensor]:
    """This rank's part of a global batch."""
    size = len(batch[0]) // echelon.world_size()
    return [part[echelon.rank() * size : (echelon.rank() + 1) * size] for part in batch]


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


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
    strategy = Strategy(reduction=Reduction(wire=wire))  # type: ignore[arg-type]
    engine = echelon.distribute(net, loss=F.mse_loss, optimizer=sgd(net), strategy=strategy, log=QUIET)
    x, y = (torch.randn(6, n, generator=torch.Generator().manual_seed(5 + n)) for n in (4, 3))
    engine.step(*rows((x, y)))
    assert net.weight.grad is not None
    assert net.weight.grad.dtype == torch.float32
    return net.weight.grad.numpy(), _numpy_wire(x.numpy(), y.numpy(), wire)


def _numpy_wire(x: np.ndarray, y: np.ndarray, wire: str) -> np.ndarray:
    """Each rank's gradient sum over the global count, rounded to 16 bits, then added in 16 bits."""
    parts = []
    for half in (slice(0, 3), slice(3, 6)):
        error = x[half] @ np.full((4, 3), 0.5, np.float32) - y[half]
        gradient = 2 * error.T @ x[half] / 3 / 6  # mse averages over 3 outputs; 6 samples in all
        parts.append(_round16(gradient, wire))
    return _round16(parts[0] + parts[1], wire)


def _round16(values: np.ndarray, wire: str) -> np.ndarray:
    if wire == "fp16":
        return values.astype(np.float16).astype(np.float32)
    bits = values.astype(np.float32).view(np.uint32)
    bits = bits + 0x7FFF + ((bits >> 16) & 1)  # round to nearest even, then drop the low half
    return (bits & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_sixteen_bits_on_the_wire_equal_a_numpy_reference(wire: str) -> None:
    last_place = {"fp16": 2**-10, "bf16": 2**-7}[wire]  # one unit: torch's sum over samples has another order
    for mine, reference in run(reduced_on_the_wire, wire, ranks=2):
        np.testing.assert_allclose(mine, reference, rtol=last_place, atol=1e-6)
        assert np.array_equal(mine, _round16(mine, wire)), "what came back did not travel in 16 bits"


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


def test_batches_by_position_by_name_and_models_with_their_own_loss() -> None:
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


def adversarial(steps: int = 6) -> dict[str, Tensor]:
    echelon.init()
    torch.manual_seed(1)
    nets = nn.ModuleDict({"generator": nn.Linear(3, 4), "judge": nn.Linear(4, 1)})
    optimizers = {name: torch.optim.Adam(net.parameters(), lr=0.01) for name, net in nets.items()}
    engine = echelon.distribute(nets, optimizer=optimizers, log=QUIET)
    for step in range(steps):
        g = torch.Generator().manual_seed(step)
        noise, real = rows((torch.randn(8, 3, generator=g), torch.randn(8, 4, generator=g)))
        fake = nets["generator"](noise)
        engine.backward(F.softplus(-nets["judge"](real)).mean())
        engine.backward(F.softplus(nets["judge"](fake.detach())).mean())
        engine.update("judge")
        engine.backward(F.softplus(-nets["judge"](fake)).mean())
        engine.update("generator")
    return {name: value.clone() for name, value in nets.state_dict().items()}


def adversarial_by_hand(steps: int = 6) -> dict[str, Tensor]:
    torch.manual_seed(1)
    nets = nn.ModuleDict({"generator": nn.Linear(3, 4), "judge": nn.Linear(4, 1)})
    optimizers = {name: torch.optim.Adam(net.parameters(), lr=0.01) for name, net in nets.items()}
    for step in range(steps):
        g = torch.Generator().manual_seed(step)
        noise, real = torch.randn(8, 3, generator=g), torch.randn(8, 4, generator=g)
        fake = nets["generator"](noise)
        optimizers["judge"].zero_grad()
        loss = F.softplus(-nets["judge"](real)).mean() + F.softplus(nets["judge"](fake.detach())).mean()
        loss.backward()
        optimizers["judge"].step()
        optimizers["generator"].zero_grad()
        F.softplus(-nets["judge"](fake)).mean().backward()
        optimizers["generator"].step()
    return dict(nets.state_dict())


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_optimizers_in_a_loop_of_ones_own_equal_plain_pytorch(ranks: int) -> None:
    expected = adversarial_by_hand()
    for trained in run(adversarial, ranks=ranks):
        for name, value in expected.items():
            torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-5)


# ---- start: equal replicas, or one clear line ----


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


def different_model() -> None:
    echelon.init()
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2 + echelon.rank()))
    echelon.distribute(net, loss=F.mse_loss, optimizer=sgd(net), log=QUIET)


def different_strategy() -> None:
    echelon.init()
    net = nn.Linear(3, 2)
    strategy = Strategy(gradient_merge=1 + echelon.rank())
    echelon.distribute(net, loss=F.mse_loss, optimizer=sgd(net), strategy=strategy, log=QUIET)


def test_ranks_with_different_models_are_told_where_they_differ() -> None:
    for line in errors(different_model, ranks=2):
        assert line.startswith("MismatchError: rank 1 was built differently from rank 0: ")
        assert "1.weight" in line or "1.bias" in line
        assert "[3, 3] against [2, 3]" in line or "[3] against [2]" in line


def test_ranks_with_different_strategies_are_told_where_they_differ() -> None:
    for line in errors(different_strategy, ranks=2):
        assert "gradient_merge: 2 against 1" in line


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


def test_a_plan_for_other_ranks_or_another_model_is_refused() -> None:
    net = nn.Linear(2, 1)
    for other, ranks, line in ((net, 4, "is for 4 ranks, this job has 1"), (nn.Linear(3, 1), 1, "another model")):
        plan = make_plan(other, {"main": sgd(other)}, Strategy(), ranks)
        with pytest.raises(UsageError, match=line):
            echelon.distribute(net, optimizer=sgd(net), plan=plan, log=QUIET)


# ---- losses that are no losses ----


def bad_loss(kind: str) -> None:
    echelon.init()
    net = nn.Linear(2, 1)
    losses = {
        "nan": lambda out: out.mean() * (float("nan") if echelon.rank() == 1 and engine.steps == 2 else 1.0),
        "vector": lambda out: out.squeeze(1),
        "number": lambda out: 3.0,
    }
    engine = echelon.distribute(net, loss=losses[kind], optimizer=sgd(net), log=QUIET)
    for _ in range(4):
        before = net.weight.detach().clone()
        try:
            engine.step(torch.ones(3, 2))
        except LossError:
            assert torch.equal(net.weight, before), "the update must not happen"
            raise


def test_a_nan_loss_names_rank_and_step_on_every_rank() -> None:
    for line in errors(bad_loss, "nan", ranks=3):
        assert line.startswith("LossError: the loss is nan at step 3 on rank 1")


def test_a_loss_that_is_not_a_scalar_names_rank_step_and_shape() -> None:
    lines = errors(bad_loss, "vector", ranks=2)
    assert lines[1].startswith("LossError: step 1, rank 1: the loss must be one number, got shape (3,)")
    assert "got float" in errors(bad_loss, "number", ranks=1)[0]


# ---- changes behind the plan's back would let replicas drift apart ----


def thawed() -> None:
    echelon.init()
    net = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    engine = echelon.distribute(net, loss=F.mse_loss, optimizer=sgd(net), log=QUIET)
    engine.step(torch.ones(2, 2), torch.ones(2, 1))
    net[0].requires_grad_(True)
    engine.step(torch.ones(2, 2), torch.ones(2, 1))


def grown() -> None:
    echelon.init()
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = sgd(net[1])
    engine = echelon.distribute(net, loss=F.mse_loss, optimizer=optimizer, log=QUIET)
    optimizer.add_param_group({"params": list(net[0].parameters())})
    engine.step(torch.ones(2, 2), torch.ones(2, 1))


def test_parameters_that_join_after_distribute_are_refused() -> None:
    for line in errors(thawed, ranks=2):
        assert line.startswith("UsageError: '0.weight' was frozen when distribute() was called")
    for line in errors(grown, ranks=2):
        assert "more parameters after distribute()" in line


# ---- batches ----


def divided(size: int) -> tuple[int, int]:
    echelon.init()
    net = nn.Linear(2, 1)
    engine = echelon.distribute(net, loss=F.mse_loss, optimizer=sgd(net), log=QUIET)
    loader = engine.loader((torch.zeros(40, 2), torch.zeros(40, 1)), global_batch=size)
    return len(next(iter(loader))[0]), loader.global_batch


def test_a_global_batch_is_divided_or_the_nearest_that_can_be_is_named() -> None:
    assert run(divided, 12, ranks=3) == [(4, 12)] * 3
    for line in errors(divided, 16, ranks=3):
        assert line == "DataError: global_batch=16 cannot be divided over 3 replicas; 15 or 18 can"
    net = nn.Linear(2, 1)
    engine = echelon.distribute(net, loss=F.mse_loss, optimizer=sgd(net), log=QUIET)
    with pytest.raises(UsageError, match="either batch_size"):
        engine.loader((torch.zeros(4, 2),))
    with pytest.raises(UsageError, match="no option 'shufle'; did you mean 'shuffle'"):
        engine.loader((torch.zeros(4, 2),), batch_size=2, shufle=True)


# ---- slips of the pen ----


def test_unknown_options_suggest_the_nearest() -> None:
    net = nn.Linear(1, 1)
    with pytest.raises(UsageError, match="no option 'stratgy'; did you mean 'strategy'"):
        echelon.distribute(net, optimizer=sgd(net), stratgy=1)
    with pytest.raises(UsageError, match="no option 'gradient_mege'; did you mean 'gradient_merge'"):
        Strategy(gradient_mege=2)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="expected 'bf16' or None"):
        Strategy(amp="bf61")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Strategy\(gradient_merge=True\): expected int"):
        Strategy(gradient_merge=True)
    with pytest.raises(UsageError, match=r"Strategy\(clip=-1\): expected a norm above 0"):
        Strategy(clip=-1)


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match="not in the model"):
        echelon.distribute(nn.Linear(1, 1), optimizer=sgd(nn.Linear(2, 3)), log=QUIET)


def test_mismatch_is_an_echelon_error() -> None:
    assert issubclass(MismatchError, echelon.EchelonError)


# ---- a model that checkpoints with reentrant autograd finishes gradients twice ----


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = checkpoint(self.shared, x.requires_grad_(), use_reentrant=True)
        return checkpoint(self.shared, x, use_reentrant=True).mean()


def reentrant() -> None:
    echelon.init()
    net = Reentrant()
    engine = echelon.distribute(net, optimizer=sgd(net), log=QUIET)
    engine.step(torch.ones(2, 3))
    dist.barrier()


def test_gradients_that_change_after_they_were_sent_are_an_error() -> None:
    for line in errors(reentrant, ranks=2):
        assert "use_reentrant=False" in line
