"""Work around a table: unique ids, merged gradients, ids by server; against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.parameter_server.protocol.hashing import bucket_of, owner_of
from echelon.parameter_server.protocol.job_spec import BUCKETS
from echelon.parameter_server.table import add_rows, dedupe, dedupe_by_server, expand, merge, partition

ids_lists = st.lists(st.one_of(st.integers(-5, 5), st.integers(-(2**63), 2**63 - 1)), max_size=200)


@settings(max_examples=80)
@given(ids_lists)
def test_unique_ids_come_in_the_order_of_first_appearance(given_ids: list[int]) -> None:
    ids = np.array(given_ids, np.int64)
    unique, inverse = dedupe(ids)
    assert unique.tolist() == list(dict.fromkeys(given_ids))
    np.testing.assert_array_equal(unique[inverse], ids)


@settings(max_examples=60)
@given(ids_lists, st.integers(1, 1024))
def test_partition_sorts_by_owner_and_keeps_the_order(given_ids: list[int], servers: int) -> None:
    ids = np.array(given_ids, np.int64)
    order, counts = partition(ids, servers)
    owners = np.array([owner_of(int(b), BUCKETS, servers) for b in bucket_of(ids, BUCKETS)], np.int64)
    expected = np.argsort(owners, kind="stable")
    assert (order is None) == (expected.tolist() == list(range(len(ids))))
    np.testing.assert_array_equal(expected if order is None else order, expected)
    np.testing.assert_array_equal(counts, np.bincount(owners, minlength=servers))


@settings(max_examples=60)
@given(ids_lists, st.integers(1, 1024))
def test_unique_ids_by_server_are_grouped(given_ids: list[int], servers: int) -> None:
    ids = np.array(given_ids, np.int64)
    unique, inverse = dedupe_by_server(ids, servers)
    np.testing.assert_array_equal(unique[inverse], ids)
    assert sorted(unique.tolist()) == sorted(set(given_ids))
    assert servers == 1 or partition(unique, servers)[0] is None


@pytest.mark.parametrize("dim", [1, 3, 16, 50])
def test_expand_and_add_rows_are_each_others_transpose(dim: int) -> None:
    rng = np.random.default_rng(dim)
    inverse = rng.integers(0, 40, 500)
    rows = rng.standard_normal((40, dim)).astype(np.float32)
    np.testing.assert_array_equal(expand(rows, inverse), rows[inverse])
    grads = rng.standard_normal((500, dim)).astype(np.float32)
    expected = np.zeros((41, dim), np.float32)
    np.add.at(expected, inverse, grads)  # adds in order, as a table must
    np.testing.assert_array_equal(add_rows(grads, inverse, 41), expected)


def test_merge_weighs_and_adds_in_the_order_of_workers() -> None:
    rng = np.random.default_rng(0)
    ids = [rng.permutation(60)[:n].astype(np.int64) - 30 for n in (40, 0, 55, 13)]
    grads = [rng.standard_normal((len(part), 5)).astype(np.float32) for part in ids]
    weights = [0.25, 1.0, 3.0, 1 / 3]
    unique, total = merge(ids, grads, weights)
    assert unique.tolist() == list(dict.fromkeys(np.concatenate(ids).tolist()))
    for key, row in zip(unique, total, strict=True):
        expected = np.zeros(5, np.float32)
        for part, values, weight in zip(ids, grads, weights, strict=True):
            for value in values[part == key]:
                expected = expected + np.float32(weight) * value
        np.testing.assert_array_equal(row, expected)


def test_merge_has_the_same_bits_for_any_number_of_servers() -> None:
    rng = np.random.default_rng(1)
    ids = [rng.permutation(500)[:400].astype(np.int64) for _ in range(3)]
    grads = [rng.standard_normal((400, 8)).astype(np.float32) for _ in ids]
    weights = [1.0, 2.0, 0.5]
    whole = dict(zip(*_plain(merge(ids, grads, weights)), strict=True))
    for server in range(3):
        mine = [bucket_of(part, BUCKETS) * 3 // BUCKETS == server for part in ids]
        part = merge(
            [i[m] for i, m in zip(ids, mine, strict=True)], [g[m] for g, m in zip(grads, mine, strict=True)], weights
        )
        for key, row in zip(*_plain(part), strict=True):
            assert whole.pop(key) == row
    assert not whole


def _plain(merged: tuple[np.ndarray, np.ndarray]) -> tuple[list[int], list[bytes]]:
    return merged[0].tolist(), [row.tobytes() for row in merged[1]]


def test_nothing_is_a_batch_too() -> None:
    nobody = np.empty(0, np.int64)
    assert [len(part) for part in dedupe(nobody)] == [0, 0]
    assert partition(nobody, 3)[1].tolist() == [0, 0, 0]
    assert expand(np.empty((0, 4), np.float32), nobody).shape == (0, 4)
    assert add_rows(np.empty((0, 4), np.float32), nobody, 2).tolist() == [[0.0] * 4] * 2
    assert merge([nobody, nobody], [np.empty((0, 4), np.float32)] * 2, [1.0, 1.0])[1].shape == (0, 4)
