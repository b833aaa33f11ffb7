"""The disk tier: slots of a bucket lie together, are used again, and hold the rows that a table in memory holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from echelon.parameter_server.protocol.hashing import mix_all
from echelon.parameter_server.protocol.job_spec import BUCKETS, TableSpec
from echelon.parameter_server.table import Table
from echelon.strategy.sparse_update_rules import Adagrad

PAGE = 4096


def table_of(disk: bool, directory: Path) -> Table:
    spec = TableSpec(name="t", dim=14, rule=Adagrad(row_wise=True), seed=3, disk=disk)
    return Table(spec, buckets=range(8), directory=directory)


def ids_of(count: int) -> np.ndarray:
    """Ids of the first 8 buckets, in an order that has nothing to do with buckets."""
    ids = mix_all(np.arange(count * BUCKETS // 8)).view(np.int64)
    return ids[(mix_all(ids) >> np.uint64(32)) * np.uint64(BUCKETS) >> np.uint64(32) < 8]


def pages_of(table: Table, bucket: int) -> int:
    _, slots = table._index.pairs(bucket)
    return len(np.unique(slots * table.words * 4 // PAGE))


def test_rows_of_a_bucket_lie_on_few_pages(tmp_path: Path) -> None:
    """A snapshot reads and marks bucket by bucket: each page must belong to about one."""
    tables, ids = [table_of(disk, tmp_path) for disk in (True, False)], ids_of(16_000)
    for part in np.array_split(ids, 50):
        for table in tables:
            table.push(part, np.ones((len(part), 14), np.float32))
    least = len(tables[0].rows_of(0).ids) * tables[0].words * 4 / PAGE
    disk, memory = (pages_of(table, 0) for table in tables)
    assert disk < 2 * least
    assert memory > 5 * least


def test_slots_on_disk_are_used_again_and_hold_the_same_rows(tmp_path: Path) -> None:
    disk, memory = (table_of(disk, tmp_path) for disk in (True, False))
    ids, draw = ids_of(4_000), np.random.default_rng(0)
    for _ in range(30):
        chosen, gone = draw.permutation(ids)[:600], draw.permutation(ids)[:700]
        grads = draw.standard_normal((len(chosen), 14)).astype(np.float32)
        for table in (disk, memory):
            table.push(chosen, grads)
            table.remove(gone)
    assert len(disk) == len(memory) > 100
    np.testing.assert_array_equal(disk.pull_state(ids), memory.pull_state(ids))
    assert disk.memory() < 2 * memory.memory()
    for bucket in range(8):
        np.testing.assert_array_equal(disk.rows_of(bucket).records, memory.rows_of(bucket).records)
        disk.drop_bucket(bucket)
    assert len(disk) == 0
    disk.push(ids[:100], np.ones((100, 14), np.float32))
    twin = table_of(True, tmp_path)
    twin.push(ids[:100], np.ones((100, 14), np.float32))
    assert disk._arena.nbytes == twin._arena.nbytes, "slots of a cleared table are not used again"


@pytest.mark.parametrize("slots", [[], [-5, -1], [0, 3, 900, 70_000, -5]])
def test_reading_ahead_takes_any_slots(tmp_path: Path, slots: list[int]) -> None:
    table = table_of(True, tmp_path)
    table.push(ids_of(2_000), np.ones((len(ids_of(2_000)), 14), np.float32))
    table._arena.fetch(np.array(slots, np.int64))
    assert len(table.rows_of(0).ids) > 100
