"""Replicas that a script feeds the same samples, or trains in a wrapper of torch's, are told so in the first steps."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import errors, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

import echelon

G = torch.Generator().manual_seed(3)
DATA = TensorDataset(torch.randn(64, 5, generator=G), torch.randint(3, (64,), generator=G))
SAME = "loader: ranks 0 and 1 were given the same batches"
WHOLE = "loader: ranks 0 and 1 each go through all 64 samples of a DataLoader"


class Own(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> Any:
        return DATA[at]


def engine_of(model: nn.Module | None = None) -> echelon.Engine:
    echelon.init(device="cpu", seed=3)
    model = nn.Linear(5, 3) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return echelon.distribute(model, loss=F.cross_entropy, optimizer=optimizer, log=echelon.Log(lines=False))


def batches(kind: str, engine: echelon.Engine) -> Any:
    rank, plain = echelon.rank(), DataLoader(DATA, 8)
    mine = Subset(DATA, range(rank, 64, 2))
    sampler: Any = DistributedSampler(DATA, 2, rank)
    made: dict[str, Any] = {
        "plain": lambda: plain,
        "shuffle": lambda: DataLoader(DATA, 8, shuffle=True),
        "own": lambda: DataLoader(Own(), 8, shuffle=True),
        "no loader": lambda: [DATA[n : n + 8] for n in range(0, 64, 8)],
        "distributed": lambda: DataLoader(DATA, 8, sampler=sampler),
        "by hand": lambda: DataLoader(mine, 8, shuffle=True),
        "dealt out": lambda: engine.loader(plain),
        "beside": lambda: engine.loader(DATA, batch_size=8),
        "once": lambda: [DATA[:8], *(DATA[8 * (2 * n + rank) : 8 * (2 * n + rank) + 8] for n in range(4))],
    }
    return made[kind]()


def fed(kind: str, own_loop: bool) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        engine = engine_of()
        plain = type(iter(DataLoader(DATA, 8)))
        if kind == "beside":  # one that is looked into before, and one that is in use besides training
            next(iter(DataLoader(DATA, 8)))
            other = iter(DataLoader(DATA, 8))
            next(other)
        for x, y in batches(kind, engine):
            if own_loop:
                engine.backward(F.cross_entropy(engine.model(x), y))
                engine.update()
            else:
                engine.step(x, y)
        engine.close()
        assert type(iter(DataLoader(DATA, 8))) is plain
        assert DataLoader.__iter__.__module__ == "torch.utils.data.dataloader"
    return said.getvalue()


@pytest.mark.parametrize(
    ("kind", "own_loop", "line"),
    [
        ("plain", False, SAME),
        ("plain", True, WHOLE),
        ("shuffle", False, WHOLE),
        ("shuffle", True, WHOLE),
        ("own", False, WHOLE),
        ("no loader", False, SAME),
        *((kind, False, None) for kind in ("distributed", "by hand", "dealt out", "beside", "once")),
        ("by hand", True, None),
        ("beside", True, None),
    ],
)
def test_replicas_fed_alike_are_told_once(kind: str, own_loop: bool, line: str | None) -> None:
    first, second = run(fed, kind, own_loop, ranks=2)
    found = [each for each in first.splitlines() if "loader: ranks" in each]
    assert len(found) == (line is not None)
    assert not second
    if line is not None:
        assert line in found[0]
        assert ("engine.loader(data)" if kind == "no loader" else "engine.loader(loader)") in found[0]


def sharing_a_batch() -> str:
    """Ranks of one split replica work on one batch; there is one replica."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        echelon.init(device="cpu", seed=3)
        model = nn.Sequential(nn.Linear(5, 4))
        echelon.annotate(model, {"0": echelon.split()})
        engine = echelon.distribute(
            model,
            loss=F.cross_entropy,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            log=echelon.Log(lines=False),
        )
        for x, y in DataLoader(DATA, 8):
            engine.step(x, y)
        engine.close()
    return said.getvalue()


def test_ranks_that_share_a_batch_are_not_warned() -> None:
    assert "loader: ranks" not in run(sharing_a_batch, ranks=2)[0]


def in_ddp(wrapped: bool, own_loop: bool) -> tuple[list[float], str]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        echelon.init(device="cpu", seed=3)
        torch.manual_seed(1)
        model: nn.Module = nn.Linear(5, 3)
        model = DistributedDataParallel(model) if wrapped else model
        engine = engine_of(model)
        for x, y in engine.loader(DATA, global_batch=16):
            if own_loop:
                engine.backward(F.cross_entropy(model(x), y))
                engine.update()
            else:
                engine.step(x, y)
        weights = engine.whole_state()["weight"].flatten().tolist()
        engine.close()
    return weights, said.getvalue()


@pytest.mark.parametrize("own_loop", [False, True])
def test_model_in_ddp_is_unwrapped_and_that_is_said(own_loop: bool) -> None:
    expected = run(in_ddp, False, own_loop, ranks=1)[0][0]
    (weights, said), (others, _) = run(in_ddp, True, own_loop, ranks=2)
    assert weights == others == pytest.approx(expected, rel=1e-5)
    assert said.count("model: DistributedDataParallel was taken off") == 1


def refused(kind: str) -> None:
    echelon.init(device="cpu", seed=3)
    if kind == "inside":
        engine_of(nn.Sequential(DistributedDataParallel(nn.Linear(5, 3))))
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(5, 3)
    fully_shard(model)
    engine_of(model)


@pytest.mark.parametrize(
    ("kind", "line"),
    [("inside", "'0' is wrapped in DistributedDataParallel"), ("fsdp", "the model was sharded by torch's FSDP")],
)
def test_wrappers_that_cannot_be_taken_off_are_a_line(kind: str, line: str) -> None:
    assert all(one.startswith("UsageError") and line in one for one in errors(refused, kind, ranks=2))
