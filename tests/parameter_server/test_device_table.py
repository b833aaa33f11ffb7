"""A table in device memory, by its operations in torch, against the table in host memory: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_table import EXTREMES, noise, some, spec

from echelon.base.errors import EchelonError, MismatchError, UsageError
from echelon.parameter_server.device_table.delayed_finite_check import DelayedFiniteCheck
from echelon.parameter_server.device_table.device_index import FREE_KEY
from echelon.parameter_server.device_table.device_table import DeviceTable
from echelon.parameter_server.device_table.segments import PIECE
from echelon.parameter_server.protocol.hashing import bucket_of, owned_by
from echelon.parameter_server.protocol.job_spec import BUCKETS, Initializer, TableSpec
from echelon.parameter_server.table import Table, add_rows, dedupe
from echelon.strategy.show_click_score import ShowClickScore
from echelon.strategy.sparse_update_rules import NAMED, Momentum, Rule

CPU = torch.device("cpu")
RULES = {**NAMED, "nesterov": Momentum(nesterov=True)}


def both(**options: Any) -> tuple[Table, DeviceTable]:
    chosen = spec(**options)
    return Table(chosen), DeviceTable(chosen, CPU)


def zipf(count: int, seed: int, exponent: float = 1.6) -> np.ndarray:
    """Ids with repetitions, none of them more than PIECE times."""
    ids = np.random.default_rng(seed).zipf(exponent, count).astype(np.int64)
    frequent, numbers = np.unique(ids, return_counts=True)
    ids[np.isin(ids, frequent[numbers > PIECE])] = 0
    zeros = np.flatnonzero(ids == 0)
    ids[zeros] = -np.arange(len(zeros)) - 1
    return ids * np.int64(0x9E3779B97F4A7C1)


def push_both(host: Table, device: DeviceTable, ids: np.ndarray, grads: np.ndarray, **options: Any) -> None:
    """Push repeated ids: the host's table is given the sums, in the order of positions."""
    unique, inverse = dedupe(ids)
    host.push(unique, add_rows(grads, inverse, len(unique)), **options)
    device.update(torch.from_numpy(ids), torch.from_numpy(grads), **options)


def assert_same(host: Table, device: DeviceTable) -> None:
    """Compare the rows of all ids, and the files of some buckets: ids, weights, state, counts and times."""
    assert len(host) == len(device)
    assert host.step == device.step
    ids = np.concatenate([ids for ids, _ in host.items()])
    np.testing.assert_array_equal(host.pull_state(ids), device.pull_state(ids))
    for bucket in range(0, BUCKETS, 16):
        mine, theirs = host.rows_of(bucket), device.rows_of(bucket)
        np.testing.assert_array_equal(mine.ids, theirs.ids)
        waits = (mine.records[:, -2] >> 30) & 1 == 1  # the weights of an id that waits are undefined
        np.testing.assert_array_equal(mine.records[~waits], theirs.records[~waits])
        np.testing.assert_array_equal(mine.records[waits, -2:], theirs.records[waits, -2:])


@pytest.mark.parametrize("dim", [1, 3, 16])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_updates_have_the_bits_of_the_host_table(rule: Rule, dim: int) -> None:
    host, device = both(rule=rule, dim=dim)
    for step in range(5):
        ids = zipf(700, step)
        ids[:8] = [*EXTREMES, FREE_KEY]
        push_both(host, device, ids, noise((700, dim), step), lr=0.1 / (1 + step))
    assert_same(host, device)
    asked = np.concatenate([ids, some(50, 9)])
    np.testing.assert_array_equal(host.pull_state(asked), device.pull_state(asked))


def test_a_long_run_is_summed_in_pieces() -> None:
    """The sum of an id with more than PIECE positions has another order than on the host: only rounding differs."""
    host, device = both(dim=4)
    ids, grads = np.repeat(some(3), [PIECE, PIECE + 1, 3000]), noise((2 * PIECE + 3001, 4))
    push_both(host, device, ids, grads)
    mine, theirs = host.pull(some(3)), device.pull(some(3))
    np.testing.assert_array_equal(mine[0], theirs[0])
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-4)
    begin = 2 * PIECE + 1
    total = np.zeros(4, np.float32)
    for piece in range(begin, len(ids), PIECE):
        part = np.zeros(4, np.float32)
        for grad in grads[piece : piece + PIECE]:
            part += grad
        total += part
    np.testing.assert_array_equal(theirs[2], Table(spec(dim=4)).pull(some(3))[2] - total)


def test_row_numbers_follow_first_positions_not_the_index() -> None:
    table = DeviceTable(spec(dim=1, initializer=Initializer(kind="constant", low=0.0)), CPU)
    ids = np.array([50, -7, 50, 3, -7, 11], np.int64)
    table.update(torch.from_numpy(ids), torch.arange(6.0).unsqueeze(1))
    np.testing.assert_array_equal(table._rows.rows[:4, 0], [-2.0, -5.0, -3.0, -5.0])  # of 50, -7, 3, 11


@pytest.mark.parametrize("kind", ["uniform", "normal", "constant"])
def test_initial_values_are_those_of_the_host_table(kind: Any) -> None:
    initializer = Initializer(kind=kind, low=-0.25, high=0.75)
    host, device = both(dim=5, seed=-3, initializer=initializer)
    np.testing.assert_allclose(host.pull(some(2000)), device.pull(some(2000)), rtol=0 if kind != "normal" else 2e-7)
    assert len(device) == 0, "a pull made rows"


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "remove"]),
            st.lists(st.one_of(st.integers(-6, 6), st.sampled_from([FREE_KEY, -(2**63), 2**63 - 1])), max_size=40),
        ),
        max_size=10,
    )
)
def test_the_index_is_a_dictionary(actions: list[tuple[str, list[int]]]) -> None:
    table = DeviceTable(spec(dim=1, initializer=Initializer(kind="constant", low=0.0)), CPU)
    model: dict[int, int] = {}
    for action, given_ids in actions:
        ids = np.array(given_ids, np.int64)
        if action == "push":
            table.push(ids, np.full((len(ids), 1), -1, np.float32))
            for key in given_ids:
                model[key] = model.get(key, 0) + 1
        else:
            table.remove(ids)
            for key in given_ids:
                model.pop(key, None)
    assert len(table) == len(model)
    seen = {int(key): int(row[0]) for ids, rows in table.items() for key, row in zip(ids, rows, strict=True)}
    assert seen == model


def test_growth_keeps_rows_and_removed_rows_are_used_again() -> None:
    host, device = both(dim=2)
    ids = some(20_000)
    for begin in range(0, 20_000, 2500):
        part = ids[begin : begin + 2500]
        push_both(host, device, part, noise((2500, 2), begin))
    assert host.remove(ids[:9000]) == device.remove(np.concatenate([ids[:9000], some(10, 5)])) == 9000
    size = len(device._rows.rows)
    push_both(host, device, some(8000, 3), noise((8000, 2)))
    assert len(device._rows.rows) == size
    assert_same(host, device)


def test_removed_ids_do_not_fill_the_index() -> None:
    device = DeviceTable(spec(dim=1), CPU)
    for step in range(30):
        device.push(some(300, step), noise((300, 1)))
        device.remove(some(300, step))
    assert device._index.size <= 4096


@pytest.mark.parametrize(
    "options",
    [
        {"admit_after": 3},
        {"admit_probability": 0.4, "admit_after": 2},
        {"capacity": 400, "on_full": "lru"},
        {"capacity": 400, "on_full": "lfu"},
        {"expire_passes": 2},
        {"expire_seconds": 30.0},
        {"capacity": 300, "on_full": "lru", "admit_after": 2, "expire_passes": 3},
    ],
    ids=str,
)
def test_admission_eviction_and_expiry_equal_the_host_table(options: dict[str, Any]) -> None:
    host, device = both(rule=NAMED["row_adagrad"], **options)
    for step in range(14):
        ids = zipf(200, step % 5 * 100 + step // 3, 1.3)
        push_both(host, device, ids, noise((200, 3), step), now=step * 10)
        if step % 4 == 3:
            assert host.new_pass() == device.new_pass()
            assert host.expire(step * 10) == device.expire(step * 10)
    assert_same(host, device)


def test_a_full_table_says_so() -> None:
    lines: list[str] = []
    for table in both(capacity=10):
        table.push(some(8), noise((8, 3)))
        with pytest.raises(EchelonError) as caught:
            table.push(some(20), noise((20, 3)))
        lines.append(str(caught.value))
        assert len(table) == 8
    assert lines[0] == lines[1]


def test_files_go_from_one_table_to_the_other() -> None:
    options: dict[str, Any] = {"rule": NAMED["adam"], "admit_after": 2}
    host, device = both(**options)
    for step in range(3):
        push_both(host, device, zipf(500, step), noise((500, 3), step))
    there, back = both(**options)
    for bucket in range(BUCKETS):
        there.put_rows(bucket, device.rows_of(bucket))
        back.put_rows(bucket, host.rows_of(bucket))
    there.step = back.step = host.step
    assert_same(there, back)
    for table in (host, device, there, back):
        table.push(some(100), noise((100, 3)))
    assert_same(host, back)
    assert_same(there, device)


def changed(table: Table | DeviceTable) -> dict[int, Any]:
    rows = {bucket: table.rows_of(bucket, changed_only=True) for bucket in range(BUCKETS)}
    return {
        bucket: (found.ids.tolist(), found.records.tolist(), found.removed.tolist()) for bucket, found in rows.items()
    }


def test_only_changed_rows_are_in_a_delta() -> None:
    host, device = both()
    for table in (host, device):
        table.push(some(300), noise((300, 3)))
        for bucket in range(BUCKETS):
            table.mark_clean(bucket)
    assert not any(ids or removed for ids, _, removed in changed(device).values())
    for table in (host, device):
        table.push(some(20), noise((20, 3)))
        table.remove(some(300)[280:])
        table.drop_bucket(int(bucket_of(some(1), BUCKETS)[0]))
    assert changed(host) == changed(device)
    assert_same(host, device)


def test_added_changes_equal_the_host_table() -> None:
    host, device = both(rule=NAMED["adagrad"])
    for table in (host, device):
        table.push(some(30), noise((30, 3)))
        table.add(some(50), noise((50, 6), 2))
    assert_same(host, device)


def test_ids_of_other_workers_are_refused_by_name() -> None:
    table = DeviceTable(spec(), CPU, buckets=owned_by(1, BUCKETS, 3))
    mine = some(500)[np.isin(bucket_of(some(500), BUCKETS), table.buckets)]
    host = Table(spec(), buckets=table.buckets)
    for each in (table, host):
        each.push(mine, noise((len(mine), 3)))
    for bucket in table.buckets:
        np.testing.assert_array_equal(table.rows_of(bucket).records, host.rows_of(bucket).records)
    with pytest.raises(MismatchError, match="this worker holds buckets 342 to 682"):
        table.pull(some(500))


def test_gradients_that_are_not_finite_change_nothing() -> None:
    table, check = DeviceTable(spec(), CPU), DelayedFiniteCheck()
    table.push(some(5), noise((5, 3)))
    before = table.pull(some(9))
    for bad in (float("nan"), float("inf")):
        grads = torch.ones(9, 3)
        grads[4, 1] = bad
        table.update(torch.from_numpy(some(9)), grads, valid=check.note(grads, "it is not finite"))
        with pytest.raises(EchelonError, match="it is not finite"):
            check.check(wait=True)
    assert len(table) == 5
    np.testing.assert_array_equal(table.pull(some(9)), before)
    table.update(torch.from_numpy(some(9)), torch.ones(9, 3), valid=check.note(torch.ones(9, 3), ""))
    check.check(wait=True)
    assert len(table) == 9


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (lambda: DeviceTable(TableSpec(name="t", dim=2, disk=True), CPU), "disk=True keeps rows in a file"),
        (lambda: DeviceTable(spec(dtype="bf16"), CPU), "rows on a device are float32, not bf16"),
        (lambda: DeviceTable(spec(score=ShowClickScore()), CPU), "have no shows and clicks"),
        (lambda: DeviceTable(spec(expire_passes=1, expire_seconds=1.0), CPU), "by passes or by seconds"),
        (lambda: DeviceTable(spec(), CPU).push(some(3), noise((2, 3))), r"3 ids need values \(3, 3\), got \(2, 3\)"),
    ],
)
def test_mistakes_get_one_line(made: Callable[[], Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        made()
