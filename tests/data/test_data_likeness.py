"""Ranks that were given different data sets to be dealt out are told so in the first step."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest
import torch
from harness import run
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset, TensorDataset, WeightedRandomSampler, random_split

import echelon
from echelon.base.errors import DataError
from echelon.data.fingerprint import dataset_fingerprint
from echelon.data.repeated import Repeated

X = torch.arange(1000.0).view(200, 5)


class Lines(IterableDataset[Any]):
    """A stream; ``begin``, ``step``: which rows it reads."""

    def __init__(self, begin: int = 0, step: int = 1) -> None:
        self.begin, self.step = begin, step

    def __iter__(self) -> Any:
        return iter([{"x": row, "text": str(row[0])} for row in X[self.begin :: self.step]])


class Own(torch.utils.data.Dataset[Any]):
    """Somebody's class; ``read``: whether a sample was asked for."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.read = x, False

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> Tensor:
        self.read = True
        return self.x[at]


def changed(at: int) -> Tensor:
    other = X.clone()
    other[at] += 1
    return other


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((X, X), (X.clone(), X.clone()), True),
        ((X,), (changed(0),), False),
        ((X,), (changed(199),), False),
        ((X, X), (X, changed(0)), False),
        ((X,), (X.double(),), False),
        ((X.numpy(),), (X.numpy().copy(),), True),
        ((X.numpy(),), (changed(0).numpy(),), False),
        ((X.bfloat16(),), (changed(0).bfloat16(),), False),
        ((X.t().contiguous().t(),), (X,), True),
        ((torch.empty(0, 5), np.empty((3, 0))), (torch.empty(0, 5), np.empty((3, 0))), True),
        (TensorDataset(X), TensorDataset(changed(0)), False),
        (Subset(TensorDataset(X), range(10)), Subset(TensorDataset(X), range(10)), True),
        (Subset(TensorDataset(X), [1, 2]), Subset(TensorDataset(X), [2, 1]), False),
        (Subset(TensorDataset(X), [1, 2]), Subset(TensorDataset(changed(0)), [1, 2]), False),
        (Subset(Own(X), [1, 2]), Subset(Own(X), [2, 1]), False),
        (Repeated((X,), 300), Repeated((changed(0),), 300), False),
        (Own(X), Own(changed(0)), True),  # to look would run its code
        (Subset(Own(X), ["a", "b"]), Subset(Own(X), ["b", "a"]), True),  # type: ignore[list-item]
        ((X.to_sparse(),), (changed(0).to_sparse(),), True),
        (Subset(TensorDataset(X), torch.tensor([1, 2])), Subset(TensorDataset(X), torch.tensor([2, 1])), False),
        ((np.array(["a", None], object),), (np.array(["b", None], object),), True),
    ],
)
def test_what_two_data_sets_are_told_apart_by(one: Any, other: Any, same: bool) -> None:
    assert (dataset_fingerprint(one, 7) == dataset_fingerprint(other, 7)) == same
    assert dataset_fingerprint(one, 7) != dataset_fingerprint(one, 8)


def test_no_user_code_runs_for_the_comparison() -> None:
    own = Own(X)
    dataset_fingerprint(own, 200)
    dataset_fingerprint(Subset(own, [1, 2]), 2)
    assert not own.read


def engine_of() -> echelon.Engine:
    echelon.init(device="cpu", seed=3)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    return echelon.distribute(
        model, loss=lambda output, *_: output.mean(), optimizer=optimizer, log=echelon.Log(lines=False)
    )


def train(kind: str) -> str | None:
    """The error, if there is one."""
    engine = engine_of()
    late = torch.randn(200, 5)
    data: Any = {
        "same": (X, X[:, :1]),
        "late": (late, late),
        "own loop": (late, late),
        "late split": random_split(TensorDataset(X), [0.5, 0.5])[0],
        "lengths": (X[: 200 - echelon.rank()], X[: 200 - echelon.rank()]),
        "own": Own(late),
        "own lengths": Own(X[: 200 - 3 * echelon.rank()]),
        "sharded by hand": (late, late),
        "sampler": (X, X[:, :1]),
        "late sampler": (X, X[:, :1]),
        "stream": Lines(),
        "stream of a rank": Lines(echelon.rank(), 3),
    }[kind]
    apart: dict[str, Any] = {"rank": 0, "world_size": 1} if kind == "sharded by hand" else {}
    if "sampler" in kind:
        own = torch.Generator().manual_seed(echelon.rank()) if kind == "late sampler" else None
        apart = {"sampler": WeightedRandomSampler(torch.ones(200), 90, generator=own)}
    try:
        for batch in engine.loader(data, batch_size=8, **apart):
            if "stream" in kind:
                engine.step(batch["x"])
                continue
            x, *rest = batch if isinstance(batch, list | tuple) else [batch]
            if kind == "own loop":
                engine.backward(engine.model(x).mean())
                engine.update()
            else:
                engine.step(x, rest[0] if rest else x)
    except DataError as error:
        return str(error)
    finally:
        engine.close()
    return None


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [("lengths", ("199", "200")), ("own lengths", ("197", "200"))],
)
def test_data_sets_of_unequal_length_are_refused_on_every_rank(kind: str, lengths: tuple[str, str]) -> None:
    for line in run(train, kind, ranks=2):
        assert line == (
            f"rank 1 was given a data set of {lengths[0]} samples and rank 0 one of {lengths[1]}; engine.loader() "
            "deals one data set out to all ranks: give each the same"
        )


def given(kind: str) -> str | None:
    """Two loaders, of which one is unlike, or a third rank that is unlike in another way than the second."""
    engine, rank = engine_of(), echelon.rank()
    data = X[: 200 - (5 if kind == "third" and rank == 2 else 0)] + (rank if kind == "third" else 0)
    other = X[: 200 - rank] if kind == "second loader" else X
    try:
        for (x,), (y,) in zip(engine.loader((data,), batch_size=8), engine.loader((other,), batch_size=8), strict=True):
            engine.step(x, y)
    except DataError as error:
        return str(error)
    finally:
        engine.close()
    return None


@pytest.mark.parametrize(("kind", "rank"), [("second loader", 1), ("third", 2)])
def test_every_loader_is_compared_with_lengths_before_contents(kind: str, rank: int) -> None:
    """Every loader is compared, and a wrong length is reported in preference to other contents."""
    for line in run(given, kind, ranks=3):
        assert (line or "").startswith(f"rank {rank} was given a data set of 19")


def warned(kind: str) -> tuple[str | None, int]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        error = train(kind)
    line = "was given another data set than rank 0; engine.loader() deals one data set out"
    if "stream" in kind:
        line = "rank 1 reads other samples from its stream than rank 0"
    if "sampler" in kind:
        line = "the sampler of rank 1 draws another order than that of rank 0; engine.loader() deals one order out"
    return error, said.getvalue().count(line)


@pytest.mark.parametrize(
    ("kind", "warnings"),
    [
        *[("same", 0), ("late", 1), ("own loop", 1), ("late split", 1), ("own", 0), ("sharded by hand", 0)],
        *[("sampler", 0), ("late sampler", 1), ("stream", 0), ("stream of a rank", 1)],
    ],
)
def test_other_contents_are_a_warning_once(kind: str, warnings: int) -> None:
    first, *others = run(warned, kind, ranks=3)
    assert first == (None, warnings)
    assert all(other == (None, 0) for other in others)
