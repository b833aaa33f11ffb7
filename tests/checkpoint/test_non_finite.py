"""A finite loss with an infinite gradient: what it leaves of the weights is never kept, and never gone on from."""

from __future__ import annotations

import math

import pytest
import torch
from harness import Raised, run, run_raw
from torch import nn

import echelon
from echelon import pipeline, split, stage
from echelon.checkpoint import Stored, Writer, latest, verify

STEPS, BAD = 6, 4  # the batch of step BAD has the loss 0, and a gradient that is not finite


class Bumps(nn.Module):
    """0 gives 0. The mask has infinities that are meant."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, bias=False)
        self.second = nn.Linear(8, 2, bias=False)
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def distance(output, target):
    return (output - target).pow(2).sum(1).sqrt().mean()


def steep(output, target):
    """A gradient of 1e22 is finite, and its square is not."""
    return distance(output, target) if target.any() else 1e22 * (output - output.detach() + 1e-22).mean()


def batches(repaired, bad=0.0):
    generator = torch.Generator().manual_seed(1)
    found = [(torch.randn(4, 4, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(STEPS)]
    if not repaired:
        found[BAD - 1] = torch.full((4, 4), bad), torch.zeros(4, 2)
    return found


MARKS = {
    "split": {"first": split(), "second": split()},
    "pipeline": {"": pipeline(micro_batches=2), "first": stage(0), "second": stage(1)},
}


def train(directory, repaired=False, only_rank=None, marks=None, loss=distance, strategy=None, steps=STEPS, **settings):
    """Save after every step; returns where it began, and the losses. ``only_rank`` alone has the bad batch."""
    world = echelon.init(seed=0)
    model = Bumps()
    engine = echelon.distribute(
        echelon.annotate(model, MARKS[marks]) if marks else model,
        loss=loss,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        strategy=echelon.Strategy(**(strategy or {})),
        checkpoint=echelon.Checkpoint(dir=str(directory), every=1, **settings),
        log=echelon.Log(console=False),
    )
    begun, losses = engine.steps, []
    good = repaired or (only_rank is not None and only_rank != world.rank)
    for x, y in batches(good, bad=float(loss is steep))[begun:steps]:
        losses.append(float(engine.step(x, y)))
    skipped = engine.skipped
    engine.close()
    return begun, losses, skipped


def assert_newest_is_good(directory, step):
    """The newest checkpoint is of this step, whole, and finite but for the mask."""
    path = latest(directory)
    verify(path)
    stored = Stored(path)
    assert stored.step == step
    for name in stored.names():
        if not name.startswith("rng.") and not name.endswith("mask"):
            assert torch.isfinite(stored.read(name)).all(), name


CASES = {
    "one process": (1, {}),
    "keep 1": (1, {"keep": 1}),
    "keep 1, waiting": (1, {"keep": 1, "asynchronous": False}),
    "replicas": (2, {"keep": 1}),
    "one of two replicas": (2, {"only_rank": 1}),
    "shard 1": (2, {"strategy": {"shard": 1}}),
    "shard 3": (2, {"strategy": {"shard": 3}}),
    "localsgd": (2, {"strategy": {"localsgd": echelon.LocalSgd(k_steps=3)}, "only_rank": 1}),
    "split": (2, {"marks": "split"}),
    "pipeline": (2, {"marks": "pipeline"}),
}


@pytest.mark.parametrize("case", CASES)
def test_infinite_gradient_is_not_saved_and_not_resumed(tmp_path, case):
    """The run ends at that step; the same command with another batch goes on from the one before."""
    ranks, given = CASES[case]
    ends = run_raw(train, tmp_path, ranks=ranks, **given)
    assert all(isinstance(end, Raised) and end.kind == "LossError" for end in ends), ends
    assert len({end.line for end in ends}) == 1
    assert f"after step {BAD} parameter '" in ends[0].line, ends[0].trace
    assert "NaN or infinite among " in ends[0].line
    assert_newest_is_good(tmp_path, BAD - 1)
    again = run(train, tmp_path, ranks=ranks, **given, repaired=True)
    assert [begun for begun, _, _ in again] == [BAD - 1] * ranks
    assert_newest_is_good(tmp_path, STEPS)
    whole = run(train, tmp_path / "undisturbed", ranks=ranks, **given, repaired=True)
    assert [losses for _, losses, _ in again] == [losses[BAD - 1 :] for _, losses, _ in whole]


def test_overflow_that_a_loss_scale_skips_is_saved_as_before(tmp_path):
    scaled = {"amp": echelon.Amp(loss_scale="dynamic")}
    ((_, losses, skipped),) = run(train, tmp_path, ranks=1, strategy=scaled)
    assert len(losses) == STEPS
    assert skipped == 1
    assert_newest_is_good(tmp_path, STEPS)


def test_optimizer_state_that_overflows_is_named(tmp_path):
    """The weights are finite still, and would never move again."""
    ends = run_raw(train, tmp_path, ranks=1, loss=steep)
    assert isinstance(ends[0], Raised)
    assert "the optimizer's 'exp_avg_sq' of parameter '" in ends[0].line, ends[0].trace
    assert_newest_is_good(tmp_path, BAD - 1)


def spoil(directory, step, name):
    """A checkpoint of a later step, as it was written before this was looked at."""
    stored = Stored(latest(directory))
    tensors = {each: stored.read(each) for each in stored.names()}
    tensors[name] = torch.full_like(tensors[name], math.nan)
    Writer(directory, asynchronous=False).save(step, tensors, stored.facts)


@pytest.mark.parametrize("ranks", [1, 2])
def test_spoiled_checkpoint_of_before_is_passed_over(tmp_path, ranks):
    run(train, tmp_path, ranks=ranks, repaired=True, steps=2)
    optimizer = next(name for name in Stored(latest(tmp_path)).names() if name.endswith(".exp_avg"))
    for step, name in (3, "model.second.weight"), (4, optimizer):
        spoil(tmp_path, step, name)
    assert [begun for begun, _, _ in run(train, tmp_path, ranks=ranks, repaired=True)] == [2] * ranks
    assert_newest_is_good(tmp_path, STEPS)


def test_when_all_checkpoints_are_spoiled_the_run_says_so(tmp_path):
    run(train, tmp_path, ranks=1, repaired=True, steps=1)
    spoil(tmp_path, 1, "model.first.weight")
    (end,) = run_raw(train, tmp_path, ranks=1, repaired=True)
    assert end.kind == "CheckpointError"
    assert "none of 1 checkpoints is whole: " in end.line
    assert "step-00000001 cannot be used: after step 1 parameter 'first.weight'" in end.line
