"""Tables with weights in 16 and 8 bits, against a numpy reference, and their way through files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import run
from narrow_reference import rounded
from serving import served

import echelon
from echelon.nn import SparseEmbedding
from echelon.parameter_server.protocol.hashing import bucket_of, mix_all
from echelon.parameter_server.protocol.job_spec import BUCKETS, Initializer, TableSpec
from echelon.parameter_server.table import Table, converted, records_of, weights_of
from echelon.strategy.sparse_update_rules import NAMED, Adagrad, Sgd

IDS = mix_all(np.arange(300)).view(np.int64)
NARROW = ["bf16", "int8"]


def spec(dtype: str, **given: Any) -> TableSpec:
    return TableSpec(**{"name": "t", "dim": 5, "seed": -9, "rule": Sgd(lr=0.3), "dtype": dtype, **given})


def batches(dim: int, steps: int = 6) -> list[tuple[np.ndarray, np.ndarray]]:
    """Places of ids and their gradients, of very different sizes, some of them 0."""
    draw = np.random.default_rng(dim)
    found = []
    for _ in range(steps):
        places = draw.permutation(len(IDS))[: draw.integers(100, len(IDS))]
        grads = draw.standard_normal((len(places), dim)) * 10.0 ** draw.integers(-6, 2, (len(places), 1))
        found.append((places, (grads * (draw.random(grads.shape) < 0.8)).astype(np.float32)))
    return found


@pytest.mark.parametrize("dim", [1, 3, 4, 5, 16])
@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_rows_equal_the_reference_to_the_bit(dtype: str, dim: int) -> None:
    table = Table(spec(dtype, dim=dim))
    weights, version = Table(spec("float32", dim=dim)).pull(IDS).copy(), np.zeros(len(IDS), np.int64)
    for places, grads in batches(dim):
        table.push(IDS[places], grads)
        version[places] += 1
        changed = weights[places] - np.float32(0.3) * grads
        weights[places] = rounded(dtype, -9, IDS[places], version[places], changed)
        np.testing.assert_array_equal(table.pull(IDS), weights)


@pytest.mark.parametrize("dtype", NARROW)
def test_state_of_narrow_rows_is_that_of_float32(dtype: str) -> None:
    """Adagrad's sums depend on gradients alone, so they have the bits of a float32 table."""
    narrow, wide = (Table(spec(kind, rule=Adagrad(lr=0.1))) for kind in (dtype, "float32"))
    for places, grads in batches(5):
        for table in (narrow, wide):
            table.push(IDS[places], grads)
    np.testing.assert_array_equal(narrow.pull_state(IDS)[:, 5:], wide.pull_state(IDS)[:, 5:])
    np.testing.assert_array_equal(narrow.pull_state(IDS)[:, :5], narrow.pull(IDS))
    assert (narrow.pull(IDS) != wide.pull(IDS)).any()


@pytest.mark.parametrize("name", sorted(NAMED))
@pytest.mark.parametrize("dtype", NARROW)
def test_rounded_bits_do_not_depend_on_what_shares_the_push(dtype: str, name: str) -> None:
    together, apart = (Table(spec(dtype, rule=NAMED[name])) for _ in range(2))
    for places, grads in batches(5, steps=3):
        together.push(IDS[places], grads)
        for part in (places >= 150, places < 150):
            apart.push(IDS[places[part]], grads[part])
            apart.step -= 1
        apart.step += 1
    np.testing.assert_array_equal(together.pull_state(IDS), apart.pull_state(IDS))


@pytest.mark.parametrize("dtype", NARROW)
def test_updates_below_a_step_are_kept_on_average(dtype: str) -> None:
    """To the nearest, none of these updates would ever move a weight."""
    ids = np.arange(4000)
    table = Table(spec(dtype, dim=4, rule=Sgd(lr=1.0), initializer=Initializer(kind="constant", low=1.0)))
    for _ in range(50):
        table.push(ids, np.full((len(ids), 4), 1e-4, np.float32))
    assert table.pull(ids).mean() == pytest.approx(1 - 50e-4, abs=5e-4)


def test_int8_weight_without_a_gradient_keeps_its_value() -> None:
    table = Table(spec("int8", dim=4))
    table.push(IDS, np.random.default_rng(0).standard_normal((len(IDS), 4)).astype(np.float32))
    before = table.pull(IDS)
    grads = np.zeros((len(IDS), 4), np.float32)
    grads[:, 2] = 1e-5
    for _ in range(5):
        table.push(IDS, grads)
    np.testing.assert_array_equal(table.pull(IDS)[:, [0, 1, 3]], before[:, [0, 1, 3]])


@pytest.mark.parametrize(("dtype", "words"), [("float32", 16), ("bf16", 8), ("int8", 5)])
def test_record_has_the_words_that_are_promised(dtype: str, words: int) -> None:
    """A row of 16 with row-wise Adagrad: its weights, one float of state, count and last-seen time."""
    assert Table(spec(dtype, dim=16, rule=Adagrad(row_wise=True))).words == words + 1 + 2


@pytest.mark.parametrize("dtype", NARROW)
def test_extreme_weights_stay_finite_or_become_nan(dtype: str) -> None:
    table = Table(spec(dtype, dim=2, rule=Sgd(lr=1.0), initializer=Initializer(kind="constant", low=0.0)))
    grads = np.array([[-3.39e38, 0], [1e-45, 0], [0, 0], [-1.5e38, 2e38]], np.float32)
    table.push(np.arange(4), grads)
    found = table.pull(np.arange(4))
    assert np.isfinite(found[1:]).all()
    np.testing.assert_array_equal(found[2], [0, 0])
    np.testing.assert_allclose(found[3], -grads[3], rtol=0.01)
    assert np.isfinite(found[0]).all() == (dtype == "bf16")


@pytest.mark.parametrize("now", ["float32", *NARROW])
@pytest.mark.parametrize("was", ["float32", *NARROW])
def test_records_between_formats_are_rounded_to_the_nearest(was: str, now: str) -> None:
    before, after = (spec(kind, dim=6, rule=Adagrad()) for kind in (was, now))
    table = Table(before)
    table.push(IDS, np.random.default_rng(1).standard_normal((len(IDS), 6)).astype(np.float32))
    other = Table(after)
    for bucket in range(BUCKETS):
        rows = table.rows_of(bucket)
        if len(rows.ids):
            other.put_rows(bucket, rows._replace(records=converted(rows.records, before, after)))
    weights, found = table.pull(IDS), other.pull(IDS)
    step = {"float32": 0, "bf16": np.abs(weights) / 256, "int8": np.abs(weights).max(1, keepdims=True) / 127}[now]
    assert (np.abs(found - weights) <= step).all()
    np.testing.assert_array_equal(other.pull_state(IDS)[:, 6:], table.pull_state(IDS)[:, 6:])
    bucket = int(bucket_of(IDS[:1], BUCKETS)[0])
    np.testing.assert_array_equal(other.rows_of(bucket).records[:, -2:], table.rows_of(bucket).records[:, -2:])


@pytest.mark.parametrize("dtype", NARROW)
def test_weights_of_files_keep_their_bits_on_the_way_back(dtype: str) -> None:
    table = Table(spec(dtype, dim=7))
    table.push(IDS, np.random.default_rng(2).standard_normal((len(IDS), 7)).astype(np.float32))
    rows = table.rows_of(int(bucket_of(IDS[:1], BUCKETS)[0]))
    weights = weights_of(rows.records, table.spec)
    np.testing.assert_array_equal(weights, table.pull(rows.ids))
    np.testing.assert_array_equal(records_of(weights, table.spec)[:, :-2], rows.records[:, :-2])


def train(dtype: str, **options: Any) -> np.ndarray:
    """Train a table and a layer for some steps; return rows of all ids."""
    echelon.init(seed=0)
    rows = SparseEmbedding(4, name="ids", optimizer=Sgd(lr=0.5), dtype=dtype)
    model = torch.nn.Sequential(rows, torch.nn.Flatten(), torch.nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = echelon.Strategy(ps=echelon.ParameterServer(**options))
    engine = echelon.distribute(model, optimizer, loss=F.mse_loss, strategy=strategy, log=echelon.Log(console=False))
    draw = torch.Generator().manual_seed(1)
    data = torch.randint(0, 20, (48, 3), generator=draw), torch.randn(48, 1, generator=draw)
    for batch in engine.loader(data, global_batch=8, shuffle=False):
        engine.step(*batch)
    engine.synchronize()
    with torch.no_grad():
        found = model.eval()[0](torch.arange(20)).numpy().copy()
    engine.close()
    return found


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_tables_in_workers_and_on_servers_are_equal(dtype: str) -> None:
    workers = run(train, dtype, mode="collective", ranks=2)
    servers = served(train, dtype, mode="sync", dense="allreduce", servers=3, workers=2)
    for found in (*workers, *servers):
        np.testing.assert_array_equal(found, workers[0])
    step = np.abs(workers[0]).max(1, keepdims=True) / (127 if dtype == "int8" else 256)
    (wide,) = run(train, "float32", mode="sync", ranks=1)
    assert (np.abs(workers[0] - wide) < 6 * step).all()
    assert (workers[0] != wide).mean() > 0.9
