"""Async, bounded and geo against plain simulations of the same messages in the same order."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from shards import DIMS, SHAPES, VOCABULARY, Batch, job, owners, started

from echelon.parameter_server.protocol.job_spec import DenseRule
from echelon.parameter_server.protocol.message import WireMessage
from echelon.strategy.sparse_update_rules import Adagrad, Sgd

STEPS = 10


class Simulated:
    """A server as a few numpy arrays: a dict of rows and SGD. Nothing of the package's tables or optimizers."""

    def __init__(self, servers, rate, compensate=0.0):
        self.rows = {name: dict(zip(VOCABULARY.tolist(), servers.rows(name), strict=True)) for name in DIMS}
        self.dense = {name: values.copy() for name, values in servers.dense().items()}
        self.rate, self.compensate, self.version, self.staleness = np.float32(rate), np.float32(compensate), 0, []

    def pull(self, worker):
        """Note the values that the worker must have pulled, and their version."""
        for name, ids in worker.ids.items():
            np.testing.assert_allclose(worker.rows[name], [self.rows[name][i] for i in ids.tolist()], atol=1e-6, rtol=0)
        for name, parameter in worker.net.named_parameters():
            np.testing.assert_allclose(parameter.detach().reshape(-1), self.dense[name], rtol=0, atol=1e-6)
        worker.seen = self.version

    def push(self, worker):
        for name, ids in worker.ids.items():
            for i, g, pulled in zip(ids.tolist(), worker.gradients[name], worker.rows[name], strict=True):
                caught_up = g + self.compensate * g * g * (self.rows[name][i] - pulled)
                self.rows[name][i] = self.rows[name][i] - self.rate * caught_up
        for name, parameter in worker.net.named_parameters():
            g, pulled = parameter.grad.numpy().reshape(-1), parameter.detach().numpy().reshape(-1)
            g = g + self.compensate * g * g * (self.dense[name] - pulled)
            self.dense[name] = self.dense[name] - self.rate * g
        self.staleness.append(self.version - worker.seen)
        self.version += 1


def pulled_values(worker, server):
    """Return the values that the worker pulled, as a push returns them for compensation."""
    owned = worker.frame(server)[1][0]
    counts = list(worker.frame(server)[0]["tables"].values())
    rows, at = [], 0
    for (name, ids), count in zip(worker.ids.items(), counts, strict=True):
        rows.append(worker.rows[name][np.searchsorted(ids, owned[at : at + count])].reshape(-1))
        at += count
    dense = worker._flat({name: p.detach() for name, p in worker.net.named_parameters()})[server]
    return [np.concatenate(rows), dense]


@pytest.mark.parametrize("servers_count", [1, 2])
@pytest.mark.parametrize("compensate", [0.0, 0.5])
def test_async_applies_each_push_at_once_in_the_order_of_arrival(servers_count, compensate):
    rule = DenseRule(kind="SGD", groups=({"lr": 0.2},))
    spec = job(servers_count, 3, "async", Sgd(lr=0.2), rule, compensate=compensate)
    servers, workers = started(spec)
    simulated = Simulated(servers, 0.2, compensate)
    order = random.Random(5)
    waiting = dict.fromkeys(range(3), False)
    for turn in range(3 * STEPS):
        worker = workers[order.randrange(3)]
        if not waiting[worker.number]:
            worker.pull(Batch(turn, 5))
            worker.compute()
            simulated.pull(worker)
        else:
            for server in range(servers_count):
                head, arrays = worker.frame(server)
                has = ["ids", "rows", "dense", "pulled_rows", "pulled_dense"]
                servers.say(server, {**head, "has": has}, *arrays, *pulled_values(worker, server))
            worker.seq += 1
            simulated.push(worker)
        waiting[worker.number] = not waiting[worker.number]
    for shard in servers.shards:
        told = shard.handle(WireMessage({"op": "stats", "worker": -1})).head["staleness"]
        assert told["pushes"] == len(simulated.staleness)
        assert told["mean"] == pytest.approx(np.mean(simulated.staleness))
        assert told["max"] == max(simulated.staleness) > 0
        cells = {str(cell): simulated.staleness.count(cell) for cell in set(simulated.staleness)}
        assert told["histogram"] == cells
    for worker in workers:
        worker.pull(Batch(999, 20), step=0)
        simulated.pull(worker)


def test_geo_adds_what_changed_and_others_see_it():
    spec = job(2, 2, "geo", Adagrad(lr=0.1))
    servers, workers = started(spec)
    draw = np.random.default_rng(1)
    expected = {}
    for name, dim in DIMS.items():
        rows = np.concatenate([servers.rows(name), np.zeros((len(VOCABULARY), dim), np.float32)], 1)
        expected[name] = dict(zip(VOCABULARY.tolist(), rows, strict=True))
    dense = {name: values.copy() for name, values in servers.dense().items()}
    for turn in range(8):
        worker = workers[turn % 2]
        worker.pull(Batch(turn, 4))
        worker.compute()
        worker.gradients = {
            n: draw.normal(size=(len(i), 2 * DIMS[n])).astype(np.float32) for n, i in worker.ids.items()
        }
        worker.push(kind="delta")
        worker.seq += 1
        for name, ids in worker.ids.items():
            for i, change in zip(ids.tolist(), worker.gradients[name], strict=True):
                expected[name][i] = expected[name][i] + change
        for name, parameter in worker.net.named_parameters():
            dense[name] = dense[name] + parameter.grad.numpy().reshape(-1)
    for name, dim in DIMS.items():
        np.testing.assert_array_equal(servers.rows(name), [expected[name][i][:dim] for i in VOCABULARY.tolist()])
        head = {"op": "pull", "worker": 0, "step": 0, "tables": {name: 1}, "state": True}
        for i, owner in zip(VOCABULARY, owners(VOCABULARY, 2), strict=True):
            np.testing.assert_array_equal(servers.say(owner, head, np.array([i])).arrays[0], expected[name][int(i)])
    for name in SHAPES:
        np.testing.assert_array_equal(servers.dense()[name], dense[name])


@pytest.mark.parametrize("bound", [0, 2])
def test_no_worker_gets_further_ahead_than_the_bound(bound):
    """Three threads at random speeds over two servers, which note how far ahead everyone was whom they let go on."""
    spec = job(2, 3, "bounded", staleness=bound)
    servers, workers = started(spec)
    leads, failures = [], []
    for shard in servers.shards:
        shard.mode.missing = noting(shard, leads)

    def train(number):
        draw = random.Random(number + 10 * bound)
        worker = workers[number]
        try:
            for step in range(25):
                worker.pull(Batch(step, 3))
                worker.compute()
                if draw.random() < 0.3:
                    threading.Event().wait(draw.random() * 0.01)
                worker.push()
                worker.seq += 1
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(leads) >= 2 * 75
    assert max(leads) <= bound
    assert [shard.version for shard in servers.shards] == [75, 75]
    assert all(shard.mode.staleness.largest <= 2 * (2 * bound + 1) for shard in servers.shards)


def noting(shard, leads):
    """The shard's own answer, under its lock; beside it, how far the worker is ahead of the slowest."""
    own = shard.mode.missing

    def missing(worker, step):
        late = own(worker, step)
        if not late:
            leads.append(step - min(membership.seq + 1 for membership in shard.members.memberships.values()))
        return late

    return missing


def test_bounded_worker_waits_for_slowest_until_it_moves():
    _, (fast, slow) = started(job(1, 2, "bounded", staleness=1))
    fast.step(Batch(0, 3))
    fast.step(Batch(1, 3))
    arrived = threading.Event()

    def ask():
        fast.pull(Batch(2, 3))
        arrived.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert not arrived.wait(0.3)
    slow.step(Batch(3, 3))
    thread.join()
    assert arrived.is_set()


def test_a_sync_pull_waits_for_the_step_before():
    _, workers = started(job(1, 2))
    for worker in workers:
        worker.pull(Batch(worker.number, 3))
        worker.compute()
    workers[0].push()
    workers[0].seq += 1
    answers = []
    thread = threading.Thread(target=lambda: answers.append(workers[0].pull(Batch(5, 3))))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    workers[1].push()
    thread.join()
    assert workers[0].versions == [1]


def test_a_peek_waits_for_no_worker_and_makes_no_rows():
    servers, workers = started(job(1, 2))
    workers[0].pull(Batch(0, 3), step=50, peek=True)
    assert servers.shards[0].handle(WireMessage({"op": "stats", "worker": -1})).head["rows"] == {"users": 0, "words": 0}


@pytest.mark.parametrize("mode", ["sync", "async", "bounded", "geo"])
def test_every_push_may_come_twice(mode):
    """Retries at random, to one server or all: the weights are those of a run without."""
    finals = []
    for repeat in (0.0, 0.6):
        spec = job(2, 2, mode, Adagrad(lr=0.1), staleness=1)
        servers, workers = started(spec)
        draw = random.Random(3)
        for step in range(6):
            for worker in workers:
                worker.pull(Batch(10 * step + worker.number, 4))
                worker.compute()
                if mode == "geo":
                    worker.gradients = {n: np.tile(g, 2) for n, g in worker.gradients.items()}
            sent = []
            for worker in workers:
                kind = "delta" if mode == "geo" else "gradient"
                sent += [(s, *worker.frame(s, kind=kind)) for s in range(2)]
                worker.push(kind=kind)
            for server, head, arrays in sent:
                while draw.random() < repeat:
                    answer = servers.say(server, head, *arrays)
                    assert answer.head["duplicate"] is True
            for worker in workers:
                worker.commit()
        finals.append([servers.rows(name) for name in DIMS] + list(servers.dense().values()))
    for a, b in zip(*finals, strict=True):
        np.testing.assert_array_equal(a, b)
