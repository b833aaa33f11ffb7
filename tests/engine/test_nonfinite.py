"""``on_nonfinite``: a run with bad batches equals plain torch that skips them, or a run that never saw them."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import errors, run
from matrix import Trained, difference
from torch import Tensor, nn
from zoo import QUIET, sgd

import echelon
from echelon import Checkpoint, OnNonfinite, Strategy
from echelon.base.errors import LossError, UsageError
from echelon.engine.nonfinite import refuse_combination
from echelon.engine.on_nonfinite import Action

ROWS, BATCHES = 8, 8
#: Batches with a NaN among the inputs, and with a finite loss and an infinite gradient.
POISONED, SPIKED = 2, 5


class Spike(torch.autograd.Function):
    """Multiplies gradients by infinity if a target is 9."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(target)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (target,) = ctx.saved_tensors
        return gradient * torch.where((target == 9).any(), torch.inf, 1.0), None


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(Spike.apply(output, target), target.clamp(max=3))  # type: ignore[no-untyped-call]


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(7)
    x, y = torch.randn(ROWS * BATCHES, 6, generator=g), torch.randint(4, (ROWS * BATCHES,), generator=g)
    x[POISONED * ROWS + ROWS - 1, 2] = torch.nan  # in the last rank's part
    y[SPIKED * ROWS] = 9
    return x, y


def make(norm: bool) -> nn.Sequential:
    torch.manual_seed(3)
    middle = nn.BatchNorm1d(12) if norm else nn.LayerNorm(12)
    return nn.Sequential(nn.Linear(6, 12), middle, nn.Tanh(), nn.Linear(12, 4))


def plain(norm: bool, merge: int, clip: float | None) -> Trained:
    """Train with plain torch, and apply nothing of an update that is not finite."""
    model, losses = make(norm), []
    optimizer, (x, y) = sgd(model), data()
    for first in range(0, len(x), ROWS * merge):
        before, own = copy.deepcopy(dict(model.named_buffers())), []
        for at in range(first, first + ROWS * merge, ROWS):
            own.append(loss_of(model(x[at : at + ROWS]), y[at : at + ROWS]))
            (own[-1] / merge).backward()
        total = sum(float(loss.detach()) for loss in own) / merge
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if torch.tensor(total).isfinite() and all(grad.isfinite().all() for grad in grads):
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(total)
        else:
            model.load_state_dict(before, strict=False)
        optimizer.zero_grad()
    return Trained(losses, {name: value.detach() for name, value in model.state_dict().items()})


MARKS: dict[str, dict[str, Any]] = {
    "stages": {"": echelon.pipeline(micro_batches=2), "0": echelon.stage(0), "1": echelon.stage(0),
               "2": echelon.stage(1), "3": echelon.stage(1)},
    "split": {"0": echelon.split(), "3": echelon.split("row")},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "replicas": {"norm": True},
    "clip": {"norm": True, "clip": 0.3},
    "merge": {"merge": 2},
    "shard1": {"shard": 1, "norm": True},
    "shard2": {"shard": 2, "merge": 2},
    "shard3": {"shard": 3, "clip": 0.3},
    "stages": {"marks": "stages"},
    "split": {"marks": "split"},
    "own loop": {"norm": True, "by_hand": True},
}


def skip_one(norm: bool = False, merge: int = 1, clip: float | None = None, shard: Any = None, marks: str = "",
             by_hand: bool = False) -> tuple[Trained, int]:  # fmt: skip
    model = make(norm)
    echelon.annotate(model, MARKS.get(marks, {}))
    engine = echelon.distribute(
        model,
        sgd(model),
        loss=loss_of,
        strategy=Strategy(gradient_merge=merge, clip=clip, shard=shard, fast=False),
        cluster=echelon.cluster(average=2) if marks == "split" else None,
        on_nonfinite="skip",
        log=QUIET,
    )
    losses = []
    for number, (x, y) in enumerate(engine.loader(data(), global_batch=ROWS, shuffle=False)):
        if by_hand:
            engine.backward(loss := loss_of(engine.model(x), y))
            engine.update()
            losses.append(float(loss.detach()))
            continue
        loss = engine.step(x, y)
        if (number + 1) % merge == 0:
            losses.append(float(loss))
    weights, skipped = engine.whole_state(), engine.skipped
    assert engine.steps == BATCHES // merge
    engine.close()
    bad = {POISONED // merge, SPIKED // merge}
    return Trained([loss for at, loss in enumerate(losses) if at not in bad], weights), skipped


def skip_all() -> dict[str, tuple[Trained, int]]:
    echelon.init()
    return {name: skip_one(**case) for name, case in CASES.items()}


def test_skipped_steps_leave_the_numbers_of_plain_torch() -> None:
    for rank, found in enumerate(run(skip_all, ranks=2)):
        for name, case in CASES.items():
            many, skipped = found[name]
            one = plain(case.get("norm", False), case.get("merge", 1), case.get("clip"))
            if name == "own loop":  # each rank has only its own losses there
                many.losses = one.losses
            assert skipped == 2, (name, rank)
            assert difference(many, one) < 1e-5, (name, rank)


# ---- rollback ----


class Once:
    """A loss that is NaN on the last rank at one step, the first time."""

    def __init__(self, step: int) -> None:
        self.step, self.fired = step, False

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        fires = self.engine.steps == self.step and not self.fired
        self.fired |= fires
        bad = fires and echelon.rank() == echelon.world_size() - 1
        return F.cross_entropy(output, target.clamp(max=3)) * (torch.nan if bad else 1.0)

    engine: Any


def rolled(directory: str, policy: Action, shard: Any, never: tuple[int, int] | None) -> dict[str, Any]:
    """Train three epochs; ``never`` is the epoch and number of a batch that the engine never gets."""
    echelon.init(seed=0)
    model = make(norm=True)
    model.insert(3, nn.Dropout(0.3))
    optimizer, loss = sgd(model), Once(-1 if never else 6)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    loss.engine = engine = echelon.distribute(
        model, optimizer, loss=loss, scheduler=scheduler, strategy=Strategy(shard=shard, fast=False), log=QUIET,
        checkpoint=Checkpoint(dir=directory, every=4), on_nonfinite=policy,
    )  # fmt: skip
    g = torch.Generator().manual_seed(2)
    rows = torch.randn(40, 6, generator=g), torch.randint(4, (40,), generator=g)
    loader = engine.loader(rows, global_batch=8)
    losses = {}
    for epoch in loader.epochs(3):
        for number, (x, y) in enumerate(loader):
            if (epoch, number) != never:
                before, value = engine.steps, float(engine.step(x, y))
                losses |= {engine.steps: value} if engine.steps > before else {}  # else it went back
    weights, steps = engine.whole_state(), engine.steps
    engine.close()
    return {"losses": losses, "weights": weights, "steps": steps}


@pytest.mark.parametrize("shard", [None, 3])
def test_rollback_ends_like_a_run_that_never_saw_the_batch(tmp_path: Path, shard: Any) -> None:
    """Step 7 is the second batch of the second epoch; the checkpoint before it is of the first."""
    back = run(rolled, str(tmp_path / "a"), "rollback", shard, None, ranks=2)
    never = run(rolled, str(tmp_path / "b"), "stop", shard, (1, 1), ranks=2)
    for one, other in zip(back, never, strict=True):
        assert one["steps"] == other["steps"] == 14
        assert {step: one["losses"][step] for step in other["losses"]} == other["losses"]
        assert all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())


# ---- limits and lines ----


def always(policy: OnNonfinite, directory: str | None, at: int, rows: int = 48) -> None:
    echelon.init()
    model = make(norm=False)
    engine = echelon.distribute(
        model, sgd(model), loss=loss_of, on_nonfinite=policy, log=QUIET,
        checkpoint=Checkpoint(dir=directory, every=2) if directory else None,
    )  # fmt: skip
    x, y = torch.ones(rows, 6), torch.zeros(rows, dtype=torch.long)
    x[at:] = torch.nan
    for batch in engine.loader((x, y), global_batch=4, shuffle=False):
        engine.step(*batch)


def test_a_run_stops_after_the_limit_and_names_the_batch(tmp_path: Path) -> None:
    bad = "on ranks 0, 1 (rank 0: epoch 0, batch {0}: samples {1}, {2}; rank 1: epoch 0, batch {0}: samples {3}, {4})"
    steps = {
        "stop": (None, "the loss is nan at step 4 " + bad.format(3, 12, 13, 14, 15)),
        "skip": (None, f"step 6: the loss is nan {bad.format(5, 20, 21, 22, 23)}; 2 steps before it were skipped"),
        "rollback": (tmp_path, f"the loss is nan {bad.format(5, 20, 21, 22, 23)}; the run went back to step 2 2 times"),
    }
    for action, (directory, line) in steps.items():
        policy = OnNonfinite(action=action, limit=2)  # type: ignore[arg-type]
        for found in errors(always, policy, directory and str(directory), 12, ranks=2):
            assert line in found, found


def test_rollback_without_a_checkpoint_before_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LossError, match="there is no checkpoint before it to go back to"):
        always(OnNonfinite(action="rollback"), str(tmp_path), 0)


def differing() -> None:
    echelon.init()
    model = make(norm=False)
    echelon.distribute(model, sgd(model), loss=loss_of, on_nonfinite=("stop", "skip")[echelon.rank()])


def test_policies_that_differ_or_cannot_be_kept_are_refused() -> None:
    assert all("rank 1 was given on_nonfinite=" in line for line in errors(differing, ranks=2))
    cases = [
        ("skip", {"backend": SimpleNamespace(pushes=True)}, {}, "servers apply the push of each worker"),
        ("skip", {}, {"low_memory": object()}, "low_memory applies each gradient while backward runs"),
        ("rollback", {}, {}, "there are no checkpoints to go back to"),
        ("rollback", {"settings": Checkpoint(dir="x", every=1)}, {"local": object()}, "ranks of localsgd step alone"),
        ("rollback", {"settings": Checkpoint(dir="x", every=1)}, {"gradient_merge": 2}, "which of 2 merged batches"),
    ]
    for action, given, planned, line in cases:
        backend = given.get("backend", SimpleNamespace(pushes=False))
        job = SimpleNamespace(backend=backend, checkpoints=SimpleNamespace(settings=given.get("settings")))
        plan = SimpleNamespace(**{"low_memory": None, "local": None, "gradient_merge": 1, **planned})
        with pytest.raises(UsageError, match=f"on_nonfinite='{action}': {line}"):
            refuse_combination(OnNonfinite(action=action), plan, job)  # type: ignore[arg-type]
