"""Losses that average over something else than rows: replicas, merged passes and micro-batches give one process's
numbers, without a word from the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import ON_GPU, run, tolerance_of
from torch import Tensor, nn

import echelon
from echelon import Strategy, pipeline, stage
from echelon.parallel.loss.loss_reduction import find_terms

VOCAB, STEPS, ROWS, LENGTH = 13, 5, 12, 11


class Tagger(nn.Module):
    """A small model of text, with a loss for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.hidden = nn.Linear(8, 16)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(x))))


class OwnLoss(Tagger):
    """Returns its loss itself, as models of transformers do; labels are shifted inside."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(input_ids)
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return {"loss": F.cross_entropy(logits.float().view(-1, VOCAB), shifted.reshape(-1)), "logits": logits}


WEIGHTS = torch.linspace(0.2, 2.0, VOCAB)


def per_token(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), y, reduction="none")


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ignored": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "by class": lambda z, y: F.cross_entropy(z.transpose(1, 2), y, weight=WEIGHTS.to(z.device)),
    "smoothed": lambda z, y: F.cross_entropy(z.transpose(1, 2), y, label_smoothing=0.1),
    "nll": lambda z, y: 2 * F.nll_loss(z.log_softmax(-1).transpose(1, 2), y),
    "masked": lambda z, y: (per_token(z, y) * (y >= 0)).sum() / (y >= 0).sum().clamp(min=1),
    "picked": lambda z, y: per_token(z, y)[y >= 0].mean(),
    "counted": lambda z, y: (per_token(z, y) * (y >= 0)).sum() / int((y >= 0).sum()),
    "sum": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum") * 0.02,
    "sum of two": lambda z, y: 0.02 * (per_token(z, y).sum() + 0.1 * z.square().sum(-1).sum()),
    "rows": lambda z, y: (per_token(z, y).sum(1) / (y >= 0).sum(1)).mean(),
}


def batches() -> list[tuple[Tensor, Tensor]]:
    """Rows whose lengths differ wildly, and a last batch that is short."""
    g = torch.Generator().manual_seed(3)
    found = []
    for step in range(STEPS):
        rows = ROWS if step < STEPS - 1 else 7
        x = torch.randint(VOCAB, (rows, LENGTH), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (rows,), generator=g)
        lengths[: rows // 2] = 2  # the first rank has few tokens
        y = torch.where(
            torch.arange(LENGTH) < lengths[:, None], torch.randint(VOCAB, (rows, LENGTH), generator=g), -100
        )
        found.append((x, y))
    return found


def train(
    case: str, strategy: Strategy | None = None, marks: dict[str, Any] | None = None, merge: int = 1
) -> dict[str, Any]:
    torch.manual_seed(5)
    model: nn.Module = OwnLoss() if case == "own" else Tagger()
    if marks:
        echelon.annotate(model, marks)
    engine = echelon.distribute(
        model,
        loss=None if case == "own" else LOSSES[case],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        strategy=strategy,
        log=echelon.Log(console=False),
    )
    lines: list[str] = []
    engine._run.voice.say = lambda text, kind="notice": lines.append(text)  # type: ignore[method-assign, assignment]
    losses = []
    for x, y in batches():
        share = torch.arange(len(x)).tensor_split(echelon.world_size() * merge if not marks else merge)
        for i in range(merge):
            at = share[i if marks else i * echelon.world_size() + echelon.rank()]
            batch = {"input_ids": x[at], "labels": y[at]} if case == "own" else (x[at], y[at])
            loss = float(engine.step(batch) if case == "own" else engine.step(*batch))
        losses.append(loss)
    data = [{"input_ids": x, "labels": y} if case == "own" else (x, y) for x, y in batches()[echelon.rank() : 4 : 2]]
    judged = engine.evaluate(data if echelon.world_size() > 1 and not marks else _all(case))["loss"]
    result = {"losses": losses, "weights": engine.whole_state(), "lines": lines, "judged": judged}
    engine.close()
    return result


def _all(case: str) -> list[Any]:
    return [{"input_ids": x, "labels": y} if case == "own" else (x, y) for x, y in batches()[:4]]


def alone(case: str) -> dict[str, Any]:
    """The same in plain torch."""
    torch.manual_seed(5)
    model: nn.Module = OwnLoss() if case == "own" else Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for x, y in batches():
        loss = model(x, y)["loss"] if case == "own" else LOSSES[case](model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    x, y = (torch.cat(parts) for parts in zip(*batches()[:4], strict=True))
    judged = float((model(x, y)["loss"] if case == "own" else LOSSES[case](model(x), y)).detach())
    if case.startswith("sum"):
        judged /= len(x)  # the mean over samples
    return {"losses": losses, "weights": dict(model.state_dict()), "judged": judged}


CASES = ["own", *LOSSES]
LOSSES["root"] = lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()).sqrt()
LOSSES["two means"] = lambda z, y: F.cross_entropy(z.transpose(1, 2), y) + z.square().mean()


def assert_same(mine: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    found = {key: torch.tensor(mine[key]) for key in ("losses", "judged")} | mine["weights"]
    known = {key: torch.tensor(expected[key]) for key in ("losses", "judged")} | expected["weights"]
    for name, value in known.items():
        say = f"{what}, {name}: ".__add__
        torch.testing.assert_close(found[name], value, rtol=tolerance_of(2e-6), atol=tolerance_of(2e-6), msg=say)


def train_all(cases: list[str], **options: Any) -> dict[str, Any]:
    echelon.init()
    return {case: train(case, **options) for case in cases}


def stages(micro_batches: int) -> dict[str, Any]:
    return {"": pipeline(micro_batches=micro_batches), "embed": stage(0), "hidden": stage(0), "head": stage(1)}


LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "shard 2": {"strategy": Strategy(shard=2)},
    "shard 3, merged": {"strategy": Strategy(shard=3, gradient_merge=2), "merge": 2},
    "merged": {"strategy": Strategy(gradient_merge=3), "merge": 3},
    "pipeline": {"marks": stages(4)},
    "pipeline, merged": {
        "strategy": Strategy(gradient_merge=2), "marks": stages(2), "merge": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_means_over_targets_equal_one_process(layout: str) -> None:
    results = run(train_all, CASES, ranks=2, **LAYOUTS[layout])
    for case in CASES:
        for mine in results:
            assert_same(mine[case], alone(case), f"{layout}, {case}")


def test_merged_passes_of_one_process_equal_one_pass() -> None:
    for case, mine in run(train_all, CASES, ranks=1, strategy=Strategy(gradient_merge=3), merge=3)[0].items():
        assert_same(mine, alone(case), case)


def lines_of(result: list[dict[str, Any]], case: str) -> list[str]:
    return [line for line in result[0][case]["lines"] if line.startswith("loss:")]


def test_what_is_counted_is_said_in_one_line() -> None:
    result = run(train_all, [*CASES, "root", "two means"], ranks=2)
    few = "loss: a mean over 12 of 66 targets in this batch of 6 rows; every rank is weighted by the targets that count"
    assert lines_of(result, "ignored") == [few]
    assert lines_of(result, "own")[0].startswith("loss: a mean over 6 of 66 targets")
    if not ON_GPU:  # where only the first batch is looked at, whose targets could be all entries of shorter rows
        assert lines_of(result, "masked")[0].startswith("loss: a mean over ")
    assert lines_of(result, "rows") == []
    (added,) = lines_of(result, "sum")
    assert added.startswith("loss: a sum over samples (NllLoss): losses and gradients of replicas are added")
    (unseen,) = lines_of(result, "root")
    assert unseen.startswith("loss: the number it averages over cannot be read (Sqrt); ranks and passes are weighted")
    (different,) = [line for line in lines_of(result, "two means") if "different numbers" in line]
    assert different.startswith("loss: its terms (NllLoss2D, Mean) average over different numbers of targets")


def test_a_sum_is_averaged_where_the_strategy_says_so() -> None:
    averaged = Strategy(reduction=echelon.Reduction(op="mean"))
    plain, mean = (run(train_all, ["sum"], ranks=2, strategy=how)[0]["sum"] for how in (None, averaged))
    assert mean["losses"][0] == pytest.approx(plain["losses"][0] / 2, rel=tolerance_of(1e-6))


@pytest.mark.parametrize(
    ("loss", "kinds"),
    [
        (lambda x, w: x.sum() / 6, ["mean"]),
        (lambda x, w: x.sum() / 1000.0, ["sum"]),  # a constant, which is the same for half a batch
        (lambda x, w: x.sum() / 5, ["sum"]),  # of a row's entries
        (lambda x, w: x.mean() + 1e-3 * w.square().sum(), ["mean", "weights"]),
        (lambda x, w: x.mean() + 1e-3 * w.norm(), ["mean", "weights"]),
        (lambda x, w: torch.stack([x.mean(), x.square().mean()]).mean(), ["mean", "mean"]),
        (lambda x, w: torch.exp(-w[0, 0]) * x.mean(), ["mean"]),
        (lambda x, w: 1 - x.mean(), ["mean"]),
        (lambda x, w: x.logsumexp(0).sum(), ["unknown"]),
        (lambda x, w: F.mse_loss(x, x.detach() + 1).sqrt(), ["unknown"]),
        (lambda x, w: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid(), reduction="sum"), ["sum"]),
    ],
)
def test_terms_of_a_loss_are_told_apart(loss: Callable[[Tensor, Tensor], Tensor], kinds: list[str]) -> None:
    layer = nn.Linear(4, 5)
    assert [term.kind for term in find_terms(loss(layer(torch.randn(6, 4)), layer.weight), 6)] == kinds


def own_loop(case: str) -> dict[str, Any]:
    """One process's loop, with the engine's two calls in place of backward and step."""
    echelon.init()
    torch.manual_seed(5)
    model: nn.Module = OwnLoss() if case == "own" else Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    engine = echelon.distribute(model, optimizer=optimizer, log=echelon.Log(console=False))
    losses = []
    for x, y in batches():
        at = torch.arange(len(x)).tensor_split(echelon.world_size())[echelon.rank()]
        mine = x[at].to(echelon.device()), y[at].to(echelon.device())
        loss = model(*mine)["loss"] if case == "own" else LOSSES[case](model(mine[0]), mine[1])
        engine.backward(loss)
        engine.update()
        losses.append(float(loss.detach()))
    result = {"losses": losses, "weights": engine.whole_state(), "judged": 0.0}
    engine.close()
    return result


def own_loops(cases: list[str]) -> dict[str, Any]:
    return {case: own_loop(case) for case in cases}


def test_loops_of_the_users_own_weigh_by_targets_too() -> None:
    results = run(own_loops, CASES, ranks=2)
    for case in CASES:
        expected = alone(case)
        for mine in results:
            assert_same({**mine[case], "losses": [], "judged": 0.0}, {**expected, "losses": [], "judged": 0.0}, case)


def disagreeing() -> tuple[list[str], float]:
    """A loss that is a sum on one rank and a mean on the other."""
    echelon.init()
    torch.manual_seed(5)
    model = Tagger()
    reduction = "sum" if echelon.rank() else "mean"
    engine = echelon.distribute(
        model,
        loss=lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction=reduction),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        log=echelon.Log(console=False),
    )
    lines: list[str] = []
    engine._run.voice.say = lambda text, kind="notice": lines.append(text)  # type: ignore[method-assign, assignment]
    loss = float(engine.step(*batches()[0]))
    engine.close()
    return lines, loss


def test_ranks_that_disagree_about_a_sum_average_and_say_so() -> None:
    (lines, loss), (_, other) = run(disagreeing, ranks=2)
    assert any("1 of 2 ranks take it for a sum over samples" in line for line in lines)
    assert loss == other


def ragged() -> list[str]:
    echelon.init()
    model = nn.Linear(1, 1)
    engine = echelon.distribute(
        model, loss=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log=echelon.Log(console=False)
    )
    lines: list[str] = []
    engine._run.voice.say = lambda text, kind="notice": lines.append(text)  # type: ignore[method-assign, assignment]
    for length in (5, 5, 7):
        engine.step(torch.ones(4, length, 1), torch.ones(4, length, 1))
    engine.close()
    return lines


def test_a_mean_over_padding_is_said() -> None:
    lines = [line for line in run(ragged, ranks=2)[0] if line.startswith("loss:")]
    assert len(lines) == 1
    assert lines[0].startswith("loss: a mean over all entries of rows that have 7 entries here and had 5 before")
