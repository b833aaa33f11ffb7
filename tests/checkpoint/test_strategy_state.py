"""State of strategies is part of the run: kept in checkpoints, shown as one model, handed on to other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import errors, run
from safetensors.torch import load_file
from torch import Tensor, nn
from zoo import QUIET, ConvNet, batch_for

import echelon
from echelon import AdaptiveLocalSgd, Amp, Checkpoint, Dgc, LocalSgd, LrScaling, Strategy
from echelon.checkpoint import export, latest
from echelon.engine.engine import Engine

DGC = Dgc(sparsity=(0.75, 0.9), rampup_step=8, min_size=50)
#: Begins so high that the first steps overflow.
SCALED = Amp(loss_scale="dynamic", init_scale=1e38, backoff=0.01, growth_interval=3)

#: name: strategy, optimizer, and after how many calls of step() to stop
CASES: dict[str, tuple[Strategy, str, int]] = {
    "dgc": (Strategy(dgc=DGC), "sgd", 7),
    "dgc before it begins": (Strategy(dgc=Dgc(sparsity=(0.9,), rampup_begin_step=5, min_size=50)), "sgd", 3),
    "dgc in the middle of a merge": (Strategy(dgc=DGC, gradient_merge=3, clip=0.1), "sgd", 7),
    "dgc with everything": (Strategy(dgc=DGC, amp=SCALED, fp16_allreduce=True, recompute=True), "sgd", 7),
    "localsgd between two syncs": (Strategy(localsgd=LocalSgd(k_steps=4)), "sgd", 6),
    "localsgd at a sync": (Strategy(localsgd=LocalSgd(k_steps=4)), "sgd", 8),
    "localsgd outer": (Strategy(localsgd=LocalSgd(k_steps=4, outer=True), fp16_allreduce=True), "adam", 6),
    "localsgd merging": (Strategy(localsgd=LocalSgd(k_steps=2), gradient_merge=3), "sgd", 7),
    "localsgd scaled": (Strategy(localsgd=LocalSgd(k_steps=4), amp=SCALED), "sgd", 6),
    "adaptive before the first sync": (Strategy(adaptive_localsgd=AdaptiveLocalSgd(init_k_steps=6)), "sgd", 3),
    "adaptive": (Strategy(adaptive_localsgd=AdaptiveLocalSgd(init_k_steps=3)), "sgd", 8),
    "loss scale": (Strategy(amp=SCALED), "sgd", 7),
    "lars": (Strategy(lars=True, lr_scaling=LrScaling(warmup_steps=10)), "sgd", 7),
    "lamb": (Strategy(lamb=True, amp="bf16", recompute=True), "adam", 7),
}
CALLS = 14


class Net(nn.Module):
    """Dropout and batch norm: random streams and buffers, besides weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2)
        )
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(name: str, directory: str | None) -> tuple[Engine, nn.Module]:
    strategy, kind, _ = CASES[name]
    torch.manual_seed(5)
    net = Net()
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "sgd": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)}
    made = kinds[kind](net.parameters(), lr=0.05)
    engine = echelon.distribute(
        net,
        loss=F.cross_entropy,
        optimizer=made,
        scheduler=torch.optim.lr_scheduler.StepLR(made, 4, 0.7),
        strategy=strategy,
        checkpoint=Checkpoint(dir=directory) if directory else None,
        log=QUIET,
    )
    return engine, net


def go(engine: Engine, name: str, begin: int, end: int) -> None:
    for call in range(begin, end):
        g = torch.Generator().manual_seed(100 * call + echelon.rank())
        engine.step(torch.randn(6, 10, generator=g), torch.randint(4, (6,), generator=g))


def undisturbed(names: list[str]) -> dict[str, dict[str, Tensor]]:
    echelon.init(seed=3)
    found = {}
    for name in names:
        engine, net = make(name, None)
        go(engine, name, 0, CALLS)
        found[name] = _all_state(engine, net)
    return found


def stopped(names: list[str], directory: str) -> None:
    echelon.init(seed=3)
    for name in names:
        engine, _ = make(name, f"{directory}/{name}")
        go(engine, name, 0, CASES[name][2])
        engine.save(wait=True)


def resumed(names: list[str], directory: str) -> dict[str, dict[str, Tensor]]:
    echelon.init(seed=3)
    found = {}
    for name in names:
        engine, net = make(name, f"{directory}/{name}")
        go(engine, name, CASES[name][2], CALLS)
        found[name] = _all_state(engine, net)
    return found


def _all_state(engine: Engine, net: nn.Module) -> dict[str, Tensor]:
    """Weights, buffers and everything the optimizer and the strategies hold."""
    tensors, _ = engine._checkpoints._state()
    return {name: value.clone() for name, value in (tensors | engine._checkpoints.own_state()).items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any]]:
    directory, names = str(tmp_path_factory.mktemp("kept")), list(CASES)
    through = run(undisturbed, names)
    run(stopped, names, directory)
    return through, run(resumed, names, directory)


@pytest.mark.parametrize("name", CASES)
def test_strategy_resumed_run_ends_bit_identical(name: str, runs: Any) -> None:
    """A run that was stopped and resumed ends bit for bit where an uninterrupted one ends."""
    through, again = runs
    for rank in range(2):
        expected, found = through[rank][name], again[rank][name]
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert torch.equal(value.nan_to_num(), found[key].nan_to_num()), f"{key} of rank {rank}"


# ---- on another number of ranks ----


def owed(name: str, directory: str, calls: int) -> np.ndarray:
    """Train on and save; or, with 0 calls, only resume. What this rank owes the others."""
    echelon.init(seed=3)
    engine, _ = make(name, directory)
    go(engine, name, 0, calls)
    if calls:
        engine.save(wait=True)
    residual = engine.optimizers["main"].residual  # type: ignore[attr-defined]
    return torch.cat(list(residual.tensors().values())).numpy()


@pytest.mark.parametrize("ranks", [1, 3])
def test_no_gradient_is_lost_when_the_number_of_ranks_changes(ranks: int, tmp_path: Path) -> None:
    before = run(owed, "dgc", str(tmp_path), 7, ranks=2)
    after = run(owed, "dgc", str(tmp_path), 0, ranks=ranks)
    assert np.abs(sum(before)).max() > 0
    np.testing.assert_allclose(sum(after), sum(before), rtol=1e-6, atol=1e-8)


def weights_of(name: str, directory: str, calls: int) -> dict[str, np.ndarray]:
    echelon.init(seed=3)
    engine, net = make(name, directory)
    go(engine, name, 0, calls)
    if calls:
        engine.save(wait=True)
    return {key: value.numpy().copy() for key, value in net.state_dict().items()}


def test_ranks_that_step_alone_are_kept_as_one_model(tmp_path: Path) -> None:
    """On another number of ranks the run goes on from the average; an exported file holds it too."""
    name = "localsgd between two syncs"
    before = run(weights_of, name, str(tmp_path), 6, ranks=2)
    assert np.abs(before[0]["head.weight"] - before[1]["head.weight"]).max() > 1e-4, "ranks did not step alone"
    export(latest(tmp_path), tmp_path / "model.safetensors")
    stored = load_file(tmp_path / "model.safetensors")
    for after in run(weights_of, name, str(tmp_path), 0, ranks=3):
        for key, value in after.items():
            mean = np.mean([b[key] for b in before], axis=0) if value.dtype.kind == "f" else before[0][key]
            np.testing.assert_allclose(value, mean, rtol=1e-5, atol=1e-6, err_msg=key)
            np.testing.assert_allclose(stored[key].numpy(), mean, rtol=1e-5, atol=1e-6, err_msg=key)


# ---- ranks that step alone ----


def local_convnet() -> tuple[list[dict[str, Tensor]], dict[str, float], Tensor]:
    echelon.init(seed=3)
    torch.manual_seed(2)
    net = ConvNet()
    made = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    engine = echelon.distribute(
        net, loss=F.cross_entropy, optimizer=made, strategy=Strategy(localsgd=LocalSgd(k_steps=3)), log=QUIET
    )
    assert not engine.plan.sync_batch_norm
    seen, shown = [], {}
    test = batch_for("convnet", 20, 99)
    for step in range(6):
        engine.step(*batch_for("convnet", 8, 10 * step + echelon.rank()))
        seen.append({key: value.clone() for key, value in net.state_dict().items()})
        if step == 4:
            shown = engine.evaluate([test], metrics=["accuracy"])
            own = net.state_dict()
            assert all(torch.equal(own[key], value) for key, value in seen[-1].items()), "evaluating changed a rank"
    momentum = made.state[net.head.weight]["momentum_buffer"].clone()
    engine.step(*batch_for("convnet", 8, 60 + echelon.rank()))
    engine.synchronize()
    seen.append({key: value.clone() for key, value in net.state_dict().items()})
    return seen, shown, momentum


def test_localsgd_batch_norm_averaged_with_weights_and_in_eval() -> None:
    """Batch norm statistics are averaged together with the weights, and evaluation uses the average."""
    (first, shown, momentum), (second, shown_too, other_momentum) = run(local_convnet)
    assert not torch.equal(momentum, other_momentum), "momentum was averaged without being asked"
    for step in range(7):
        for key, value in first[step].items():
            if not key.endswith("num_batches_tracked") and "body.3.bias" not in key:  # batch norm cancels that bias
                together = torch.equal(value, second[step][key])
                assert together == (step in (2, 5, 6)), f"{key} after step {step + 1}"
    assert shown == shown_too
    net = ConvNet()
    net.load_state_dict({key: _mean(value, second[4][key]) for key, value in first[4].items()})
    x, y = batch_for("convnet", 20, 99)
    with torch.no_grad():
        expected = F.cross_entropy(net.eval()(x), y)
    assert shown["loss"] == pytest.approx(float(expected), rel=1e-5)


def _mean(a: Tensor, b: Tensor) -> Tensor:
    return (a + b) / 2 if a.is_floating_point() else a


def local_with_uneven_data() -> list[float]:
    """11 samples on two ranks in batches of 3: rank 1 ends on a stand-in batch that counts for nothing."""
    echelon.init(seed=3)
    torch.manual_seed(2)
    net = nn.Linear(4, 2)
    engine = echelon.distribute(
        net,
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        strategy=Strategy(localsgd=LocalSgd(k_steps=5)),
        log=QUIET,
    )
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
    loader = engine.loader((x, torch.zeros(7, dtype=torch.int64)), batch_size=3, shuffle=False, uneven="join")
    for inputs, labels in loader:
        before = net.weight.detach().clone()
        engine.step(inputs, labels)
        moved = not torch.equal(before, net.weight)
    return [engine.steps, float(moved)]


def test_localsgd_rank_without_samples_takes_no_step() -> None:
    """A rank without samples does not step on a stand-in batch."""
    assert run(local_with_uneven_data) == [[2, 1.0], [2, 0.0]]


def local_with_nan() -> None:
    echelon.init()
    net = nn.Linear(4, 2)
    engine = echelon.distribute(
        net,
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        strategy=Strategy(localsgd=True),
        log=QUIET,
    )
    bad = torch.nan if echelon.rank() == 1 else 1.0
    for _ in range(20):
        engine.step(torch.full((2, 4), bad), torch.zeros(2, dtype=torch.int64))


def test_localsgd_nan_loss_names_its_rank() -> None:
    """If ranks step alone, the error for a loss that is not a number names the rank."""
    first, second = errors(local_with_nan)
    assert second.startswith("LossError: the loss is nan at step 1 on rank 1")
    assert first.startswith("PeerLost: ")
