"""Evaluation over ranks equals evaluation in one process, whatever the remainder."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import nn
from torch.utils.data import TensorDataset
from zoo import QUIET, build

import echelon
from echelon.base.errors import DataError, UsageError


def data(samples: int) -> TensorDataset:
    g = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(samples, 3, 8, 8, generator=g), torch.randint(5, (samples,), generator=g))


def evaluated(samples: int) -> tuple[dict[str, float], bool]:
    echelon.init()
    net, loss = build("convnet")
    net.body[1].eval()  # type: ignore[index, union-attr]
    engine = echelon.distribute(net, loss=loss, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), log=QUIET)
    worst = {"worst": lambda output, target: F.cross_entropy(output, target, reduction="none")}
    results = engine.evaluate(data(samples), batch_size=4, metrics={"accuracy": "accuracy", **worst})
    side_by_side = engine.evaluate(data(samples).tensors, metrics=["accuracy"])
    assert side_by_side == pytest.approx({name: results[name] for name in side_by_side}, rel=1e-5)
    modes_kept = net.training and not net.body[1].training and net.body[4].training  # type: ignore[index, union-attr]
    return results, bool(modes_kept)


@pytest.mark.parametrize("samples", [3, 16, 21])
def test_every_sample_counts_once(samples: int) -> None:
    expected, _ = run(evaluated, samples, ranks=1)[0]
    for results, modes_kept in run(evaluated, samples, ranks=3):
        assert results == pytest.approx(expected, rel=1e-5)
        assert results["worst"] == pytest.approx(results["loss"], rel=1e-5)
        assert modes_kept


def local_statistics() -> tuple[list[float], list[float]]:
    echelon.init()
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    strategy = echelon.Strategy(sync_batch_norm=False)
    engine = echelon.distribute(
        net, loss=F.mse_loss, optimizer=torch.optim.SGD(net.parameters(), lr=0.0), strategy=strategy, log=QUIET
    )
    x = torch.tensor([[0.0, 1.0], [2.0, 3.0]]) * (echelon.rank() + 1)
    engine.step(x, torch.zeros(2, 1))
    before = net[0].running_mean.tolist()  # type: ignore[union-attr, operator]
    engine.evaluate([(x, torch.zeros(2, 1))])
    return before, net[0].running_mean.tolist()  # type: ignore[union-attr, operator]


def test_statistics_kept_per_replica_are_averaged_before_use() -> None:
    (first, after), (second, also) = run(local_statistics, ranks=2)
    assert first != second
    assert after == also == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)])


def test_nothing_to_evaluate_and_unknown_metrics() -> None:
    net = nn.Linear(2, 1)
    engine = echelon.distribute(net, loss=F.mse_loss, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), log=QUIET)
    with pytest.raises(DataError):
        engine.evaluate([])
    with pytest.raises(UsageError, match="no metric 'acuracy'; did you mean 'accuracy'"):
        engine.evaluate([(torch.ones(1, 2), torch.ones(1, 1))], metrics=["acuracy"])


def classified(samples: int, spread: bool) -> dict[str, float]:
    """A head that is split over classes: metrics ask all ranks that share it, also those whose batch counts nothing."""
    echelon.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Linear(16, 7))
    echelon.annotate(model, {"2": echelon.split(), **({"1": echelon.replicate()} if spread else {})})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = echelon.distribute(model, loss=F.cross_entropy, optimizer=optimizer, log=QUIET)
    return engine.evaluate(data(samples), batch_size=4, metrics=["accuracy", "top5"])


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("samples", [3, 13])  # with 13, one rank of three has nothing left in the last batch
def test_split_outputs_are_judged_by_all_ranks_and_count_once(samples: int, spread: bool) -> None:
    expected = run(classified, samples, spread, ranks=1)[0]
    for results in run(classified, samples, spread, ranks=3):
        assert results == pytest.approx(expected, rel=1e-5)


def words(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of words and targets, of which later rows have fewer."""
    g = torch.Generator().manual_seed(3)
    x, y = torch.randint(9, (samples, 6), generator=g), torch.randint(9, (samples, 6), generator=g)
    y[torch.arange(6)[None] > 5 - torch.arange(samples)[:, None] % 6] = -100
    return x, y


def of_tokens(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def perplexities(samples: int) -> tuple[dict[str, float], float]:
    echelon.init(seed=1)
    net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    engine = echelon.distribute(net, loss=of_tokens, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), log=QUIET)
    found = engine.evaluate(words(samples), batch_size=4, metrics=["perplexity"])
    x, y = words(samples)
    with torch.no_grad():
        return found, of_tokens(net(x), y).exp().item()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_perplexity_is_that_of_all_tokens(ranks: int) -> None:
    for found, expected in run(perplexities, 17, ranks=ranks):
        assert found["perplexity"] == pytest.approx(expected, rel=1e-5)
        assert list(found) == ["loss", "perplexity"]
