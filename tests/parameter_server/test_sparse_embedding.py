"""SparseEmbedding in one process: what it computes, what it trains, and what it says to mistakes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import errors, run
from torch import Tensor, nn

import echelon
from echelon.base.errors import DataError, UsageError
from echelon.nn import SparseEmbedding
from echelon.strategy.sparse_update_rules import Sgd

QUIET = echelon.Log(console=False)


class Bags(nn.Module):
    """A bag of ids to a vector, then to a number; or the same through a table of torch's own."""

    def __init__(self, combiner: Any = None, **options: Any) -> None:
        super().__init__()
        self.emb = SparseEmbedding(3, combiner=combiner, optimizer=Sgd(lr=0.5), **options)
        self.out = nn.Linear(3, 1, bias=False)

    def forward(self, ids: Tensor, *more: Tensor) -> Tensor:
        found = self.emb(ids, *more)
        return self.out(found if self.emb.combiner else found.sum(1)).squeeze(1)


def engine_of(model: nn.Module, **options: Any) -> echelon.Engine:
    settings = {"loss": lambda output, _: output.square().mean(), "log": QUIET} | options
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return echelon.distribute(model, optimizer=optimizer, **settings)


def rows_of(model: Bags, ids: Tensor) -> Tensor:
    rows, inverse = model.emb._store().lookup(model.emb._table, ids)
    return rows[inverse]


def combined(rows: Tensor, ids: Tensor, weights: Tensor, combiner: str, padding: int | None) -> Tensor:
    """The definition: over ids that count, sum of w * e, over sum of w (mean) or root of the sum of w * w (sqrtn)."""
    each = weights * (ids != padding) if padding is not None else weights
    total = (rows * each.unsqueeze(-1)).sum(1)
    if combiner == "sum":
        return total
    norm = each.sum(1) if combiner == "mean" else each.square().sum(1).sqrt()
    return total / torch.where(norm == 0, 1.0, norm).unsqueeze(1)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("padding", [None, 0])
def test_bags_are_combined_and_trained_by_definition(combiner: str, padding: int | None) -> None:
    torch.manual_seed(0)
    model = Bags(combiner, padding_id=padding)
    engine = engine_of(model)
    ids, weights = torch.tensor([[5, 0, 5], [-7, 5, 0], [0, 0, 0]]), torch.rand(3, 3)
    distinct, index = torch.unique(ids, return_inverse=True)
    table = rows_of(model, distinct).clone().requires_grad_()
    loss = model.out(combined(table[index], ids, weights, combiner, padding)).square().mean()
    loss.backward()
    assert engine.step(ids, weights, torch.zeros(3)).item() == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(rows_of(model, distinct), (table - 0.5 * table.grad).detach(), rtol=1e-5, atol=1e-6)
    engine.close()


def test_ragged_bags_are_those_of_torch() -> None:
    model = Bags("mean")
    engine = engine_of(model)
    ids, offsets = torch.tensor([9, 9, 4, 2, 4]), torch.tensor([0, 2, 2])
    distinct, index = torch.unique(ids, return_inverse=True)
    with torch.no_grad():
        expected = F.embedding_bag(index, rows_of(model, distinct), offsets, mode="mean")
        torch.testing.assert_close(model.emb(ids, None, offsets), expected)
        assert model.emb(ids, None, offsets)[1].tolist() == [0, 0, 0]  # an empty bag
    engine.close()


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = SparseEmbedding(3, name="words", optimizer=Sgd(lr=0.5))
        self.second = SparseEmbedding(3, name="words", optimizer=Sgd(lr=0.5))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        computed = left + 1 - 1  # ids that the model computes: no part of the batch
        return (self.first(left) * self.second(right) + self.first(computed)).sum(1) * self.scale


def test_shared_table_sums_all_gradients_and_computed_ids_work() -> None:
    """A shared table sums the gradients of all modules that read it, and computed ids work."""
    model = Shared()
    engine = engine_of(model)
    left, right = torch.tensor([1, 2, 2, -9]), torch.tensor([2, 3, 1, -9])
    for _ in range(3):  # the first step learns where the ids lie; later ones use it
        distinct = torch.unique(torch.cat([left, right]))
        rows, inverse = model.first._store().lookup("words", distinct)
        table = rows[inverse].clone().requires_grad_()
        at, to = torch.searchsorted(distinct, left), torch.searchsorted(distinct, right)
        (table[at] * table[to] + table[at]).sum(1).square().mean().backward()
        engine.step(left, right, torch.zeros(4))
        now, inverse = model.first._store().lookup("words", distinct)
        torch.testing.assert_close(now[inverse], (table - 0.5 * table.grad).detach(), rtol=1e-5, atol=1e-6)
    assert engine.served.reading.computed == {"words"}
    engine.close()


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = SparseEmbedding(8, optimizer="adagrad")
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.ReLU()) for _ in range(4)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.blocks(self.emb(ids)).sum((1, 2))


def deep(recompute: bool) -> tuple[list[float], np.ndarray]:
    echelon.init(seed=0)
    model = Deep()
    engine = echelon.distribute(
        model,
        loss=F.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=echelon.Strategy(recompute=recompute),
        log=QUIET,
    )
    ids = torch.arange(40).reshape(20, 2) % 17
    losses = [float(engine.step(ids[at : at + 4], torch.ones(4))) for at in range(0, 20, 4)]
    with torch.no_grad():
        return losses, model.emb(torch.arange(17)).numpy()


def test_recomputing_changes_no_bit_of_what_is_sent() -> None:
    (plain,), (again,) = run(deep, False, ranks=1), run(deep, True, ranks=1)
    assert plain[0] == again[0]
    np.testing.assert_array_equal(plain[1], again[1])


def kept(directory: str, steps: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Train up to ``steps`` in all, from the last checkpoint on."""
    echelon.init(seed=0)
    model = Deep()
    engine = echelon.distribute(
        model,
        loss=F.mse_loss,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        checkpoint=echelon.Checkpoint(dir=directory, every=3, keep=1, asynchronous=False),
        log=QUIET,
    )
    began, ids = engine.steps, torch.arange(96).reshape(48, 2) % 17
    for batch, wanted in engine.loader((ids, torch.ones(48)), batch_size=4):
        engine.step(batch, wanted)
        if engine.steps == steps:
            break
    with torch.no_grad():
        return began, model.emb(torch.arange(17)).numpy(), model.blocks[0][0].weight.detach().numpy().copy()


def test_tables_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    (whole,) = run(kept, str(tmp_path / "a"), 12, ranks=1)
    run(kept, str(tmp_path / "b"), 7, ranks=1)
    (resumed,) = run(kept, str(tmp_path / "b"), 12, ranks=1)
    assert (whole[0], resumed[0]) == (0, 6)
    np.testing.assert_array_equal(whole[1], resumed[1])
    np.testing.assert_array_equal(whole[2], resumed[2])
    assert sorted(path.name for path in (tmp_path / "a").glob("servers-*")) == ["servers-00000012"]


# ---- mistakes ----


def test_mistakes_are_one_line() -> None:
    model = Bags()
    with pytest.raises(UsageError, match=r"does not exist yet; give the model to echelon.distribute\(\)"):
        model.emb(torch.tensor([1]))
    engine = engine_of(model)
    with pytest.raises(DataError, match=r"ids of type int32; ids are int64"):
        model(torch.tensor([[1]], dtype=torch.int32))
    with pytest.raises(UsageError, match="weights and offsets are for bags"):
        model.emb(torch.tensor([[1]]), torch.ones(1, 1))
    with pytest.raises(UsageError, match=r"trained by engine.step\(\)"):
        engine.backward(torch.zeros((), requires_grad=True))
    engine.close()
    with pytest.raises(UsageError, match="no optimizer 'adagrat'; did you mean 'adagrad'"):
        SparseEmbedding(4, optimizer="adagrat")
    with pytest.raises(UsageError, match="describe the table 'words' differently"):
        engine_of(nn.ModuleList([SparseEmbedding(2, name="words"), SparseEmbedding(3, name="words"), nn.Linear(1, 1)]))


def spread() -> None:
    echelon.init(seed=0)
    engine_of(Bags(), strategy=echelon.Strategy(ps="async"))


def test_fluid_and_torch_spellings_are_understood() -> None:
    names = {"is_sparse": True, "is_distributed": True, "dtype": "float32", "param_attr": "words", "padding_idx": -1}
    fluid = SparseEmbedding(size=[200, 16], **names)
    assert (fluid.dim, fluid.spec.capacity, fluid.spec.name, fluid.padding_id) == (16, 200, "words", 199)
    assert [SparseEmbedding(2, dtype=kind).spec.dtype for kind in (torch.bfloat16, "int8")] == ["bf16", "int8"]
    torchs = SparseEmbedding(num_embeddings=200, embedding_dim=16, padding_idx=3)
    assert (torchs.dim, torchs.spec.capacity, torchs.padding_id) == (16, 200, 3)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"size": 16}, "size=16): expected [dict_size, width]"),
        ({"size": [200, 16], "is_sparse": False}, "take torch.nn.Embedding"),
        ({"dim": 16, "dtype": torch.float16}, "expected 'float32', 'bf16' or 'int8'"),
        ({"dim": 16, "param_attr": object()}, "only its name is used"),
        ({"dim": 16, "combinr": "sum"}, "did you mean 'combiner'?"),
        ({"size": [200, 16], "capacity": 7}, "say it once"),
        ({}, "dim=None): expected the number of floats a row"),
    ],
)
def test_a_wrong_option_is_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(line)):
        SparseEmbedding(**given)
    with pytest.raises(UsageError, match="is SparseEmbedding"):
        SparseEmbedding(200, 16)


def test_split_methods_are_known_by_fluids_names() -> None:
    class RoundRobin:
        """A class as Fluid passes it."""

    given = ("RoundRobin", "HashName", "hash_name", RoundRobin)
    found = [echelon.ParameterServer(split_method=method).split_method for method in given]
    assert found == ["round_robin", "hash_name", "hash_name", "round_robin"]
    with pytest.raises(UsageError, match="expected 'round_robin', 'RoundRobin', 'hash_name', 'HashName' or a function"):
        echelon.ParameterServer(split_method="round-robin")
    with pytest.raises(UsageError, match=r"split_method=3\): expected str or a function"):
        echelon.ParameterServer(split_method=3)


def test_modes_with_servers_need_servers() -> None:
    for line in errors(spread, ranks=2):
        assert "2 processes and no parameter servers, which ps='async' needs; start it with 'echelon run" in line
        assert "ps='collective'" in line


def test_strategies_that_do_not_go_with_servers_are_refused() -> None:
    for other in ({"dgc": True}, {"localsgd": True}, {"shard": 1}, {"gradient_merge": 2}):
        with pytest.raises(UsageError, match="do not combine"):
            echelon.Strategy(ps="async", **other)
    with pytest.raises(UsageError, match="say it once"):
        echelon.ParameterServer(mode="geo", sync_mode=True)
