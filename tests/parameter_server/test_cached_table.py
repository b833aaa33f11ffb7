"""A cache of rows in device memory over a table of the host: whatever leaves and comes back, the rows are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_device_table import CPU, push_both, zipf
from test_table import noise, some, spec

from echelon.base.errors import EchelonError, UsageError
from echelon.parameter_server.device_table.cached_table import CachedTable
from echelon.parameter_server.device_table.second_chance import SecondChance
from echelon.parameter_server.protocol.job_spec import BUCKETS, TableSpec
from echelon.parameter_server.table import Table
from echelon.strategy.sparse_update_rules import NAMED


def both(cache_rows: int, **options: Any) -> tuple[Table, CachedTable]:
    chosen = spec(rule=NAMED["adam"], **options)
    return Table(chosen), CachedTable(Table(chosen), CPU, cache_rows)


def assert_same(host: Table, cached: CachedTable) -> None:
    assert len(host) == len(cached)
    for bucket in range(BUCKETS):
        for mine, theirs in zip(host.rows_of(bucket), cached.rows_of(bucket), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def batches(number: int) -> list[np.ndarray]:
    """Batches of 120 ids, of which many come again."""
    return [zipf(120, step, 1.3) for step in range(number)]


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "when needed"])
@pytest.mark.parametrize("cache_rows", [130, 300, 5000])
def test_rows_are_those_of_the_host_table(cache_rows: int, ahead: bool) -> None:
    host, cached = both(cache_rows)
    given = batches(25)
    for step, ids in enumerate(given):
        on_device = torch.from_numpy(ids)
        np.testing.assert_array_equal(cached.read(on_device), host.pull(ids))
        if ahead and step + 1 < len(given):
            cached.prefetch(torch.from_numpy(given[step + 1]))
        push_both(host, cached, ids, noise((len(ids), 3), step))  # type: ignore[arg-type]
        assert cached._rows.in_use() <= cache_rows
    assert len(host) > 600
    assert_same(host, cached)
    assert cached.step == host.step


def test_a_batch_that_was_prefetched_and_never_came_does_no_harm() -> None:
    host, cached = both(150)
    given = batches(12)
    for step, ids in enumerate(given):
        cached.prefetch(torch.from_numpy(given[(step * 5 + 3) % len(given)]))
        push_both(host, cached, ids, noise((len(ids), 3), step))  # type: ignore[arg-type]
    assert_same(host, cached)


def test_rows_wait_on_the_device_until_the_host_is_asked() -> None:
    _, cached = both(200)
    cached.push(some(50), noise((50, 3)))
    assert len(cached._host) == 0
    assert sum(len(ids) for ids, _ in cached.items()) == 50
    assert len(cached._host) == 50
    cached.flush()
    writes: list[Any] = []
    cached._fetch.write_back = lambda *given: writes.append(given)  # type: ignore[method-assign, assignment]
    cached.flush()
    assert not writes, "rows that are on the host already were written again"


def test_only_updated_rows_are_written_back() -> None:
    _, cached = both(100)
    cached.push(some(60), noise((60, 3)))
    cached.flush()
    written: list[int] = []
    store = cached._fetch.write_back
    cached._fetch.write_back = lambda ids, records: (written.append(len(ids)), store(ids, records))[1]  # type: ignore[method-assign]
    cached.push(some(5), noise((5, 3)))
    cached.read(torch.from_numpy(some(90, 3)))
    assert sum(written) <= 5


def test_a_snapshot_has_the_rows_of_the_cache() -> None:
    host, cached = both(100)
    for table in (host, cached):
        table.push(some(80), noise((80, 3)))
        for bucket in range(BUCKETS):
            table.mark_clean(bucket)
        table.push(some(30), noise((30, 3), 1))
    changed = [cached.rows_of(bucket, changed_only=True) for bucket in range(BUCKETS)]
    assert sum(len(rows.ids) for rows in changed) == 30
    assert_same(host, cached)


@pytest.mark.parametrize("options", [{"expire_passes": 1}, {"expire_seconds": 20.0}], ids=str)
def test_expiry_equals_the_host_table(options: dict[str, Any]) -> None:
    host, cached = both(200, **options)
    for step, ids in enumerate(batches(8)):
        push_both(host, cached, ids, noise((len(ids), 3), step), now=step * 10)  # type: ignore[arg-type]
        if step % 2:
            host.new_pass(), cached.new_pass()
            assert host.expire(step * 10) == cached.expire(step * 10)
    assert_same(host, cached)


def test_restored_removed_and_added_rows_are_seen_by_the_cache() -> None:
    host, cached = both(100)
    for table in (host, cached):
        table.push(some(70), noise((70, 3)))
        assert table.remove(some(10)) == 10
        table.add(some(20), noise((20, 9), 4))
    np.testing.assert_array_equal(cached.read(torch.from_numpy(some(80))), host.pull(some(80)))
    fresh = CachedTable(Table(host.spec), CPU, 100)
    fresh.push(some(40), noise((40, 3), 3))
    for bucket in range(BUCKETS):
        fresh.drop_bucket(bucket)
        fresh.put_rows(bucket, host.rows_of(bucket))
    fresh.step = host.step
    np.testing.assert_array_equal(fresh.read(torch.from_numpy(some(80))), host.pull(some(80)))
    for table in (host, cached, fresh):
        table.push(some(60), noise((60, 3), 6))
    np.testing.assert_array_equal(fresh.pull_state(some(80)), host.pull_state(some(80)))
    np.testing.assert_array_equal(cached.pull_state(some(80)), host.pull_state(some(80)))


def test_rows_lie_on_disk_behind_the_cache(tmp_path: Path) -> None:
    host = Table(TableSpec(name="t", dim=3, rule=NAMED["adam"], disk=True), directory=tmp_path)
    plain, cached = Table(TableSpec(name="t", dim=3, rule=NAMED["adam"])), CachedTable(host, CPU, 130)
    for step, ids in enumerate(batches(6)):
        push_both(plain, cached, ids, noise((len(ids), 3), step))  # type: ignore[arg-type]
    assert_same(plain, cached)


def test_a_batch_that_does_not_fit_is_named() -> None:
    _, cached = both(50)
    assert cached.read(torch.from_numpy(some(200))).shape == (200, 3), "a read alone goes part by part"
    with pytest.raises(EchelonError, match=r"one batch needs 200 rows in the cache, which has cache_rows=50; raise"):
        cached.push(some(200), noise((200, 3)))


@pytest.mark.parametrize("options", [{"capacity": 10}, {"admit_after": 2}, {"admit_probability": 0.5}], ids=str)
def test_what_a_cache_cannot_do_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(options))} and location='cached' do not go together"):
        both(10, **options)


def test_second_chance_spares_rows_that_were_used() -> None:
    clock, all_may = SecondChance(6, CPU), torch.ones(6, dtype=torch.bool)
    clock.note_used(torch.tensor([0, 2, -1]))
    assert clock.select(all_may, 2).tolist() == [1, 3]
    clock.note_used(torch.tensor([4, 5]))
    assert clock.select(all_may, 1).tolist() == [0], "its use was before the hand passed it"
    may = torch.tensor([False, True, False, False, True, True])
    clock.note_used(torch.tensor([1, 4, 5]))
    assert sorted(clock.select(may, 2).tolist()) == [1, 4], "all were used: the first from the hand on go"
    assert len(clock.select(may, 5)) == 3
