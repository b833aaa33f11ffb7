"""Losses that compare samples of the whole batch: one process's numbers on features gathered over replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import errors, run, tolerance_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from zoo import QUIET

import echelon
from echelon import Strategy, pipeline, split, stage
from echelon.nn import gather_batch

ROWS = 11


class Towers(nn.Module):
    """Two encoders, batch norm in one of them, and a scale that every replica uses on all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.text = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
        self.image_head = nn.Linear(8, 4)
        self.text_head = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen, read = self.image(image), self.text(text)
        return self.image_head(seen), self.text_head(read), self.scale.exp()


def clip_loss(output: tuple[Tensor, Tensor, Tensor], _: Tensor) -> Tensor:
    image, text = gather_batch(*output[:2])
    logits = output[2] * F.normalize(image, dim=1) @ F.normalize(text, dim=1).T
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def summed_loss(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    """Return a sum loss of which every replica has all addends."""
    image, text = gather_batch(*output[:2])
    return 0.01 * F.mse_loss(image @ text.T, torch.eye(len(image), device=image.device), reduction="sum")


def batch_of(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(rows, 6, generator=g), torch.randn(rows, 5, generator=g), torch.zeros(rows)


@dataclass
class Trained:
    losses: list[float]
    judged: float
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Job:
    """``marks``, ``options``: how the towers are spread and trained; ``loop``: by hand; ``micro``: micro-batches."""

    options: Any = ()
    marks: str = ""
    loop: bool = False
    micro: int = 1
    shares: tuple[int, ...] = ()
    summed: bool = False


MARKS: dict[str, dict[str, Any]] = {
    "": {},
    "split": {"image_head": split(), "text_head": split()},
    "pipeline": {
        "": pipeline(micro_batches=2),
        **dict.fromkeys(("image", "text"), stage(0)),
        **dict.fromkeys(("image_head", "text_head"), stage(1)),
    },
}


def train(jobs: list[Job]) -> list[Trained]:
    echelon.init()
    return [_train(job) for job in jobs]


def _train(job: Job) -> Trained:
    alone = echelon.world_size() == 1
    torch.manual_seed(5)
    model = Towers()
    echelon.annotate(model, MARKS[job.marks] if not alone or job.micro > 1 else {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    strategy = Strategy(fast=False, **({} if alone else dict(job.options)))
    cluster = echelon.cluster(average=2) if job.marks and echelon.world_size() == 4 else None
    engine = echelon.distribute(
        model, loss=summed_loss if job.summed else clip_loss, optimizer=optimizer, strategy=strategy, cluster=cluster,
        log=QUIET,
    )  # fmt: skip
    rows, losses = sum(job.shares), []
    for step in range(4):
        batch = batch_of(step, rows)
        replica = engine.world.data_rank
        begin = sum(job.shares[:replica])
        mine = batch if alone else tuple(part[begin : begin + job.shares[replica]] for part in batch)
        mine = _as_micro_batches(mine, job) if alone else mine
        losses.append(_by_hand(engine, model, mine, job) if job.loop else float(engine.step(*mine)))
    judged = engine.evaluate(TensorDataset(*batch_of(9, 7)), batch_size=12 // engine.plan.replicas)["loss"]
    return Trained(losses, judged, engine.whole_state())


def _as_micro_batches(batch: tuple[Tensor, ...], job: Job) -> tuple[Tensor, ...]:
    """The same rows, so that micro-batch i holds those of every replica's micro-batch i."""
    if job.micro == 1:
        return batch
    rows = torch.arange(len(batch[0])).view(len(job.shares), job.micro, -1).transpose(0, 1).reshape(-1)
    return tuple(part[rows] for part in batch)


def _by_hand(engine: echelon.Engine, model: nn.Module, batch: tuple[Tensor, ...], job: Job) -> float:
    batch = tuple(part.to(echelon.device()) for part in batch)
    loss = (summed_loss if job.summed else clip_loss)(model(*batch[:2]), batch[2])
    engine.backward(loss, samples=None if job.summed else len(batch[0]))
    engine.update()
    return float(loss.detach())


JOBS = {
    2: [
        Job(shares=(6, 5)),
        Job((("shard", 1),), shares=(6, 5)),
        Job((("shard", 3),), shares=(5, 6)),
        Job(loop=True, shares=(6, 5)),
        Job(summed=True, shares=(6, 5)),
        Job(summed=True, loop=True, shares=(4, 4)),
        Job(marks="split", shares=(8,)),
    ],
    3: [Job(shares=(5, 4, 2)), Job((("shard", 3),), shares=(4, 4, 4))],
    4: [Job(marks="pipeline", micro=2, shares=(4, 4)), Job(marks="split", shares=(5, 6))],
}


@pytest.mark.parametrize("ranks", JOBS)
def test_contrastive_loss_equals_one_process(ranks: int) -> None:
    jobs = JOBS[ranks]
    expected = run(train, jobs, ranks=1)[0]
    for results in run(train, jobs, ranks=ranks):
        for job, found, one in zip(jobs, results, expected, strict=True):
            torch.testing.assert_close(found.losses, one.losses, rtol=0, atol=tolerance_of(2e-6), msg=str(job))
            torch.testing.assert_close(found.weights, one.weights, rtol=0, atol=tolerance_of(2e-6))
            # evaluated in micro-batches, a pipeline compares others; a sum is that of the batch
            if job.marks != "pipeline" and not job.summed:
                assert found.judged == pytest.approx(one.judged, abs=tolerance_of(2e-6))


# ---- the end of the data ----


def train_to_the_end() -> Trained:
    """Eight samples, six to a batch: of the second batch, the last of three ranks has nothing."""
    echelon.init()
    torch.manual_seed(5)
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    engine = echelon.distribute(model, loss=clip_loss, optimizer=optimizer, strategy=Strategy(fast=False), log=QUIET)
    loader = engine.loader(TensorDataset(*batch_of(3, 8)), global_batch=6, shuffle=False, uneven="join")
    losses = [float(engine.step(*batch)) for _ in range(2) for batch in loader]
    judged = engine.evaluate(TensorDataset(*batch_of(4, 8)), batch_size=6 // echelon.world_size())
    return Trained(losses, judged["loss"], engine.whole_state())


def test_rank_without_samples_adds_no_rows() -> None:
    (expected,) = run(train_to_the_end, ranks=1)
    for found in run(train_to_the_end, ranks=3):
        torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=tolerance_of(2e-6))
        torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=tolerance_of(2e-6))
        assert found.judged == pytest.approx(expected.judged, abs=tolerance_of(2e-6))


# ---- mistakes ----


def test_one_process_gets_what_it_gives() -> None:
    rows, more = torch.randn(3, 2), torch.randn(3, 4)
    assert gather_batch(rows) is rows
    assert gather_batch(rows, more) == (rows, more)


def misuse(how: str) -> None:
    echelon.init()
    if how == "early":
        gather_batch(torch.zeros(2, 2))
    options: dict[str, Any] = {
        "alone": {"localsgd": echelon.LocalSgd(k_steps=2)},
        "sum": {"reduction": echelon.Reduction(op="sum")},
    }.get(how, {})
    model = nn.Linear(3, 2)
    engine = echelon.distribute(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda out, _: gather_batch(out).mean(),
        strategy=Strategy(fast=False, **options), log=QUIET,
    )  # fmt: skip
    if how == "late":
        rows = 2 + echelon.rank()
        engine.backward(gather_batch(model(torch.zeros(rows, 3, device=echelon.device()))).mean())
        engine.update(samples=rows)
    wide = 2 if how != "shapes" else 2 + echelon.rank()
    if how in ("scalar", "shapes"):
        gather_batch(torch.zeros(()) if how == "scalar" else torch.zeros(2, wide))
    engine.step(torch.zeros(2, 3), torch.zeros(2))


MISTAKES = {
    "early": "gather_batch(): no model is distributed; call echelon.distribute() first",
    "alone": "gather_batch(): replicas step alone here, each with weights of its own",
    "sum": "gather_batch(): every replica computes the loss of the whole batch, and Reduction(op='sum')",
    "late": "gather_batch() mixes gradients of all replicas, and their batches have different lengths",
    "scalar": "gather_batch(): takes tensors with a row for each sample, got a scalar",
    "shapes": "gather_batch(): replicas' rows are joined, so they may differ in dimension 0 only, got (2, 2), (2, 3)",
}


@pytest.mark.parametrize("how", MISTAKES)
def test_misuse_of_gathered_rows_is_one_line(how: str) -> None:
    for line in errors(misuse, how):
        assert line.startswith(f"UsageError: {MISTAKES[how]}")
