"""A sparse table: any id has a row, whatever the order, the buckets, the servers and the threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.base.errors import EchelonError, MismatchError, UsageError
from echelon.parameter_server.protocol.hashing import bucket_of, mix_all, owned_by
from echelon.parameter_server.protocol.job_spec import BUCKETS, Initializer, TableSpec
from echelon.parameter_server.table import Table
from echelon.parameter_server.table.compiled import kernel
from echelon.strategy.sparse_update_rules import Adagrad, Adam, Momentum, Sgd

EXTREMES = np.array([0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**32)], np.int64)


def spec(**given: object) -> TableSpec:
    return TableSpec(**{"name": "t", "dim": 3, "rule": Sgd(lr=1.0), "seed": 7, **given})  # type: ignore[arg-type]


def some(n: int, seed: int = 0) -> np.ndarray:
    """Different ids from the whole range."""
    return mix_all(np.arange(n, dtype=np.int64) + np.int64(seed * 10**9)).view(np.int64)


def noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_every_int64_is_an_id() -> None:
    table = Table(spec())
    before = table.pull(EXTREMES)
    grads = noise((len(EXTREMES), 3))
    table.push(EXTREMES, grads)
    np.testing.assert_array_equal(table.pull(EXTREMES), before - grads)
    assert len(table) == len(EXTREMES)
    assert len(np.unique(before)) == before.size, "ids share initial values"


def test_a_pull_changes_nothing() -> None:
    table = Table(spec())
    first = table.pull(some(100))
    assert len(table) == 0
    assert table.step == 0
    np.testing.assert_array_equal(table.pull(np.repeat(some(100), 2)), np.repeat(first, 2, axis=0))


def test_uniform_initial_values_match_documented_function() -> None:
    """Uniform initial values are the documented function of seed and id."""
    ids, dim = some(500), 5
    got = Table(spec(dim=dim, seed=-3, initializer=Initializer(low=-0.25, high=0.75))).pull(ids)
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        root = mix_all(np.array([-3], np.int64).view(np.uint64) + golden)
        stream = mix_all(root ^ ids.view(np.uint64))[:, None]
        drawn = mix_all(stream + (1 + np.arange(dim, dtype=np.uint64) // np.uint64(2)) * golden)
    halves = np.where(np.arange(dim) % 2 == 1, drawn >> np.uint64(32), drawn & np.uint64(0xFFFFFFFF))
    share = (halves >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)
    np.testing.assert_array_equal(got, np.float32(-0.25) + np.float32(1.0) * share)


def test_uniform_and_normal_have_the_moments_they_should() -> None:
    uniform = Table(spec(dim=8, initializer=Initializer(low=-1.0, high=3.0))).pull(some(20_000))
    assert uniform.min() >= -1
    assert uniform.max() < 3
    np.testing.assert_allclose([uniform.mean(), uniform.var()], [1, 16 / 12], atol=0.02)
    normal = Table(spec(dim=7, initializer=Initializer(kind="normal", low=2.0, high=0.5))).pull(some(20_000))
    standard = (normal.astype(np.float64) - 2) / 0.5
    np.testing.assert_allclose([standard.mean(), standard.var(), (standard**4).mean()], [0, 1, 3], atol=0.06)
    assert abs(np.corrcoef(standard.T) - np.eye(7)).max() < 0.03, "entries of a row depend on each other"


def test_constant_initial_values_and_state() -> None:
    table = Table(spec(rule=Adagrad(initial_accumulator=0.5), initializer=Initializer(kind="constant", low=0.125)))
    np.testing.assert_array_equal(table.pull_state(EXTREMES), np.tile([0.125] * 3 + [0.5] * 3, (len(EXTREMES), 1)))


def test_other_seeds_give_other_rows() -> None:
    one, two = Table(spec(seed=1)).pull(some(10)), Table(spec(seed=2)).pull(some(10))
    assert not (one == two).any()


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "remove"]),
            st.lists(st.one_of(st.integers(-6, 6), st.integers(-(2**63), 2**63 - 1)), unique=True, max_size=60),
        ),
        max_size=12,
    )
)
def test_the_index_is_a_dictionary(actions: list[tuple[str, list[int]]]) -> None:
    # one bucket holds everything, so that clusters, wrap-around and growth meet
    table = Table(spec(dim=1, initializer=Initializer(kind="constant", low=0.0)))
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
    every = np.array([*model, 99, -99], np.int64)
    expected = [model.get(int(key), 0) for key in every]
    np.testing.assert_array_equal(table.pull(every)[:, 0], expected)


def test_crowded_bucket_keeps_every_row_while_others_come_and_go() -> None:
    pool = np.arange(3_000_000, dtype=np.int64)
    crowd = pool[bucket_of(pool, BUCKETS) == 5]
    assert len(crowd) > 2000
    table, rng = Table(spec(dim=1), buckets=range(5, 6)), np.random.default_rng(3)
    alive: dict[int, float] = {}
    for turn in range(60):
        come = rng.choice(crowd, 200, replace=False)
        grads = np.full((200, 1), turn, np.float32)
        new = table.pull(come)[:, 0] - grads[:, 0]
        table.push(come, grads)
        alive.update(zip(come.tolist(), new.tolist(), strict=True))
        go = rng.choice(crowd, 150, replace=False)
        assert table.remove(go) == sum(key in alive for key in go.tolist())
        for key in go.tolist():
            alive.pop(key, None)
        assert len(table) == len(alive)
    ids = np.array(sorted(alive), np.int64)
    np.testing.assert_array_equal(table.pull(ids)[:, 0], np.array([alive[key] for key in ids.tolist()], np.float32))
    assert table.memory() < 3000 * (table.words * 4 + 2 * 16) + 50_000, "slots that were let go are not used again"


@pytest.mark.parametrize("servers", [2, 3, 7])
def test_any_number_of_servers_gives_the_same_bits(servers: int) -> None:
    about = spec(dim=5, rule=Adam(), admit_after=2, admit_probability=0.7)
    whole = Table(about)
    parts = [Table(about, buckets=owned_by(s, BUCKETS, servers)) for s in range(servers)]
    ids = some(3000)
    owner = bucket_of(ids, BUCKETS) * servers // BUCKETS
    for step in range(5):
        chosen = np.random.default_rng(step).random(len(ids)) < 0.6
        grads = noise((len(ids), 5), step)
        whole.push(ids[chosen], grads[chosen])
        for s, part in enumerate(parts):
            mine = chosen & (owner == s)
            part.push(ids[mine][::-1], grads[mine][::-1])
    for s, part in enumerate(parts):
        np.testing.assert_array_equal(part.pull_state(ids[owner == s]), whole.pull_state(ids[owner == s]))
    assert sum(map(len, parts)) == len(whole)
    assert 0 < len(whole) < len(ids)


def test_an_id_of_another_server_is_refused_and_leaves_nothing() -> None:
    table = Table(spec(), buckets=range(512))
    ids = some(100)
    with pytest.raises(MismatchError, match=r"bucket \d+, but this server holds buckets 0 to 511"):
        table.push(ids, noise((100, 3)))
    assert len(table) == 0
    with pytest.raises(MismatchError, match="holds buckets 0 to 511"):
        table.pull(ids)
    mine = ids[bucket_of(ids, BUCKETS) < 512]
    np.testing.assert_array_equal(table.pull(mine), Table(spec()).pull(mine))


def test_a_wrong_shape_is_named() -> None:
    with pytest.raises(UsageError, match=r"4 ids need values \(4, 3\), got \(4, 2\)"):
        Table(spec()).push(some(4), noise((4, 2)))


def test_read_only_and_unaligned_arrays_are_read_like_others() -> None:
    ids, grads = some(50), noise((50, 3))
    plain, other = Table(spec()), Table(spec())
    plain.push(ids, grads)
    frozen = np.frombuffer(ids.tobytes(), np.int64), np.frombuffer(b"x" + grads.tobytes(), np.uint8)[1:]
    other.push(frozen[0], frozen[1].view(np.float32).reshape(50, 3))
    np.testing.assert_array_equal(other.pull(frozen[0]), plain.pull(ids))


def test_a_table_on_disk_equals_one_in_memory(tmp_path: Path) -> None:
    about = {"dim": 9, "rule": Momentum(lr=0.1)}
    memory, disk = Table(spec(**about)), Table(spec(**about, disk=True), directory=tmp_path)
    for step in range(4):
        ids, grads = some(20_000, step % 3), noise((20_000, 9), step)
        for table in (memory, disk):
            table.push(ids, grads)
            table.remove(ids[::5])
    ids = np.concatenate([some(20_000, step) for step in range(3)])
    np.testing.assert_array_equal(disk.pull_state(ids), memory.pull_state(ids))
    assert len(disk) == len(memory)
    assert not list(tmp_path.iterdir()), "its file would outlive a killed process"


def test_disk_without_a_directory_is_an_error() -> None:
    with pytest.raises(UsageError, match="needs a directory"):
        Table(spec(disk=True))


def test_threads_may_push_and_pull_at_once() -> None:
    table = Table(spec(dim=4, initializer=Initializer(kind="constant", low=0.0)))
    ids, rounds = some(5000), 30
    wrong: list[np.ndarray] = []

    def push(seed: int) -> None:
        for turn in range(rounds):
            order = np.random.default_rng(seed * 100 + turn).permutation(ids)
            table.push(order, np.full((len(ids), 4), -1, np.float32))

    def pull() -> None:
        for _ in range(rounds):
            rows = table.pull(ids)
            if (rows != rows[0, 0]).any():  # a push is seen whole or not at all
                wrong.append(rows)

    threads = [threading.Thread(target=push, args=(s,)) for s in range(2)] + [threading.Thread(target=pull)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    np.testing.assert_array_equal(table.pull(ids), np.full((len(ids), 4), 2 * rounds, np.float32))
    assert table.step == 2 * rounds


def test_memory_per_id_stays_low_at_every_size() -> None:
    table, ids = Table(spec(dim=16, rule=Adagrad(row_wise=True))), some(400_000)
    grads = np.zeros((5000, 16), np.float32)
    for begin in range(0, len(ids), 5000):
        table.push(ids[begin : begin + 5000], grads)
        if begin >= 50_000:
            assert table.memory() / len(table) <= 110, f"at {len(table)} rows"


def test_errors_are_one_line() -> None:
    for wrong in (lambda: Table(spec(disk=True)), lambda: Table(spec(expire_passes=1, expire_seconds=1.0))):
        with pytest.raises(EchelonError) as caught:
            wrong()
        assert "\n" not in str(caught.value)


def test_a_kernel_that_cannot_be_cached_is_compiled_all_the_same() -> None:
    written: dict[str, Callable[[int], int]] = {}
    exec("def double(x): return 2 * x", written)  # in no file, so there is no place beside it
    assert kernel(written["double"])(21) == 42
