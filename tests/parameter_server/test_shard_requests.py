"""Requests that a shard takes and refuses, its state, and bit-equal replay of its changes."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from shards import DIMS, SHAPES, VOCABULARY, Batch, Servers, Worker, carried, job, owners, started, sync_step

from echelon.base.errors import EchelonError, PeerLost
from echelon.parameter_server.protocol.job_spec import DenseRule, TableSpec
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.shard import ServerShard
from echelon.parameter_server.table import BucketRows
from echelon.parameter_server.worker.client import ParameterServerClient
from echelon.strategy.sparse_update_rules import Adagrad, Adam

NAN = float("nan")


def good_push(worker, server=0):
    worker.pull(Batch(1, 4))
    worker.compute()
    return worker.frame(server)


def error_of(shard, head, arrays=()):
    answer = shard.handle(WireMessage(head, list(arrays)))
    assert "\n" not in answer.head["error"]
    return answer.head["error"]


MISTAKES = {
    "an unknown request": ({"op": "pusch"}, None, "no request 'pusch'; did you mean 'push'?"),
    "a request without a name": ({"op": None}, None, "no request 'None'"),
    "a worker that is text": ({"worker": "0"}, None, "worker='0'"),
    "a worker that nobody knows": ({"worker": 7}, None, "worker 7 is not, or no longer, a member"),
    "an unknown table": ({"tables": {"user": 3}}, None, "no table 'user'; did you mean 'users'?"),
    "a negative count": ({"tables": {"users": -3, "words": 3}}, None, "-3 ids of table 'users'"),
    "counts that are too small": ({"tables": {"users": 1}}, None, "ids arrived for counts of 1"),
    "a huge count": ({"tables": {"users": 2**62}}, None, "ids arrived for counts of"),
    "tables as a list": ({"tables": ["users"]}, None, "it must count ids by table"),
    "a push out of order": ({"seq": 5}, None, "push 5 reached server 0 after its push -1"),
    "a fraction of a step": ({"seq": 0.5}, None, "seq=0.5"),
    "a weight below nothing": ({"weight": -1.0}, None, "weight=-1.0"),
    "a weight that is none": ({"weight": NAN}, None, "weight=nan"),
    "a rate that is infinite": ({"lrs": {"users": math.inf}}, None, "users=inf"),
    "settings of too many groups": ({"groups": [{}, {}]}, None, "settings for 2 parameter groups; the job has 1"),
    "settings that are no values": ({"groups": [{"lr": {"a": 1}}]}, None, "not plain finite values"),
    "a kind of the wrong mode": ({"kind": "delta"}, None, "kind 'delta' arrived in mode 'sync'"),
    "arrays without names": ({"has": []}, None, "has 3 arrays, but its head names []"),
    "arrays with strange names": (
        {"has": ["ids", "rows", "sparse"]},
        None,
        "but its head names ['ids', 'rows', 'sparse']",
    ),
    "a flag that is text": ({"commit": "yes"}, None, "commit='yes'"),
    "ids of the wrong kind": ({}, (0, np.float32), "ids are float32, expected int64"),
    "rows of the wrong kind": ({}, (1, np.float64), "rows are float64, expected float32"),
    "too few rows": ({}, (1, 3), "rows has 3 entries"),
    "too many dense values": ({}, (2, 1000), "dense has 1000 entries"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_push_is_refused_in_one_line_and_changes_nothing(name):
    change, array, line = MISTAKES[name]
    servers, (worker,) = started(job(1, 1))
    head, arrays = good_push(worker)
    if array is not None:
        at, what = array
        arrays[at] = np.zeros(what, arrays[at].dtype) if isinstance(what, int) else arrays[at].astype(what)
    shard = servers.shards[0]
    before = [frame.head for frame in shard.facts()]
    assert line in error_of(shard, {**head, **change}, arrays)
    assert [frame.head for frame in shard.facts()] == before
    worker.push()
    assert shard.version == 1


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("array", "place"), [(1, "table 'words'"), (2, "parameter 'second.bias'")])
def test_a_gradient_that_is_no_number_is_refused_with_its_place(poison, array, place):
    servers, (worker,) = started(job(1, 1, "async"))
    head, arrays = good_push(worker)
    arrays[array] = arrays[array].copy()
    arrays[array][-1] = poison
    assert f"a gradient of {place} that is NaN or infinite" in error_of(servers.shards[0], head, arrays)
    assert servers.shards[0].lsn == 1  # begin
    np.testing.assert_array_equal(len(servers.shards[0].tables["users"]), 0)


def test_ids_of_another_server_are_refused():
    servers, (worker,) = started(job(2, 1))
    head, arrays = good_push(worker)
    wrong = VOCABULARY[owners(VOCABULARY, 2) == 1][: len(arrays[0])]
    arrays[0] = np.resize(wrong, len(arrays[0]))
    assert "belongs to another server" in error_of(servers.shards[0], head, arrays)
    pull = {"op": "pull", "worker": 0, "step": 0, "tables": {"users": 1}}
    assert "belongs to another server" in error_of(servers.shards[0], pull, [wrong[:1]])


def test_random_requests_are_answered_and_leave_shard_working():
    servers, (worker,) = started(job(1, 1))
    shard = servers.shards[0]
    head, arrays = good_push(worker)
    draw = random.Random(0)
    values = [None, -1, 0, 2**70, 1.5, NAN, "x", [], {}, [[]], {"users": 1}, {"users": None}, True, "../..", "\0"]
    operations = [*shard._operations, "", "__init__"]
    keys = [*head, "step", "commit", "peek", "state", "job", "path", "table", "format", "since", "last", "passes"]
    refused, taken, before = 0, 0, shard.lsn
    for _ in range(3000):
        op = draw.choice([o for o in operations if o not in ("leave", "join", "fence", "drop", "enter", "new_pass")])
        mad = {**head, "op": op} | {draw.choice(keys): draw.choice(values) for _ in range(draw.randrange(1, 4))}
        mixed = draw.sample([*arrays, np.zeros(3, np.uint8)], draw.randrange(4))
        answer = shard.handle(carried(WireMessage(mad, mixed)), lambda: True)
        assert ("error" in answer.head) != ("ok" in answer.head)
        refused += "error" in answer.head
        taken += answer.head.get("duplicate") is False
    assert refused > 1500
    assert shard.lsn == before + taken
    worker.seq = shard.members.memberships[0].seq + 1
    worker.push()
    assert shard.version == taken + 1


def test_workers_must_agree_on_the_job():
    servers, _ = started(job(1, 2))
    other = job(1, 2, rule=Adam(lr=0.5)).to_json()
    line = error_of(servers.shards[0], {"op": "open", "worker": 1, "job": other})
    assert line.startswith("worker 1 was built differently from the worker that opened the job: ")
    assert line.endswith("job.tables[0].rule.kind is 'Adam', not 'Sgd'")


def test_jobs_that_cannot_be_are_refused():
    shard = ServerShard(0, 2)
    cases = [
        (job(1, 1), "a job for 1 servers reached one of 2"),
        (
            job(2, 1, dense=DenseRule(kind="Adam", groups=({"lr": -1.0},))),
            "no Adam on cpu: Invalid learning rate: -1.0",
        ),
        (job(2, 1, device="gpu"), "no SGD on gpu"),
        (job(2, 1, tables=(TableSpec(name="a", dim=2), TableSpec(name="a", dim=3))), "two tables of one name"),
        (job(2, 1, patience=0.0), "patience above 0"),
    ]
    for spec, line in cases:
        assert line in error_of(shard, {"op": "open", "worker": 0, "job": spec.to_json()})
    assert "'push' is refused; open a job first" in error_of(shard, {"op": "push", "worker": 0})
    assert shard.handle(WireMessage({"op": "hello", "worker": 0})).head["opened"] is False


def test_another_session_begins_from_nothing():
    servers, (worker,) = started(job(1, 1))
    first = servers.rows("users")
    worker.step(Batch(0, 5))
    assert not np.array_equal(servers.rows("users"), first)
    Worker(servers, job(1, 1, session="next"), 0).begin()
    np.testing.assert_array_equal(servers.rows("users"), first)
    assert servers.all({"op": "hello", "worker": 0})[0].head["seq"] == -1


def test_only_the_first_values_of_worker_0_count():
    spec = job(1, 2)
    servers = Servers(1)
    workers = [Worker(servers, spec, number) for number in range(2)]
    for parameter in workers[1].net.parameters():
        parameter.data.fill_(9.0)
    workers[1].begin()
    workers[0].begin()
    expected = workers[0]._flat({n: p.detach() for n, p in workers[0].net.named_parameters()})[0]
    for parameter in workers[0].net.parameters():
        parameter.data.fill_(5.0)
    workers[0].begin()
    np.testing.assert_array_equal(servers.shards[0].dense.values(), expected)


def test_the_last_three_states_of_a_worker_are_kept():
    servers, (worker,) = started(job(1, 1))
    for step in range(4):
        worker.pull(Batch(step, 3))
        worker.compute()
        head, arrays = worker.frame(0)
        servers.say(0, {**head, "has": [*head["has"], "blob"]}, *arrays, np.full(3, step, np.uint8))
        worker.seq += 1
    answer = servers.say(0, {"op": "blob", "worker": 0})
    assert answer.head["steps"] == servers.say(0, {"op": "hello", "worker": 0}).head["saved"] == [1, 2, 3]
    assert [array.tolist() for array in answer.arrays] == [[1] * 3, [2] * 3, [3] * 3]


@pytest.mark.parametrize(("seqs", "last"), [((4, 4), 4), ((4, 2), 2), ((1, -1), -1)])
def test_a_worker_resumes_from_the_push_all_servers_have(seqs, last):
    standing = [{"opened": True, "session": "test", "member": True, "seq": seq} for seq in seqs]
    client = ParameterServerClient([None, None], job(2, 1), 0)
    assert client.last_push(standing) == last
    standing[1]["member"] = False
    assert client.last_push(standing) is None


def test_a_server_that_lost_its_state_is_named_to_a_worker():
    standing = [{"opened": True, "session": "test", "member": True, "seq": 4}, {"opened": False}]
    client = ParameterServerClient([None, None], job(2, 1), 0)
    with pytest.raises(PeerLost, match="server 1 has lost its state: it has the pushes of worker 0 up to -1, server 0"):
        client.last_push(standing)


def test_a_serving_shard_answers_reads_only():
    shard = ServerShard(0, 1, read_only=True)
    shard.install(job(1, 1, blocks=()))
    head = {"op": "pull", "worker": -1, "step": 0, "tables": {"users": 2}, "peek": True}
    rows = shard.handle(WireMessage(head, [VOCABULARY[:2]])).arrays[0].reshape(2, -1)
    np.testing.assert_array_equal(rows, shard.tables["users"].pull(VOCABULARY[:2]))
    assert error_of(shard, {**head, "peek": False}, [VOCABULARY[:2]]) == "server 0 is read-only: pull with peek"
    for op in ("push", "begin", "open", "leave", "save", "load", "join", "drop"):
        assert f"is read-only: '{op}' is refused" in error_of(shard, {"op": op, "worker": 0})
    assert shard.handle(WireMessage({"op": "stats", "worker": -1})).head["lsn"] == 0


class Notes:
    """A keeper that writes changes into a list."""

    def __init__(self):
        self.frames = []

    def start(self):
        return False

    def append(self, frame):
        self.frames.append(carried(frame))

    def close(self):
        pass


def bits(shard):
    """Everything: rows with their state and counts, blocks with theirs, and the facts."""
    kept = {f"{name}/{b}": t.rows_of(b).records for name, t in shard.tables.items() for b in t.buckets}
    kept |= {f"{name}/{b}/ids": t.rows_of(b).ids for name, t in shard.tables.items() for b in t.buckets}
    facts = [{**f.head, "counts": None, "now": None} for f in shard.facts()]
    return kept | shard.dense.to_arrays(), facts


def assert_equal_bits(a, b):
    (arrays, facts), (other_arrays, other_facts) = bits(a), bits(b)
    assert facts == other_facts
    assert arrays.keys() == other_arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, other_arrays[name])


def eventful(spec, notes, at=lambda servers, step: None, steps=10):
    """A run in which everything happens: joins, drops, retries, passes, evictions."""
    servers = Servers(spec.servers, keep=lambda shard: notes if shard.server == 0 else None)
    workers = [Worker(servers, spec, number) for number in range(spec.trainers)]
    for worker in workers:
        worker.begin()
    for step in range(steps):
        at(servers, step)
        if step == 3:
            entry = servers.say(0, {"op": "join", "worker": 2}).head["step"]
            newcomer = Worker(servers, spec, 2, seq=entry)
        if step == 4 and spec.mode == "sync":
            workers.append(newcomer)
        if step == 6:
            servers.all({"op": "leave", "worker": 1})
            workers = [worker for worker in workers if worker.number != 1]
        for worker in workers:
            worker.pull(Batch(9 * step + worker.number, 2))
            worker.compute()
        at(servers, step)
        for worker in workers:
            for server in range(spec.servers):
                head, arrays = worker.frame(server)
                if server == 0:
                    head, arrays = {**head, "has": [*head["has"], "blob"]}, [*arrays, np.full(2, step, np.uint8)]
                for _ in range(1 + step % 2):
                    servers.say(server, head, *arrays)
        at(servers, step)
        if step % 3 == 2:
            servers.all({"op": "new_pass", "worker": 0})
        for worker in workers:
            worker.commit()
    return servers


DENSE = DenseRule(kind="Adam", groups=({"lr": 0.01},))


@pytest.mark.parametrize("mode", ["sync", "async", "bounded"])
def test_changes_played_again_give_the_same_bits(mode):
    spec = job(2, 2, mode, Adam(lr=0.01), DENSE, staleness=99)
    notes = Notes()
    servers = eventful(spec, notes)
    again = ServerShard(0, 2)
    again.install(spec)
    for frame in notes.frames:
        again.apply(frame)
    assert again.lsn == servers.shards[0].lsn == len(notes.frames)
    assert_equal_bits(again, servers.shards[0])


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("on_full", [None, "lru"])
@pytest.mark.parametrize("seed", range(2))
def test_replay_on_buckets_of_different_moments_gives_same_bits(mode, on_full, seed):
    """Copy state as a snapshot does: facts first, then each bucket and the blocks at a moment of its own."""
    tables = tuple(
        TableSpec(name=name, dim=dim, seed=5, rule=Adagrad(lr=0.1), expire_passes=2, admit_after=2)
        if on_full is None
        else TableSpec(name=name, dim=dim, seed=5, rule=Adagrad(lr=0.1), capacity=24, on_full="lru")
        for name, dim in DIMS.items()
    )
    spec = job(2, 2, mode, dense=DENSE, tables=tables)
    draw, notes = random.Random(seed), Notes()
    begin = draw.randrange(1, 20)
    saved, floors, moments = {}, {name: {} for name in DIMS}, iter(range(10**6))

    def save(servers, step):
        shard, moment = servers.shards[0], next(moments)
        if moment == begin:
            saved["facts"], saved["lsn"] = [carried(frame) for frame in shard.facts()], shard.lsn
        if moment < begin:
            return
        for name, table in shard.tables.items():
            for bucket in table.buckets:
                if bucket not in floors[name] and (draw.random() < 0.2 or moment == 29):
                    floors[name][bucket] = shard.lsn
                    saved[name, bucket] = BucketRows(*(array.copy() for array in table.rows_of(bucket)))
        if "dense" not in saved and (draw.random() < 0.2 or moment == 29):
            saved["dense"], saved["dense_lsn"] = shard.dense.to_arrays(), shard.lsn

    servers = eventful(spec, notes, save)
    again = ServerShard(0, 2)
    again.install(spec)
    for name, table in again.tables.items():
        for bucket in table.buckets:
            table.put_rows(bucket, saved[name, bucket])
    again.dense.from_arrays(saved["dense"])
    again.restore_facts(saved["facts"])
    again.set_floors(floors, saved["dense_lsn"])
    for frame in notes.frames[saved["lsn"] :]:
        again.apply(frame)
    again.set_floors({}, 0)
    assert_equal_bits(again, servers.shards[0])
    if on_full == "lru":
        assert any(frame.head["op"] == "evicted" for frame in notes.frames)


def test_a_full_table_refuses_the_push_and_stays_as_it_was():
    tables = (TableSpec(name="users", dim=4, capacity=8), TableSpec(name="words", dim=3))
    servers, (worker,) = started(job(1, 1, "async", tables=tables))
    shard = servers.shards[0]
    worker.pull(Batch(2, 40))
    worker.compute()
    with pytest.raises(EchelonError, match=r"table 'users' is full: 0 of 8 rows here"):
        worker.push()
    assert len(shard.tables["words"]) == 0
    assert shard.version == 0
    worker.pull(Batch(3, 2))
    worker.compute()
    worker.push()
    assert shard.version == 1


def test_a_full_table_ends_a_synchronous_job_with_one_line():
    tables = (TableSpec(name="users", dim=4, capacity=8), TableSpec(name="words", dim=3))
    _, (worker,) = started(job(1, 1, tables=tables))
    worker.pull(Batch(2, 40))
    worker.compute()
    for _ in range(2):
        with pytest.raises(EchelonError, match=r"table 'users' is full: 0 of 8 rows here"):
            worker.push()
    with pytest.raises(EchelonError, match="table 'users' is full"):
        worker.pull(Batch(3, 4))
    worker.pull(Batch(3, 4), peek=True)


def test_a_pass_ends_after_the_same_step_on_every_server():
    """Worker 0 announces it before worker 1 has pushed the last step of it, on one server; after, on the other."""
    tables = tuple(TableSpec(name=name, dim=dim, expire_passes=1) for name, dim in DIMS.items())
    servers, workers = started(job(2, 2, tables=tables))
    sync_step(workers, [Batch(0, 3), Batch(1, 3)])
    for worker in workers:
        worker.pull(Batch(2 + worker.number, 3))
        worker.compute()
    workers[0].push()
    servers.say(0, {"op": "new_pass", "worker": 0})
    workers[1].push()
    for worker in workers:
        worker.commit()
    for _ in range(3):  # a retry is no other pass
        servers.say(1, {"op": "new_pass", "worker": 0})
    assert [shard.store.passes for shard in servers.shards] == [1, 1]
    for shard in servers.shards:
        for name, table in shard.tables.items():
            seen = np.concatenate([table.rows_of(bucket).records[:, -1] for bucket in table.buckets])
            assert len(seen)
            assert (seen == 0).all(), name  # both steps belong to the pass before


def test_dense_state_comes_back_for_every_optimizer():
    for kind, settings in {
        "SGD": {"lr": 0.1, "momentum": 0.9}, "Adagrad": {"lr": 0.1}, "Adam": {"lr": 0.1, "amsgrad": True},
        "AdamW": {"lr": 0.1}, "FTRL": {"lr": 0.1}, "LARS": {"lr": 0.1}, "LAMB": {"lr": 0.1},
    }.items():  # fmt: skip
        spec = job(1, 1, dense=DenseRule(kind=kind, groups=(settings, {**settings, "lr": 0.05})))
        servers, (worker,) = started(spec)
        for step in range(3):
            worker.step(Batch(step, 4))
        own = servers.shards[0].dense
        again = ServerShard(0, 1)
        again.install(spec)
        again.dense.from_arrays({name: array.copy() for name, array in own.to_arrays().items()})
        gradient = np.random.default_rng(0).normal(size=own.size).astype(np.float32)
        for dense in (own, again.dense):
            dense.step(gradient, [])
        np.testing.assert_array_equal(own.values(), again.dense.values())
        assert set(own.to_arrays()) == set(again.dense.to_arrays())
    assert len(SHAPES) == 4
