"""Rows that a table makes, forgets and evicts, and their way to files and back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.base.errors import EchelonError, MismatchError, UsageError
from echelon.parameter_server.protocol.hashing import bucket_of, mix_all
from echelon.parameter_server.protocol.job_spec import BUCKETS, Initializer, TableSpec
from echelon.parameter_server.table import BucketRows, Table
from echelon.parameter_server.table.records import COUNT, WAITING
from echelon.strategy.sparse_update_rules import Adagrad, Sgd

ZERO = Initializer(kind="constant", low=0.0)


def table_of(**given: object) -> Table:
    about = {"name": "t", "dim": 2, "rule": Sgd(lr=1.0), "initializer": ZERO, **given}
    return Table(TableSpec(**about))  # type: ignore[arg-type]


def push(table: Table, ids: list[int] | np.ndarray, now: int = 0) -> list[int]:
    """Move each row up by one; returns what had to go for it."""
    return sorted(table.push(np.array(ids, np.int64), np.full((len(ids), 2), -1, np.float32), now=now).tolist())


def values(table: Table, ids: list[int] | np.ndarray) -> list[float]:
    return table.pull(np.array(ids, np.int64))[:, 0].tolist()


def alive(table: Table) -> list[int]:
    return sorted(int(key) for ids, _ in table.items() for key in ids)


def copy_of(table: Table, changed_only: bool = False, into: Table | None = None) -> Table:
    twin = into or Table(table.spec)
    for bucket in range(BUCKETS):
        twin.put_rows(bucket, table.rows_of(bucket, changed_only=changed_only))
        table.mark_clean(bucket)
    return twin


def same(one: Table, two: Table) -> None:
    for bucket in range(BUCKETS):
        a, b = one.rows_of(bucket), two.rows_of(bucket)
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.records, b.records)


# admission


def test_an_id_is_admitted_with_its_third_push() -> None:
    table = table_of(admit_after=3)
    for pushes, expected in enumerate([0, 0, 1, 2], 1):
        push(table, [5, -6])
        assert values(table, [5, -6]) == [expected] * 2, f"after {pushes} pushes"
    push(table, [7])
    assert (alive(table), len(table)) == ([-6, 5], 2)


def test_row_count_includes_pushes_before_it_was_admitted() -> None:
    table = table_of(admit_after=3)
    for _ in range(5):
        push(table, [5])
    record = table.rows_of(int(bucket_of(np.array([5]), BUCKETS)[0])).records[0]
    assert record[-2] == 5


def test_admission_by_chance_is_a_coin_of_the_id_and_the_push() -> None:
    ids = np.arange(4000)
    one, two = table_of(admit_probability=0.3, seed=4), table_of(admit_probability=0.3, seed=4)
    push(one, ids)
    assert 0.27 < len(one) / 4000 < 0.33
    push(one, ids)
    assert 0.48 < len(one) / 4000 < 0.54  # 1 - 0.7^2
    for part in np.split(ids[::-1], 8):  # other batches, other order
        push(two, part)
    for part in np.split(ids, 4):
        push(two, part)
    assert alive(two) == alive(one)
    other = table_of(admit_probability=0.3, seed=5)
    push(other, ids)
    push(other, ids)
    assert alive(other) != alive(one)


def test_count_then_coin() -> None:
    table, ids = table_of(admit_after=2, admit_probability=0.5), np.arange(2000)
    push(table, ids)
    assert len(table) == 0
    push(table, ids)
    assert 900 < len(table) < 1100


# expiry


def test_rows_expire_after_so_many_whole_passes_without_a_push() -> None:
    table = table_of(expire_passes=2)
    push(table, [1, 2, 3])
    forgotten = []
    for turn in range(1, 5):
        assert table.new_pass() == turn
        forgotten.append(table.expire(now=0))
        push(table, [1] if turn < 2 else [9])
    assert forgotten == [0, 0, 2, 1]  # 2 and 3 unseen in passes 1 and 2; 1 unseen in passes 2 and 3
    assert alive(table) == [9]
    assert values(table, [2]) == [0], "a forgotten id reads its initial value"


def test_rows_expire_after_seconds_and_ids_that_wait_too() -> None:
    table = table_of(expire_seconds=10.0, admit_after=2)
    begin = 1_800_000_000
    for now, ids in ((0, [1, 2, 3]), (0, [1, 2]), (5, [2, 4])):
        push(table, ids, begin + now)
    assert table.expire(begin + 10) == 0
    assert table.expire(begin + 11) == 1
    assert alive(table) == [2]
    push(table, [3, 4], begin + 11)
    assert alive(table) == [2, 4], "3 had been forgotten, with its count"


def test_expiry_can_be_limited_to_buckets() -> None:
    table = table_of(expire_seconds=1.0)
    push(table, list(range(50)))
    which = int(bucket_of(np.array([7]), BUCKETS)[0])
    assert table.expire(100, buckets=[]) == 0
    gone = table.expire(100, buckets=[which])
    assert gone >= 1
    assert 7 not in alive(table)
    assert table.expire(100) == 50 - gone


def test_without_a_rule_nothing_expires() -> None:
    table = table_of()
    push(table, [1])
    table.new_pass()
    assert table.expire(2**31) == 0
    with pytest.raises(UsageError, match="by passes or by seconds, not both"):
        table_of(expire_passes=1, expire_seconds=1.0)


# capacity


def test_a_full_table_refuses_the_whole_push() -> None:
    table = table_of(capacity=10)
    push(table, range(8))
    before = {bucket: table.rows_of(bucket) for bucket in range(BUCKETS)}
    with pytest.raises(EchelonError, match="table 't' is full: 8 of 10 rows here, and 3 new ids arrived") as caught:
        push(table, [0, 1, 20, 21, 22])
    assert "\n" not in str(caught.value)
    for bucket, rows in before.items():
        np.testing.assert_array_equal(table.rows_of(bucket).records, rows.records)
    assert table.step == 1
    push(table, [0, 20, 21])
    assert len(table) == 10
    push(table, range(8))


def test_the_share_of_a_server_is_its_capacity() -> None:
    table = Table(TableSpec(name="t", dim=2, capacity=1000), capacity=3)
    with pytest.raises(EchelonError, match="is full: 0 of 3 rows here, and 4 new"):
        push(table, range(4))


def test_the_longest_unseen_go_first() -> None:
    table = table_of(capacity=4, on_full="lru")
    for ids in ([1, 2], [3], [4], [1]):
        push(table, ids)
    assert push(table, [5]) == [2]
    assert push(table, [6, 3]) == [4]  # 3 is the oldest, but part of the push
    assert alive(table) == [1, 3, 5, 6]
    assert values(table, [1, 2, 3, 4]) == [2, 0, 2, 0]


def test_the_rarest_seen_go_first() -> None:
    table = table_of(capacity=4, on_full="lfu")
    for ids in ([1, 2, 3, 4], [1, 2, 4], [2, 4], [4]):
        push(table, ids)
    assert push(table, [5]) == [3]
    assert push(table, [6]) == [5]
    assert push(table, [7, 8]) == [1, 6]
    assert alive(table) == [2, 4, 7, 8]


@pytest.mark.parametrize("kind", ["lru", "lfu"])
def test_eviction_takes_the_lowest_of_many_and_ties_by_the_hash(kind: str) -> None:
    table, rng = table_of(capacity=1600, on_full=kind), np.random.default_rng(0)
    ids = np.arange(1600)
    push(table, ids)
    score = np.ones(1600, np.int64)  # both the first push's number and the count so far
    for _ in range(3):
        again = rng.permutation(1600)[:700]
        push(table, again)
        score[again] = table.step if kind == "lru" else score[again] + 1
    order = np.lexsort((mix_all(ids) & np.uint64(0xFFFFFFFF), score))
    assert push(table, [5000]) == sorted(ids[order][:100].tolist())  # a sixteenth of the capacity at once
    assert len(table) == 1501


def test_eviction_does_not_depend_on_the_order_of_arrival() -> None:
    one, two = table_of(capacity=800, on_full="lfu"), table_of(capacity=800, on_full="lfu")
    push(one, range(800))
    push(two, range(799, -1, -1))
    assert push(one, [1000]) == push(two, [1000]) != []
    restored = copy_of(one, into=Table(one.spec))
    restored.step = one.step
    assert push(one, range(2000, 2060)) == push(restored, range(2000, 2060)) != []


def test_room_can_be_made_before_the_push() -> None:
    table = table_of(capacity=4, on_full="lru")
    push(table, [1, 2, 3])
    assert table.make_room(np.array([4])).tolist() == []
    push(table, [4])
    gone = table.make_room(np.array([5]))
    assert len(gone) == 1
    assert push(table, [5]) == []


def test_a_push_larger_than_the_table_is_an_error() -> None:
    table = table_of(capacity=4, on_full="lru")
    push(table, [1, 2])
    for ids in (range(10, 15), [1, 2, 3, 4, 5]):
        with pytest.raises(EchelonError, match="raise capacity"):
            push(table, list(ids))
        assert alive(table) == [1, 2]
    push(table, [3, 4, 5, 6])
    assert alive(table) == [3, 4, 5, 6]


# files


def test_rows_go_to_files_and_come_back() -> None:
    table = table_of(rule=Adagrad(), admit_after=2)
    for ids in (range(500), range(300), [-1, 2**63 - 1, -(2**63)]):
        push(table, list(ids))
    twin = copy_of(table)
    same(table, twin)
    assert len(twin) == len(table) == 300
    twin.step = table.step
    for again in (table, twin):
        push(again, [-1, 299, 300, 700])
    same(table, twin)
    assert len(twin) == 302


def test_only_what_changed_is_written_again_and_removals_with_it() -> None:
    table = table_of(admit_after=2)
    for _ in range(2):
        push(table, range(400))
    twin = copy_of(table)
    assert sum(len(table.rows_of(b, changed_only=True).ids) for b in range(BUCKETS)) == 0
    push(table, [1, 2, 500])
    table.remove(np.array([3, 4, 2]))
    push(table, [4])
    deltas = [table.rows_of(bucket, changed_only=True) for bucket in range(BUCKETS)]
    assert sorted(int(key) for rows in deltas for key in rows.ids) == [1, 4, 500]
    assert sorted(int(key) for rows in deltas for key in rows.removed) == [2, 3]
    copy_of(table, changed_only=True, into=twin)
    same(table, twin)
    assert values(twin, [1, 2, 3, 4]) == [2, 0, 0, 0]
    assert not any(len(table.rows_of(b, changed_only=True).removed) for b in range(BUCKETS))


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "remove", "save"]), st.sets(st.integers(0, 30), max_size=12)), max_size=14
    )
)
def test_a_base_and_its_deltas_give_the_table_again(actions: list[tuple[str, set[int]]]) -> None:
    table, twin = table_of(admit_after=2, dim=2), table_of(admit_after=2, dim=2)
    where = np.unique(bucket_of(np.arange(31), BUCKETS)).tolist()
    for action, ids in [*actions, ("save", set())]:
        chosen = np.array(sorted(ids), np.int64)
        if action == "push":
            push(table, chosen)
        elif action == "remove":
            table.remove(chosen)
        else:
            for bucket in where:
                twin.put_rows(bucket, table.rows_of(bucket, changed_only=True))
                table.mark_clean(bucket)
    for bucket in where:
        a, b = table.rows_of(bucket), twin.rows_of(bucket)
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.records, b.records)
    assert len(table) == len(twin)
    assert not any(len(twin.rows_of(bucket, changed_only=True).ids) for bucket in where), "restored rows are not news"


def test_a_record_is_weights_state_count_and_last_seen() -> None:
    table = table_of(rule=Adagrad(initial_accumulator=0.25), admit_after=2)
    for ids in ([8, 9], [8]):
        push(table, ids)
    rows = table.rows_of(int(bucket_of(np.array([8]), BUCKETS)[0]))
    assert rows.records.shape == (1, table.words)
    np.testing.assert_array_equal(rows.records[0, :4].view(np.float32), table.pull_state(np.array([8]))[0])
    assert rows.records[0, 4:].tolist() == [2, 2]
    waiting = table.rows_of(int(bucket_of(np.array([9]), BUCKETS)[0])).records[0]
    assert (waiting[4] & COUNT, waiting[4] & WAITING, waiting[5]) == (1, WAITING, 1)


def test_a_dropped_bucket_is_empty_and_can_be_filled_again() -> None:
    table = table_of()
    push(table, range(3000))
    kept = table.rows_of(17)
    assert len(kept.ids)
    table.drop_bucket(17)
    assert len(table) == 3000 - len(kept.ids)
    assert len(table.rows_of(17, changed_only=True).removed) == 0, "it moved, it was not forgotten"
    before = table.memory()
    table.put_rows(17, kept)
    assert len(table) == 3000
    assert table.memory() <= before + 16 * 3 * len(kept.ids), "freed slots are used first"
    assert values(table, kept.ids) == [1] * len(kept.ids)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: rows._replace(records=rows.records[:, :-1]), "records of 4 words expected"),
        (lambda rows: rows._replace(records=rows.records[:-1]), "records of 4 words expected"),
        (lambda rows: rows._replace(ids=rows.ids + 1), "ids of other buckets"),
        (lambda rows: rows._replace(removed=rows.ids - 1), "ids of other buckets"),
    ],
)
def test_rows_that_do_not_fit_are_refused(change: Callable[[BucketRows], BucketRows], told: str) -> None:
    table = table_of()
    push(table, range(5000))
    rows = table.rows_of(3)
    with pytest.raises(MismatchError, match=told) as caught:
        Table(table.spec).put_rows(3, change(rows))
    assert "\n" not in str(caught.value)


def test_rows_of_another_server_are_refused() -> None:
    table = table_of()
    push(table, range(5000))
    with pytest.raises(MismatchError, match="holds buckets 10 to 19"):
        Table(table.spec, buckets=range(10, 20)).put_rows(3, table.rows_of(3))


def test_what_was_never_saved_is_forgotten_without_a_trace() -> None:
    table = table_of(capacity=100, on_full="lru")
    for begin in range(0, 2000, 50):
        push(table, range(begin, begin + 50))
    assert not any(len(table.rows_of(bucket, changed_only=True).removed) for bucket in range(BUCKETS))
    assert len(table) <= 100


def test_index_shrinks_after_expiry_and_memory_is_used_again() -> None:
    """The index shrinks after most rows expired, and its memory is used again."""
    table = table_of(expire_seconds=5.0)
    push(table, range(200_000), now=0)
    large = table.memory()
    push(table, range(1000), now=10)
    assert table.expire(now=10) == 199_000
    assert table.memory() < large - 100_000 * 16
    assert values(table, range(1000)) == [2] * 1000
    push(table, range(200_000), now=11)
    assert table.memory() <= large * 1.1
    for bucket in range(BUCKETS):
        table.drop_bucket(bucket)
    assert table.memory() < 200_000
    push(table, [5])
    assert values(table, [5, 6]) == [1, 0]
