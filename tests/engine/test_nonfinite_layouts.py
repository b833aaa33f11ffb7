"""``on_nonfinite="skip"`` where ranks have parts of a model, groups, loss scales or steps of their own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from harness import run
from matrix import Trained, difference
from test_nonfinite import BATCHES, MARKS, POISONED, ROWS, SPIKED, data, loss_of, make
from zoo import QUIET, sgd

import echelon
from echelon import Amp, LocalSgd, Shard, Strategy

CASES: dict[str, dict[str, Any]] = {
    "stages of two replicas": {"marks": "stages"},
    "split of two replicas": {"marks": "split"},
    "shards in groups": {"shard": Shard(level=3, within=2), "clip": 0.3},
    "constant loss scale": {"amp": Amp(loss_scale=256.0)},
    "loss scale and stages": {"amp": Amp(loss_scale=256.0), "marks": "stages"},
    "loss scale and merged steps": {"amp": Amp(loss_scale=256.0), "gradient_merge": 2},
    "dgc": {"dgc": True},
}


def rows_of(seen: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.cat([torch.arange(number * ROWS, (number + 1) * ROWS) for number in seen])
    x, y = data()
    return x[at], y[at]


def train(seen: list[int], policy: Any, marks: str = "", **strategy: Any) -> tuple[Trained, int, list[str]]:
    model = make(norm=False)
    echelon.annotate(model, MARKS.get(marks, {}))
    engine = echelon.distribute(
        model, sgd(model), loss=loss_of, strategy=Strategy(fast=False, **strategy), on_nonfinite=policy, log=QUIET,
        cluster=echelon.cluster(average=2) if marks == "split" else None,
    )  # fmt: skip
    said: list[str] = []
    engine._run.say = lambda line, *_: said.append(line)  # type: ignore[method-assign,assignment]
    losses = [float(engine.step(*batch)) for batch in engine.loader(rows_of(seen), global_batch=ROWS, shuffle=False)]
    found = Trained(losses, engine.whole_state()), engine.skipped, said
    engine.close()
    return found


def both() -> dict[str, Any]:
    """Return, for each case, the run that skips bad batches and the one that never sees them."""
    echelon.init()
    found = {}
    for name, case in CASES.items():
        merge = case.get("gradient_merge", 1)
        bad = {bad // merge * merge + more for bad in (POISONED, SPIKED) for more in range(merge)}
        good = [number for number in range(BATCHES) if number not in bad]
        many, skipped, said = train(list(range(BATCHES)), "skip", **case)
        many.losses = [many.losses[number] for number in good]
        found[name] = many, skipped, said, train(good, "stop", **case)[0]
    return found


def test_skipped_steps_are_as_if_never_seen_in_every_layout() -> None:
    """Bit by bit, on all four ranks; each line names what is not finite, and in which batch."""
    for rank, found in enumerate(run(both, ranks=4)):
        for name, (many, skipped, said, never) in found.items():
            assert skipped == 2, (name, rank)
            assert many.losses == never.losses, (name, rank)
            assert all(torch.equal(value, never.weights[key]) for key, value in many.weights.items()), (name, rank)
            lines = [line for line in said if "is skipped: " in line]
            has_scale = "amp" in CASES[name]  # it skips an overflow by itself
            assert len(lines) == (1 if has_scale else 2), (name, said)
            merges = "gradient_merge" in CASES[name]  # which of the two batches it was is not known any more
            what = ", or of the 1 batch merged before" if merges else "the loss is nan on rank"
            assert what in lines[0], (name, said)
            assert has_scale or "the gradient of '" in lines[1], (name, said)
            assert all("epoch 0, batch " in line and ": samples " in line for line in lines), (name, said)


def local() -> tuple[dict[str, torch.Tensor], int]:
    echelon.init()
    model = make(norm=False)
    engine = echelon.distribute(
        model, sgd(model), loss=loss_of, log=QUIET, on_nonfinite="skip",
        strategy=Strategy(fast=False, localsgd=LocalSgd(k_steps=2)),
    )  # fmt: skip
    for batch in engine.loader(data(), global_batch=ROWS, shuffle=False):
        engine.step(*batch)
    found = engine.whole_state(), engine.skipped
    engine.close()
    return found


def test_rank_that_steps_alone_skips_alone() -> None:
    """LocalSGD, beside plain torch: each rank skips its own bad part, and averages with the other as before."""
    models = [make(norm=False), make(norm=False)]
    models[1] = copy.deepcopy(models[0])
    optimizers, (x, y) = [sgd(model) for model in models], data()
    skipped = [0, 0]
    for number in range(BATCHES):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            first = number * ROWS + rank * ROWS // 2
            loss = loss_of(model(x[first : first + ROWS // 2]), y[first : first + ROWS // 2])
            optimizer.zero_grad()
            loss.backward()
            if loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None):
                optimizer.step()
            else:
                skipped[rank] += 1
        if number % 2:
            with torch.no_grad():
                for pair in zip(*(model.parameters() for model in models), strict=True):
                    mean = (pair[0] + pair[1]) / 2
                    for one in pair:
                        one.copy_(mean)
    one = Trained([0.0], {name: value.detach() for name, value in models[0].state_dict().items()})
    assert skipped == [1, 1]
    for rank, (weights, count) in enumerate(run(local, ranks=2)):
        assert difference(Trained([0.0], weights), one) < 1e-5
        assert count == skipped[rank]
