"""Each strategy, and each combination of them, on two real ranks against the numpy reference in reference.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import run
from reference import Arrays, Oracle, Rank, Settings, simulate
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon import AdaptiveLocalSgd, Amp, Dgc, Lamb, Lars, LocalSgd, LrScaling, Outer, Strategy

STEPS, BATCH = 20, 8
RATES = {"sgd": 0.05, "adam": 0.01}


class Blocks(nn.Module):
    """Two equal blocks, so that recompute finds something, with weights of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@dataclass
class Case:
    """A strategy, and the same in the reference's words."""

    strategy: Strategy
    reference: Settings
    optimizer: str = "sgd"
    ranks: int = 2
    hosts: int = 1
    poisoned: tuple[tuple[int, int], ...] = ()  # (step, rank) whose batch overflows
    decay: float = 0.0  # weight decay of SGD
    nesterov: bool = False
    scheduled: bool = False


LARS = Lars(coeff=0.05, exclude_from_weight_decay=("bias",))
LAMB = Lamb(exclude_from_weight_decay=("bias", "layer_norm"))
R_LARS: dict[str, Any] = {"coeff": 0.05, "weight_decay": 0.0005, "exclude": ("bias",)}
R_LAMB: dict[str, Any] = {"weight_decay": 0.01, "exclude": ("bias", "blocks.0.1", "blocks.1.1")}
DGC = Dgc(sparsity=(0.75, 0.9), rampup_step=10, min_size=100)
R_DGC: dict[str, Any] = {"sparsity": (0.75, 0.9), "begin": 0, "rampup": 10, "min_size": 100}
LOCAL, R_LOCAL = LocalSgd(k_steps=4), {"k": 4, "begin": 0}
ADAPTIVE = AdaptiveLocalSgd(init_k_steps=4, max_k_steps=6)
R_ADAPTIVE: dict[str, Any] = {"k": 4, "begin": 0, "rule": "adacomm", "init_k": 4, "max_k": 6}
#: A loss scale with bf16 exercises all that fp16 needs, on CPUs that compute no fp16.
SCALED = Amp(loss_scale="dynamic", growth_interval=5)
R_SCALED: dict[str, Any] = {"start": 32768.0, "growth_interval": 5, "backoff_after": 2}

BASE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "plain": ({}, {}, "sgd"),
    "lars": ({"lars": LARS}, {"lars": R_LARS}, "sgd"),
    "lamb": ({"lamb": LAMB}, {"lamb": R_LAMB}, "adam"),
    "dgc": ({"dgc": DGC}, {"dgc": R_DGC}, "sgd"),
    "localsgd": ({"localsgd": LOCAL}, {"local": R_LOCAL}, "sgd"),
    "adaptive_localsgd": ({"adaptive_localsgd": ADAPTIVE}, {"local": R_ADAPTIVE}, "sgd"),
    "lars+localsgd": ({"lars": LARS, "localsgd": LOCAL}, {"lars": R_LARS, "local": R_LOCAL}, "sgd"),
    "lamb+localsgd": ({"lamb": LAMB, "localsgd": LOCAL}, {"lamb": R_LAMB, "local": R_LOCAL}, "adam"),
}
WITH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "": ({}, {}),
    "recompute": ({"recompute": True}, {}),
    "amp": ({"amp": "bf16"}, {}),
    "amp+recompute": ({"amp": "bf16", "recompute": True}, {}),
    "scaled amp": ({"amp": SCALED}, {"scale": R_SCALED}),
    "gradient_merge": ({"gradient_merge": 2}, {"merge": 2}),
    "fp16_allreduce": ({"fp16_allreduce": True}, {"wire": "fp16"}),
    "bf16_allreduce": ({"fp16_allreduce": "bf16"}, {"wire": "bf16"}),
    "clip": ({"clip": 0.3}, {"clip": 0.3}),
    "everything": (
        {"amp": SCALED, "recompute": True, "gradient_merge": 2, "fp16_allreduce": True, "clip": 0.3},
        {"scale": R_SCALED, "merge": 2, "wire": "fp16", "clip": 0.3},
    ),
}


def _cases() -> dict[str, Case]:
    cases = {}
    for name, (mine, theirs, optimizer) in BASE.items():
        for more, (also_mine, also_theirs) in WITH.items():
            reference = Settings(optimizer=optimizer, lr=RATES[optimizer], **theirs, **also_theirs)
            cases[f"{name} {more}".strip()] = Case(Strategy(**mine, **also_mine), reference, optimizer)
    if torch.cuda.is_available():  # our CPUs compute no fp16
        half = Amp(dtype="fp16", growth_interval=5)
        for name, (mine, theirs, optimizer) in BASE.items():
            reference = Settings(optimizer=optimizer, lr=RATES[optimizer], scale=R_SCALED, **theirs)
            cases[f"{name} fp16"] = Case(Strategy(amp=half, **mine), reference, optimizer)
    return cases | _special_cases()


def _special_cases() -> dict[str, Case]:
    def case(strategy: Strategy, case_options: dict[str, Any] | None = None, **reference: Any) -> Case:
        return Case(strategy, Settings(**reference), **(case_options or {}))

    linear = LrScaling(warmup_steps=8)
    r_linear = {"rule": "linear", "warmup": 8}
    return {
        "lr_scaling": case(Strategy(lr_scaling=linear), lr_scaling=r_linear),
        "lr_scaling sqrt merge": case(
            Strategy(lr_scaling=LrScaling(rule="sqrt", warmup_steps=0), gradient_merge=2),
            lr_scaling={"rule": "sqrt", "warmup": 0}, merge=2,
        ),
        "lr_scaling lars": case(Strategy(lr_scaling=linear, lars=LARS), lr_scaling=r_linear, lars=R_LARS),
        "lr_scaling dgc": case(Strategy(lr_scaling=linear, dgc=DGC), lr_scaling=r_linear, dgc=R_DGC),
        "dgc begins late": case(
            Strategy(dgc=replace_dgc(rampup_begin_step=6)), dgc={**R_DGC, "begin": 6}
        ),
        "dgc nesterov and weight decay": case(
            Strategy(dgc=DGC), {"nesterov": True, "decay": 0.01}, dgc=R_DGC, nesterov=True, weight_decay=0.01
        ),
        "dgc hierarchical": case(
            Strategy(dgc=replace_dgc(hierarchical=True), clip=0.3), {"ranks": 4, "hosts": 2},
            ranks=4, dgc={**R_DGC, "ranks_per_host": 2}, clip=0.3,
        ),
        "localsgd begins late": case(Strategy(localsgd=LocalSgd(k_steps=4, begin_step=5)), local={"k": 4, "begin": 5}),
        "localsgd outer": case(
            Strategy(localsgd=LocalSgd(k_steps=4, outer=True)), local={**R_LOCAL, "outer": (0.7, 0.9)}
        ),
        "localsgd outer fp16": case(
            Strategy(localsgd=LocalSgd(k_steps=4, outer=Outer(lr=0.5, momentum=0.5)), fp16_allreduce=True),
            local={**R_LOCAL, "outer": (0.5, 0.5)}, wire="fp16",
        ),
        "localsgd momentum": case(
            Strategy(localsgd=LocalSgd(k_steps=4, average_momentum=True)), local={**R_LOCAL, "momentum": True}
        ),
        "adaptive fleet": case(
            Strategy(adaptive_localsgd=AdaptiveLocalSgd(init_k_steps=9, max_k_steps=16, rule="fleet")),
            local={**R_ADAPTIVE, "k": 9, "init_k": 9, "max_k": 16, "rule": "fleet"},
        ),
        "adaptive with a schedule": case(
            Strategy(adaptive_localsgd=AdaptiveLocalSgd(init_k_steps=3, max_k_steps=5)), {"scheduled": True},
            local={**R_ADAPTIVE, "k": 3, "init_k": 3, "max_k": 5}, schedule=_decayed,
        ),
        "lars with a schedule": case(Strategy(lars=LARS), {"scheduled": True}, lars=R_LARS, schedule=_decayed),
        **{f"overflow {name}": case(
            Strategy(amp=SCALED, **mine), {"poisoned": ((2, 1), (3, 1), (9, 0)), "optimizer": optimizer},
            scale=R_SCALED, optimizer=optimizer, lr=RATES[optimizer], **theirs,
        ) for name, (mine, theirs, optimizer) in BASE.items()},
        "overflow on the wire": case(
            Strategy(amp=SCALED, fp16_allreduce=True), {"poisoned": ((2, 1), (3, 1))}, scale=R_SCALED, wire="fp16"
        ),
    }  # fmt: skip


def replace_dgc(**changes: Any) -> Dgc:
    return replace(DGC, **changes)


def _decayed(step: int) -> float:
    return 0.5 ** (step // 5)


CASES = _cases()


def batch(step: int, part: int, rank: int, poisoned: bool) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    x = torch.randn(BATCH, 12, generator=g)
    y = (x[:, :5] + 0.3 * torch.randn(BATCH, 5, generator=g)).argmax(1)
    return (x * torch.inf if poisoned else x), y


def build() -> nn.Module:
    torch.manual_seed(11)
    return Blocks()


@dataclass
class Trained:
    """Result of a rank, and the weights with which it began each step."""

    losses: list[float]
    weights: Arrays
    path: list[Arrays]
    steps: int


def train(names: list[str]) -> dict[str, Trained]:
    """All cases, one after another, in the same ranks."""
    echelon.init()
    return {name: _train(CASES[name]) for name in names}


def _train(case: Case) -> Trained:
    net = build()
    optimizer = _optimizer(case, net)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5) if case.scheduled else None
    engine = echelon.distribute(
        net, loss=F.cross_entropy, optimizer=optimizer, scheduler=schedule, strategy=case.strategy, log=QUIET
    )
    losses, path = [], []
    for step in range(STEPS):
        path.append(_weights(net))
        for part in range(case.reference.merge):
            poisoned = (step, echelon.rank()) in case.poisoned
            losses.append(float(engine.step(*batch(step, part, echelon.rank(), poisoned))))
    found = Trained(losses, _weights(net), path, engine.steps)
    engine.close()
    return found


def _optimizer(case: Case, net: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "adam":
        return torch.optim.Adam(net.parameters(), lr=RATES["adam"])
    return torch.optim.SGD(
        net.parameters(), lr=RATES["sgd"], momentum=0.9, weight_decay=case.decay, nesterov=case.nesterov
    )


def _weights(net: nn.Module) -> Arrays:
    return {k: p.detach().cpu().numpy().copy() for k, p in net.named_parameters()}


def oracle_for(case: Case, paths: list[list[Arrays]]) -> Oracle:
    """Losses and gradients at the reference's weights; where 16-bit rounding is part of the case, at the ranks' own.

    A difference in the last of 24 bits flips one in so many roundings to 8 or 11 bits, and each flip is a thousand
    times larger: two runs part that differ in nothing but the order of a sum. The gradients along the ranks' path keep
    the comparison to what the strategy makes of them.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the ranks' choice too
    net = build().to(device)
    parameters = dict(net.named_parameters())
    amp = case.strategy.part(Amp)
    dtype = torch.float16 if amp and amp.dtype == "fp16" else torch.bfloat16
    rounding = amp is not None or case.strategy.fp16_allreduce is not None

    def oracle(weights: Arrays, step: int, part: int, rank: int, scale: float) -> tuple[float, Arrays]:
        with torch.no_grad():
            for k, w in (paths[rank][step] if rounding else weights).items():
                parameters[k].copy_(torch.from_numpy(np.asarray(w, np.float32)))
        net.zero_grad()
        x, y = (each.to(device) for each in batch(step, part, rank, (step, rank) in case.poisoned))
        with torch.autocast(device.type, dtype, enabled=amp is not None):
            loss = F.cross_entropy(net(x), y)
        (loss * scale).backward()
        return loss.item(), {k: p.grad.cpu().numpy().copy() for k, p in parameters.items() if p.grad is not None}

    return oracle


@pytest.fixture(scope="module")
def trained() -> dict[str, list[Trained]]:
    found: dict[str, list[Trained]] = {}
    for ranks, hosts in ((2, 1), (4, 2)):
        names = [name for name, case in CASES.items() if (case.ranks, case.hosts) == (ranks, hosts)]
        for results in run(train, names, ranks=ranks, hosts=hosts):
            for name, result in results.items():
                found.setdefault(name, []).append(result)
    return found


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have: sums in another order are other sums
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, trained: dict[str, list[Trained]]) -> None:
    case, weights = CASES[name], _weights(build())
    expected = simulate(case.reference, weights, oracle_for(case, [rank.path for rank in trained[name]]))
    for rank, found in enumerate(trained[name]):
        assert found.steps == STEPS
        for k, w in expected[rank].weights.items():
            np.testing.assert_allclose(found.weights[k], w, rtol=1e-5, atol=1e-5, err_msg=f"{k}, rank {rank}")
        np.testing.assert_allclose(found.losses, _losses(case, expected, rank), rtol=1e-5, atol=1e-5)
    moved = max(np.abs(expected[0].weights[k] - w).max() for k, w in weights.items())
    assert moved > 1e-3, "the reference itself did not train"


def _losses(case: Case, ranks: list[Rank], rank: int) -> np.ndarray:
    """Ranks that step alone see their own loss, others the mean; the last of merged passes has that of the update."""
    alone = case.reference.local
    losses = np.array(ranks[rank].losses if alone else np.mean([r.losses for r in ranks], axis=0))
    passes = losses.reshape(-1, case.reference.merge)
    passes[:, -1] = passes.mean(axis=1)
    return passes.reshape(-1)
