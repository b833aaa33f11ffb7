"""engine.log on several ranks: the numbers of all ranks are merged by their rules, and no rank waits for another."""

from __future__ import annotations

import contextlib
import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import nn

import echelon
from echelon import Log, Strategy
from echelon.base.errors import UsageError
from echelon.observability.metrics import rank_merge
from echelon.observability.metrics.logged_numbers import LAST, RULES, RankNumbers, merge
from echelon.observability.metrics.sinks import summary
from echelon.observability.runlog.run_description import promised_flops

NUMPY = {"mean": np.mean, "sum": np.sum, "max": np.max, "min": np.min}


def logged(directory: Path) -> dict[int, dict[str, float]]:
    """The script's own numbers in metrics.jsonl by step, each written once and in the order of steps."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    found: dict[int, dict[str, float]] = {}
    for line in lines:
        if "logged" in line:
            assert line["step"] >= max(found, default=0)
            assert not found.setdefault(line["step"], {}).keys() & line["logged"].keys()
            found[line["step"]] |= line["logged"]
    return found


@pytest.mark.parametrize("rule", [*RULES, LAST])
def test_merged_numbers_equal_numpy(rule: str) -> None:
    """Two replicas of two ranks each; the last rank has not logged the number."""
    values = np.random.default_rng(0).normal(size=3).tolist()
    ranks = [RankNumbers(rank, rank // 2, [(1, "x", rule, value)]) for rank, value in enumerate(values)]
    merged = merge([*reversed(ranks), RankNumbers(3, 1, [(2, "y", "sum", 5.0)])])
    replicas = [np.mean(values[:2]), values[2]]
    expected = values[0] if rule == LAST else NUMPY[rule](replicas)
    assert merged == {1: {"x": pytest.approx(expected, rel=1e-15)}, 2: {"y": 5.0}}


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def engine_of(directory: str, plan: str = "dp", **log: Any) -> echelon.Engine:
    net = mlp()
    if plan == "split":
        echelon.annotate(net, {"0": echelon.split(), "2": echelon.split()})
    if plan == "pipeline":
        echelon.annotate(net, {"0": echelon.stage(0), "2": echelon.stage(1)})
    options: dict[str, Any] = {
        "dp": {}, "split": {}, "pipeline": {}, "shard": {"shard": 3}, "localsgd": {"localsgd": True},
        "merge": {"gradient_merge": 2}, "one": {},
    }[plan]  # fmt: skip
    sample = (torch.zeros(4, 4), torch.zeros(4, 2)) if plan == "pipeline" else None
    return echelon.distribute(
        net,
        loss=F.mse_loss,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        strategy=Strategy(**options),
        sample=sample,
        log=Log(dir=directory, **{"every": 2, "progress": False, **log}),
    )


def batch(step: int, engine: echelon.Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of 8 samples."""
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 4, generator=g), torch.randn(8, 2, generator=g)
    rank, size = engine.world.data_rank, engine.world.data_size
    return x.chunk(size)[rank], y.chunk(size)[rank]


def log_by_rank(directory: str, plan: str, steps: int, every: int = 2) -> tuple[str, int]:
    """Log a number of all ranks, one of rank 1 alone, one of rank 0 alone, and one after the last step."""
    echelon.init()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        engine = engine_of(directory, plan, every=every)
        rank = echelon.rank()
        for step in range(steps):
            engine.step(*batch(step, engine))
            if plan == "merge":
                engine.step(*batch(step, engine))
            engine.log({"all": torch.tensor(10.0 * step + rank)}, most=rank)
            engine.log(total=rank + 1, reduce="sum")
            engine.log(own=7 + rank, reduce=None)
            if rank == 1:
                engine.log(second=step)
        if rank == 1:
            engine.log(late=42)
        engine.close()
    return said.getvalue(), engine.steps


@pytest.mark.parametrize("plan", ["dp", "shard", "merge"])
def test_numbers_of_all_ranks_are_merged(plan: str, tmp_path: Path) -> None:
    (said, steps), (nothing, _) = run(log_by_rank, str(tmp_path), plan, 5, ranks=2)
    found = logged(tmp_path)
    expected = [{"all": 10.0 * i + 0.5, "most": 0.5, "total": 3.0, "own": 7.0, "second": float(i)} for i in range(5)]
    expected[-1]["late"] = 42.0
    assert steps == 5
    assert [found[i + 1] for i in range(5)] == expected
    assert "step 3  all 20.5  most 0.5  total 3  own 7  second 2\n" in said
    assert "all" not in nothing


@pytest.mark.parametrize(
    ("plan", "everyone", "second"),
    [("split", {"all": 0.0, "total": 1.0}, False), ("pipeline", {"all": 0.5, "total": 1.5}, True),
     ("localsgd", {"all": 0.0, "total": 1.0}, False)],
)  # fmt: skip
def test_ranks_of_one_batch_count_once(plan: str, everyone: dict[str, float], second: bool, tmp_path: Path) -> None:
    """Splits: the first rank of those with one batch. Stages: their mean. Ranks that step alone: rank 0."""
    run(log_by_rank, str(tmp_path), plan, 3, ranks=2)
    found = logged(tmp_path)
    assert found[1] == {**everyone, "most": everyone["all"], "own": 7.0} | ({"second": 0.0} if second else {})
    assert ("late" in found[3]) == second


def differing_intervals(directory: str) -> None:
    log_by_rank(directory, "dp", 5, every=2 if echelon.init().rank == 0 else 100)


def test_the_interval_of_rank_0_holds_for_all(tmp_path: Path) -> None:
    run(differing_intervals, str(tmp_path), ranks=2)
    assert [found["all"] for found in logged(tmp_path).values()] == [10.0 * i + 0.5 for i in range(5)]


def log_and_stay(directory: str) -> str:
    echelon.init()
    engine = engine_of(directory)
    for step in range(3):
        engine.step(*batch(step, engine))
        engine.log(x=echelon.rank())
    if echelon.rank() == 1:
        time.sleep(1.5)  # still busy when rank 0 has ended
        return ""
    rank_merge.PATIENCE = 0.2
    with contextlib.redirect_stderr(io.StringIO()) as said:
        engine.close()
    return said.getvalue()


def test_the_end_waits_for_no_rank_for_long(tmp_path: Path) -> None:
    said, _ = run(log_and_stay, str(tmp_path), ranks=2)
    assert "log: rank 1 has not ended after 0.2 s; its last numbers are not recorded" in said
    assert logged(tmp_path) == {1: {"x": 0.5}, 2: {"x": 0.5}, 3: {"x": 0.0}}


def test_an_unknown_rule_is_one_line(tmp_path: Path) -> None:
    engine = engine_of(str(tmp_path))
    with pytest.raises(UsageError, match=r"log\(reduce='maximum'\): unknown rule; did you mean 'max'"):
        engine.log(x=1, reduce="maximum")
    engine.step(torch.ones(4, 4), torch.ones(4, 2))
    engine.log(x=1)  # one process: written at once
    assert logged(tmp_path) == {1: {"x": 1.0}}
    engine.close()


# ---- norm of the gradients, tokens ----


def norms(directory: str, plan: str) -> None:
    echelon.init()
    engine = engine_of(directory, plan, grad_norm=echelon.rank() == 0)  # rank 0's setting holds for all
    for step in range(4):
        engine.step(*batch(step, engine))
    engine.close()


def test_recorded_norms_equal_one_process_in_every_layout(tmp_path: Path) -> None:
    def recorded(plan: str, ranks: int) -> list[Any]:
        run(norms, str(tmp_path / plan), plan, ranks=ranks)
        lines = [json.loads(line) for line in (tmp_path / plan / "metrics.jsonl").read_text().splitlines()]
        return [line.get("gradient_norm") for line in lines]

    net = mlp()
    optimizer, expected = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(4):
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 4, generator=g), torch.randn(8, 2, generator=g)
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        expected.append(float(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).norm()))
        optimizer.step()
    for plan, ranks in (("one", 1), ("dp", 2), ("shard", 2), ("split", 2), ("pipeline", 2)):
        assert recorded(plan, ranks) == [pytest.approx(expected[i], rel=1e-5) for i in (1, 3)], plan


def test_a_norm_without_whole_gradients_is_refused(tmp_path: Path) -> None:
    net = mlp()
    with pytest.raises(UsageError, match=r"Log\(grad_norm=True\): low_memory does not keep whole gradients"):
        echelon.distribute(
            net,
            loss=F.mse_loss,
            optimizer=torch.optim.AdamW(net.parameters()),
            strategy=Strategy(low_memory=True),
            log=Log(grad_norm=True),
        )


def test_mfu_is_recorded_where_flops_and_peak_are_known(tmp_path: Path) -> None:
    """Two ranks share one GPU of 1e12 FLOP/s, and a third has its own; a step has 3e9 FLOPs: 1.5 ms at the peak."""
    ranks = [{"host": "a", "device": "cuda:0", "peak": 1e12}, {"host": "b", "device": "cuda:0", "peak": 1e12}]
    promised = promised_flops([*ranks, ranks[0]])
    assert promised == 2e12
    assert promised_flops([*ranks, {"host": "c", "device": "cuda:0"}]) is None
    engine = engine_of(str(tmp_path))
    assert engine._run.record.peak_seconds is None  # on a CPU nothing is shown
    engine._run.record.peak_seconds = 3e9 / promised
    for step in range(2):
        engine.step(*batch(step, engine))
    engine.close()
    (record,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert record["mfu"] == pytest.approx(1.5e-3 * record["examples_per_s"] / 8)
    assert f"  MFU {record['mfu']:.1%}  data" in summary(record)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.table(input_ids)).square().mean()
        return loss


def tokens(directory: str, merge: int) -> None:
    echelon.init()
    net = Words()
    engine = echelon.distribute(
        net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        strategy=Strategy(gradient_merge=merge),
        log=Log(dir=directory, every=2),
    )
    for _ in range(4 * merge):
        engine.step(input_ids=torch.ones(2, 5 + 4 * echelon.rank(), dtype=torch.int64))  # 10 and 18 tokens
    engine.close()


@pytest.mark.parametrize(("ranks", "merge", "per_example"), [(1, 1, 5), (2, 1, 7), (2, 2, 7)])
def test_tokens_of_all_ranks_are_counted(ranks: int, merge: int, per_example: float, tmp_path: Path) -> None:
    run(tokens, str(tmp_path), merge, ranks=ranks)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["tokens_per_s"] / line["examples_per_s"] for line in lines] == [pytest.approx(per_example)] * 2
