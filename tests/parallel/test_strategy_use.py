"""Strategies in use: a loop of one's own, unusual parameters, what is said, and what is refused."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import errors, run
from torch import Tensor, nn
from zoo import QUIET, batch_for, build

import echelon
from echelon import Amp, Dgc, Lars, LocalSgd, Strategy
from echelon.base.errors import LossError, UsageError
from echelon.optim.grad_scaler import HOPELESS, LossScaler

DGC = Dgc(sparsity=(0.75,), min_size=20)


# ---- a loop of one's own ----


def trained(strategy: Strategy, own_loop: bool, model: str = "transformer") -> dict[str, Tensor]:
    echelon.init(seed=1)
    net, loss = build(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    engine = echelon.distribute(net, loss=loss, optimizer=optimizer, strategy=strategy, log=QUIET)
    for step in range(6):
        *inputs, target = (part[4 * echelon.rank() :][:4] for part in batch_for(model, 8, step))
        if own_loop:
            engine.backward(loss(net(*inputs), target))
            engine.update()
        else:
            engine.step(*inputs, target)
    assert engine.steps == 6
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(dgc=DGC, clip=0.5),
        Strategy(localsgd=LocalSgd(k_steps=4)),
        Strategy(fp16_allreduce="bf16"),
        Strategy(recompute=True, lars=Lars(coeff=0.05)),
    ],
    ids=["dgc", "localsgd", "bf16 on the wire", "recompute and lars"],
)
def test_a_loop_of_ones_own_gives_what_step_gives(strategy: Strategy) -> None:
    for mine, stepped in zip(run(trained, strategy, True), run(trained, strategy, False), strict=True):
        for name, value in stepped.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-6, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def overflowing(own_loop: bool) -> tuple[list[bool], float, int]:
    """Steps 1 and 2 overflow on rank 1 only. Which steps moved the weights, the scale, and how many were skipped."""
    echelon.init(seed=1)
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    engine = echelon.distribute(
        net,
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        strategy=Strategy(amp=Amp(loss_scale="dynamic", backoff_after=2)),
        log=QUIET,
    )
    moved = []
    for step in range(5):
        x = torch.ones(2, 4) * (torch.inf if step in (1, 2) and echelon.rank() == 1 else 1.0)
        before = net.weight.detach().clone()
        y = torch.tensor([0, 1])
        if own_loop:
            engine.backward(F.cross_entropy(net(x), y))
            engine.update()
        else:
            engine.step(x, y)
        moved.append(not torch.equal(before, net.weight))
        assert torch.isfinite(net.weight).all()
    return moved, engine.loss_scale, engine.skipped


@pytest.mark.parametrize("own_loop", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_on_all(own_loop: bool) -> None:
    expected = ([True, False, False, True, True], 32768 * 0.8, 2)
    assert run(overflowing, own_loop) == [expected, expected]


def overflow_in_a_compressed_gradient() -> tuple[list[bool], bool]:
    """Only the gradient that DGC keeps to each rank overflows, in step 1, on rank 1. Which steps moved the weights."""
    echelon.init(seed=1)
    torch.manual_seed(0)
    net = nn.Linear(30, 4)
    strategy = Strategy(amp=Amp(loss_scale="dynamic"), dgc=DGC)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    engine = echelon.distribute(net, loss=F.cross_entropy, optimizer=optimizer, strategy=strategy, log=QUIET)
    net.weight.register_hook(lambda grad: grad * torch.inf if engine.steps == 1 and echelon.rank() == 1 else grad)
    moved = []
    for _ in range(3):
        before = net.weight.detach().clone()
        engine.step(torch.randn(4, 30), torch.zeros(4, dtype=torch.int64))
        moved.append(not torch.equal(before, net.weight))
    residual = engine.optimizers["main"].residual  # type: ignore[attr-defined]
    return moved, all(bool(torch.isfinite(value).all()) for value in residual.tensors().values())


def test_overflow_on_one_rank_skips_step_on_all() -> None:
    """An overflow that only one rank sees skips the step on all ranks."""
    assert run(overflow_in_a_compressed_gradient) == [([True, False, True], True)] * 2


def gradient_over_the_wire(magnitude: float) -> Tensor:
    echelon.init()
    net = nn.Linear(50, 1, bias=False)
    nn.init.ones_(net.weight)
    strategy = Strategy(fp16_allreduce=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    engine = echelon.distribute(
        net, loss=lambda out, _: magnitude * out.mean(), optimizer=optimizer, strategy=strategy, log=QUIET
    )
    g = torch.Generator().manual_seed(echelon.rank())
    engine.step(torch.rand(2, 50, generator=g) + 0.5, torch.zeros(2))
    assert net.weight.grad is not None
    return net.weight.grad.clone()


@pytest.mark.parametrize("magnitude", [1e-12, 1.0, 1e12])
def test_half_floats_on_the_wire_neither_vanish_nor_overflow(magnitude: float) -> None:
    inputs = [torch.rand(2, 50, generator=torch.Generator().manual_seed(rank)) + 0.5 for rank in range(2)]
    expected = magnitude * torch.cat(inputs).mean(0, keepdim=True)
    for found in run(gradient_over_the_wire, magnitude):
        torch.testing.assert_close(found, expected, rtol=2**-10, atol=0.0)


# ---- unusual parameters ----


@pytest.mark.parametrize("model", ["partial", "sparse"])
def test_dgc_leaves_unused_frozen_and_sparse_parameters_alone(model: str) -> None:
    """Frozen and never used: untouched. Sparse: as without DGC, when nothing else is large enough."""
    first, second = run(trained, Strategy(dgc=DGC), False, model=model)
    initial, _ = build(model)
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{name} differs between the ranks"
        still = torch.equal(value, initial.state_dict()[name])
        assert still == name.startswith(("frozen", "unused")), name


def test_dgc_alone_sends_nothing_and_trains() -> None:
    """The same script in one process: the algorithm stays the same, and sends nothing."""
    one = run(trained, Strategy(dgc=Dgc(sparsity=(0.0,), min_size=20)), False, ranks=1)[0]
    plain = run(plain_sgd_without_momentum, ranks=1)[0]
    for name, value in plain.items():  # sparsity 0 sends everything, and masking forgets all momentum
        torch.testing.assert_close(one[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def plain_sgd_without_momentum() -> dict[str, Tensor]:
    echelon.init(seed=1)
    net, loss = build("transformer")
    large = [p for p in net.parameters() if p.numel() >= 20]
    small = [p for p in net.parameters() if p.numel() < 20]
    optimizer = torch.optim.SGD([{"params": large, "momentum": 0.0}, {"params": small, "momentum": 0.9}], lr=0.05)
    for step in range(6):
        *inputs, target = (part[:4] for part in batch_for("transformer", 8, step))
        optimizer.zero_grad()
        loss(net(*inputs), target).backward()
        optimizer.step()
    return net.state_dict()


def half_precision_weights() -> dict[str, Tensor]:
    """bf16 weights: residuals are fp32 all the same, and ranks stay equal."""
    echelon.init(seed=1)
    torch.manual_seed(0)
    net = nn.Linear(30, 10).to(torch.bfloat16)
    engine = echelon.distribute(
        net,
        loss=lambda out, y: F.cross_entropy(out.float(), y),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        strategy=Strategy(dgc=DGC),
        log=QUIET,
    )
    g = torch.Generator().manual_seed(echelon.rank())
    losses = []
    for _ in range(40):
        x = torch.randn(8, 30, generator=g)
        losses.append(float(engine.step(x.bfloat16(), x[:, :10].argmax(1))))
    residual = engine.optimizers["main"].residual  # type: ignore[attr-defined]
    assert all(value.dtype == torch.float32 for value in residual.tensors().values())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    return {name: value.clone() for name, value in net.state_dict().items()}


def test_dgc_takes_weights_of_any_type() -> None:
    first, second = run(half_precision_weights)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def hierarchical_after_dense_steps() -> list[int]:
    """Count entries of momentum in the optimizer after each of four steps; compression begins with the third."""
    echelon.init(seed=1)
    torch.manual_seed(0)
    net = nn.Linear(30, 10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    dgc = Dgc(sparsity=(0.75,), rampup_begin_step=2, min_size=20, hierarchical=True)
    engine = echelon.distribute(net, loss=F.cross_entropy, optimizer=optimizer, strategy=Strategy(dgc=dgc), log=QUIET)
    held = []
    for _ in range(4):
        engine.step(torch.randn(4, 30), torch.zeros(4, dtype=torch.int64))
        held.append(sum(state["momentum_buffer"].numel() for state in engine.optimizers["main"].state.values()))
    return held


def test_dense_step_momentum_in_one_place_on_every_rank() -> None:
    """Left behind on a rank that does not lead, it would come back from a checkpoint and count twice."""
    assert run(hierarchical_after_dense_steps, ranks=4, hosts=2) == [[310, 310, 10, 10]] * 4


# ---- what is refused ----


def refuse(strategy: Strategy, message: str, optimizer: Any = torch.optim.SGD, **options: Any) -> None:
    net = nn.Linear(4, 2)
    with pytest.raises(UsageError, match=message) as caught:
        echelon.distribute(net, optimizer=optimizer(net.parameters(), lr=0.1, **options), strategy=strategy, log=QUIET)
    assert "\n" not in str(caught.value)


def test_an_optimizer_that_does_not_fit_is_refused() -> None:
    refuse(Strategy(dgc=True), "the optimizer given is Adam; give an SGD", torch.optim.Adam)
    refuse(Strategy(dgc=True), r"SGD\(dampening=...\)", momentum=0.9, dampening=0.1)
    refuse(Strategy(lars=True), "LARS is built on torch.optim.SGD", torch.optim.Adam)
    refuse(Strategy(lamb=True), "LAMB is built on torch.optim.Adam or torch.optim.AdamW")
    refuse(Strategy(lars=Lars(exclude_from_weight_decay=("batch_norm",))), "'batch_norm' matches no parameter")
    refuse(Strategy(recompute=True), "name")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes fp16")
def test_fp16_on_a_cpu_without_it_names_bf16() -> None:
    if echelon.optim.grad_scaler._cpu_computes_fp16():
        pytest.skip("this CPU computes fp16")
    refuse(Strategy(amp="fp16"), "this CPU has no fp16 arithmetic; use amp='bf16'")


def uneven_hosts() -> None:
    """Ranks 0 and 1 on one host, rank 2 on another."""
    rank = int(os.environ["RANK"])
    place = {"LOCAL_WORLD_SIZE": [2, 2, 1], "LOCAL_RANK": [0, 1, 0], "GROUP_RANK": [0, 0, 1]}
    os.environ.update({name: str(values[rank]) for name, values in place.items()})
    echelon.init()
    net = nn.Linear(4, 2)
    echelon.distribute(
        net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        strategy=Strategy(dgc=Dgc(hierarchical=True)),
        log=QUIET,
    )


def test_hosts_of_different_size_cannot_be_hierarchical() -> None:
    first, second, other = errors(uneven_hosts, ranks=3)
    assert "needs equally many ranks on every host; 3 ranks are not a multiple of the 2 here" in first
    assert second == first
    assert other  # its own numbers fit; it ends with the others


def test_a_loss_that_always_overflows_ends_the_run() -> None:
    scaler = LossScaler(Amp(loss_scale=8.0))
    for _ in range(HOPELESS - 1):
        scaler.update(finite=False)
    with pytest.raises(LossError, match=f"overflowed in {HOPELESS} steps in a row at a loss scale of 8"):
        scaler.update(finite=False)


def test_the_scale_never_falls_under_its_floor_and_recovers() -> None:
    scaler = LossScaler(Amp(loss_scale="dynamic", init_scale=2.0, backoff_after=1, growth_interval=2, min_scale=1.0))
    found = []
    for finite in (False, False, False, False, True, True, True, True):
        scaler.update(finite)
        found.append(scaler.scale)
    assert found == pytest.approx([1.6, 1.28, 1.024, 1.0, 1.0, 2.0, 2.0, 4.0])


# ---- what is said ----


def test_what_will_run_is_announced(capfd: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    echelon.distribute(
        net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.3),
        strategy=Strategy(lars=Lars(exclude_from_weight_decay=("bias",)), lr_scaling="linear"),
    )
    said = capfd.readouterr().out
    assert "lars: weight decay 0.0005, in place of 0.3 of the optimizer 'main'" in said
    assert "without weight decay: 2 parameters" in said
    assert "lr scaling: " in said


# ---- coming and going ----


def many_engines() -> tuple[list[int], str]:
    """Open files after each of some engines that came and went; and what a closed one says."""
    echelon.init()
    opened = []
    for _ in range(6):
        net = nn.Sequential(nn.Linear(30, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        engine = echelon.distribute(
            net, loss=F.cross_entropy, optimizer=optimizer, strategy=Strategy(dgc=DGC), log=QUIET
        )
        engine.step(torch.randn(4, 30), torch.zeros(4, dtype=torch.int64))
        engine.close()
        with pytest.raises(UsageError) as caught:
            engine.step(torch.randn(4, 30), torch.zeros(4, dtype=torch.int64))
        said = str(caught.value)
        del engine, net, optimizer, caught
        gc.collect()
        opened.append(len(os.listdir("/proc/self/fd")))
    return opened, said


def test_a_closed_engine_leaves_no_connections_behind() -> None:
    for opened, said in run(many_engines):
        assert len(set(opened)) == 1, opened
        assert said == "the engine is closed and trains no more; call distribute() for another"
