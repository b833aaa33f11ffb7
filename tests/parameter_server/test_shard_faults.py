"""Workers that die, come back, are dropped or join: every step's divisor is who took part, the same on all servers."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from shards import DIMS, SHAPES, Batch, Clock, Worker, job, started, sync_step
from test_shard_parity import OneProcess, Rows, plain_sgd

from echelon.base.errors import EchelonError
from echelon.parameter_server.protocol.message import WireMessage
from echelon.strategy.sparse_update_rules import Adagrad, Sgd

#: Calls of the servers that worker 1 still makes in its last step before it dies.
DEATHS = {
    "before its pushes": [],
    "between its pushes": [("push", 0)],
    "between its pushes, the other way round": [("push", 1)],
    "before it committed": [("push", 0), ("push", 1)],
    "between its commits": [("push", 0), ("push", 1), ("commit", 0)],
    "between its commits, the other way round": [("push", 0), ("push", 1), ("commit", 1)],
    "when all was said": [("push", 0), ("push", 1), ("commit", 0), ("commit", 1)],
}


def state(servers):
    return [servers.rows(name) for name in DIMS] + [servers.dense()[name] for name in SHAPES]


def assert_same(a, b):
    for one, other in zip(a, b, strict=True):
        np.testing.assert_array_equal(one, other)


def batch(step, number):
    return Batch(50 * step + number, 5)


def do(worker, calls):
    for call, server in calls:
        if call == "push":
            worker.push(only=server)
        else:
            worker.servers.say(server, {"op": "commit", "worker": worker.number, "seq": worker.seq})


def undisturbed(spec, steps):
    servers, workers = started(spec)
    for step in range(steps):
        sync_step(workers, [batch(step, number) for number in range(len(workers))])
    return state(servers)


@pytest.mark.parametrize("death", DEATHS)
def test_restarted_worker_leaves_the_undisturbed_weights(death):
    spec = job(2, 2, rule=Adagrad(lr=0.1))
    servers, workers = started(spec)
    for step in range(6):
        if step == 3:
            for worker in workers:
                worker.pull(batch(step, worker.number))
                worker.compute()
            do(workers[1], DEATHS[death])
            workers[1] = restarted = Worker(servers, spec, 1)
            told = [answer.head for answer in servers.all({"op": "hello", "worker": 1, "session": "test"})]
            assert all(answer["member"] for answer in told)
            restarted.seq = min(answer["seq"] for answer in told) + 1
            if restarted.seq == 4:  # both servers have its push: say so again
                servers.all({"op": "commit", "worker": 1, "seq": 3})
            workers[0].push()
            workers[0].commit()
            if restarted.seq == 3:
                restarted.step(batch(step, 1))
        else:
            sync_step(workers, [batch(step, number) for number in range(2)])
    assert_same(state(servers), undisturbed(spec, 6))


def reference_without(last, steps):
    """Worker 1 takes part through step ``last``, then leaves; on one server, where no message can be half way."""
    servers, workers = started(job(1, 2, rule=Adagrad(lr=0.1)))
    for step in range(steps):
        sync_step(
            workers[:2] if step <= last else workers[:1], [batch(step, n) for n in range(2 if step <= last else 1)]
        )
        if step == last:
            servers.all({"op": "leave", "worker": 1})
    return state(servers)


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("first", [0, 1])
def test_silent_worker_is_dropped_at_same_step_on_all_servers(death, first):
    """``first``: the server that worker 0 asks first for its next step, and that so finds out."""
    clock = Clock()
    servers, workers = started(job(2, 2, rule=Adagrad(lr=0.1), patience=30.0), clock=clock)
    for step in range(3):
        sync_step(workers, [batch(step, number) for number in range(2)])
    for worker in workers:
        worker.pull(batch(3, worker.number))
        worker.compute()
    do(workers[1], DEATHS[death])
    workers[0].push()
    workers[0].commit()
    clock.now += 31
    servers.all({"op": "beat", "worker": 0})
    committed = any(call == "commit" for call, _ in DEATHS[death])
    servers.say(first, {"op": "pull", "worker": 0, "step": 4, "tables": {}, "dense": False})
    for step in range(4, 7):
        workers[0].step(batch(step, 0))
    last = 3 if committed else 2
    assert [answer.head["last"] for answer in servers.all({"op": "hello", "worker": 1})] == [last] * 2
    assert all(shard.version == 7 for shard in servers.shards)
    assert_same(state(servers), reference_without(last, 7))


def test_dropped_worker_is_refused_until_it_joins():
    clock = Clock()
    servers, workers = started(job(2, 2, patience=30.0), clock=clock)
    for worker in workers:
        worker.pull(batch(0, worker.number))
        worker.compute()
    workers[0].push()
    workers[0].commit()
    clock.now += 31
    workers[0].pull(batch(1, 0))
    with pytest.raises(EchelonError, match=r"worker 1 is not, or no longer, a member .* it has to join"):
        workers[1].push()
    answer = servers.say(0, {"op": "join", "worker": 1}).head
    assert answer["step"] == 2  # step 1 has begun
    workers[1].seq = 2
    workers[0].compute()
    workers[0].push()
    workers[0].commit()
    sync_step(workers, [batch(2, 0), batch(2, 1)])
    assert [shard.version for shard in servers.shards] == [3, 3]


def test_a_slow_worker_that_beats_is_waited_for():
    clock = Clock()
    servers, workers = started(job(1, 2, patience=30.0), clock=clock)
    for worker in workers:
        worker.pull(batch(0, worker.number))
        worker.compute()
    workers[0].push()
    workers[0].seq += 1
    thread = threading.Thread(target=lambda: workers[0].pull(batch(1, 0)))
    thread.start()
    for _ in range(10):
        clock.now += 20
        servers.say(0, {"op": "beat", "worker": 1})
        thread.join(0.05)
    assert thread.is_alive()
    workers[1].push()
    thread.join()
    assert servers.shards[0].mode.staleness.count == 2  # both took part


def test_a_worker_that_never_came_is_named():
    clock = Clock()
    spec = job(1, 2, patience=30.0)
    servers, _ = started(spec, clock=clock)
    other = job(1, 2, patience=30.0, session="again")
    alone = Worker(servers, other, 0)
    alone.begin()  # another session: worker 1 has not been heard of in it
    alone.step(batch(0, 0))
    lines = []

    def wait():
        with pytest.raises(EchelonError) as error:
            alone.pull(batch(1, 0))
        lines.append(str(error.value))

    thread = threading.Thread(target=wait)
    thread.start()
    while thread.is_alive():
        clock.now += 7
        thread.join(0.1)
    assert "server 0 has waited" in lines[0]
    assert "for step 1: worker 1 has not pushed and has never sent a heartbeat" in lines[0]
    assert "\n" not in lines[0]


def test_a_client_that_hangs_up_stops_waiting():
    servers, workers = started(job(1, 2))
    workers[0].step(batch(0, 0))
    head = {"op": "pull", "worker": 0, "step": 1, "tables": {}, "dense": False}
    answer = servers.shards[0].handle(WireMessage(head, []), lambda: True)
    assert answer.head["error"] == "worker 0 closed the connection while it waited for step 1"


def one_process(servers):
    return OneProcess({name: servers.rows(name) for name in DIMS}, plain_sgd, lambda rows: Rows(Sgd(lr=0.1), rows))


def assert_close(servers, one):
    for name in DIMS:
        np.testing.assert_allclose(servers.rows(name), one.tables[name].detach(), rtol=0, atol=1e-6)
    for name, parameter in one.net.named_parameters():
        np.testing.assert_allclose(servers.dense()[name], parameter.detach().reshape(-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("moment", ["between steps", "within a step", "when one server is ahead"])
def test_a_newcomer_counts_from_the_same_step_on_all_servers(moment):
    spec = job(3, 2)
    servers, workers = started(spec)
    one = one_process(servers)
    for step in range(2):
        sync_step(workers, [batch(step, n) for n in range(2)])
        one.step(Batch.joined([batch(step, n) for n in range(2)]))
    if moment == "between steps":
        entry = servers.say(0, {"op": "join", "worker": 2}).head["step"]
    for worker in workers:
        worker.pull(batch(2, worker.number))
        worker.compute()
    for worker in workers:
        worker.push()
    if moment == "within a step":
        entry = servers.say(0, {"op": "join", "worker": 2}).head["step"]
    for worker in workers:
        servers.say(2, {"op": "commit", "worker": worker.number, "seq": 2})
    if moment == "when one server is ahead":
        assert [shard.version for shard in servers.shards] == [2, 2, 3]
        entry = servers.say(0, {"op": "join", "worker": 2}).head["step"]
    for worker in workers:
        worker.commit()
    one.step(Batch.joined([batch(2, n) for n in range(2)]))
    assert entry == 3
    assert_close(servers, one)
    newcomer = Worker(servers, spec, 2, seq=entry)
    for step in range(3, 6):
        sync_step([*workers, newcomer], [batch(step, n) for n in range(3)])
        one.step(Batch.joined([batch(step, n) for n in range(3)]))
        assert_close(servers, one)


def test_a_join_that_a_server_did_not_hear_of_is_undone():
    """Server 2 does not answer when worker 2 joins: no call waits for it for ever, and it can join again."""
    clock = Clock()
    spec = job(3, 2, patience=30.0)
    servers, workers = started(spec, clock=clock)
    one = one_process(servers)
    servers.down = {2}
    with pytest.raises(EchelonError, match="server 2 does not answer"):
        servers.say(0, {"op": "join", "worker": 2})
    servers.down = set()
    assert servers.shards[1].members.is_live(2)
    assert not servers.shards[0].members.is_live(2)
    for step in range(2):
        if step:
            clock.now += 31  # server 1 waits for worker 2 in step 1, finds it silent, asks server 0
            servers.all({"op": "beat", "worker": 0})
            servers.all({"op": "beat", "worker": 1})
        sync_step(workers, [batch(step, n) for n in range(2)])
        one.step(Batch.joined([batch(step, n) for n in range(2)]))
    clock.now += 31
    for worker in workers:
        servers.all({"op": "beat", "worker": worker.number})
    for worker in workers:
        worker.pull(batch(2, worker.number))
    assert [shard.version for shard in servers.shards] == [2, 2, 2]
    assert_close(servers, one)
    assert servers.say(0, {"op": "join", "worker": 2}).head["step"] == 3


def test_drop_waits_for_absent_server_and_happens_on_its_return():
    clock = Clock()
    servers, workers = started(job(2, 2, rule=Adagrad(lr=0.1), patience=30.0), clock=clock)
    for worker in workers:
        worker.pull(batch(0, worker.number))
        worker.compute()
    do(workers[1], DEATHS["between its commits, the other way round"])
    workers[0].push()
    workers[0].commit()
    clock.now += 31
    servers.down = {1}
    thread = threading.Thread(target=lambda: workers[0].pull(batch(1, 0)))
    thread.start()
    thread.join(0.4)
    assert thread.is_alive()
    assert servers.shards[0].version == 0  # server 1 may have what server 0 has not: nothing is decided without it
    servers.down = set()
    thread.join()
    workers[0].compute()
    workers[0].push()
    workers[0].commit()
    assert_same(state(servers), reference_without(0, 2))


def test_last_worker_dropped_by_newcomer_training_goes_on():
    """The last worker may be dropped by a newcomer, here its own restart, and training goes on."""
    clock = Clock()
    spec = job(2, 1, patience=30.0)
    servers, (worker,) = started(spec, clock=clock)
    one = one_process(servers)
    worker.step(batch(0, 0))
    one.step(batch(0, 0))
    entry = servers.say(0, {"op": "join", "worker": 0}).head["step"]  # itself, restarted with nothing in hand
    assert entry == 1
    again = Worker(servers, spec, 0, seq=entry)
    for step in range(1, 3):
        again.step(batch(step, 0))
        one.step(batch(step, 0))
    assert_close(servers, one)


def test_workers_with_fewer_batches_leave_and_the_rest_goes_on():
    servers, workers = started(job(2, 2))
    one = one_process(servers)
    sync_step(workers, [batch(0, n) for n in range(2)])
    one.step(Batch.joined([batch(0, n) for n in range(2)]))
    servers.all({"op": "leave", "worker": 1})
    workers[0].step(batch(1, 0))
    one.step(batch(1, 0))
    assert_close(servers, one)
    assert not servers.shards[0].done()
    servers.all({"op": "leave", "worker": 0})
    assert all(shard.done() for shard in servers.shards)


def test_bounded_goes_on_without_silent_worker_and_readmits_it():
    clock = Clock()
    servers, workers = started(job(2, 2, "bounded", staleness=1, patience=30.0), clock=clock)
    for worker in workers:
        worker.pull(batch(0, worker.number))
        worker.compute()
        worker.push()
        worker.seq += 1
    for step in (1, 2):
        workers[0].step(batch(step, 0))
    clock.now += 31
    for step in (3, 4):
        workers[0].step(batch(step, 0))
    assert all(shard.members.live() == [0] for shard in servers.shards)
    assert servers.say(0, {"op": "join", "worker": 1}).head["step"] == 5
    workers[1].seq = 5
    workers[1].step(batch(5, 1))
    assert all(shard.members.memberships[1].seq == 5 for shard in servers.shards)


class Died(Exception):
    """An event of a worker in the tests below, instead of a call."""


class Mortal(Worker):
    """Dies before some of its calls."""

    def __init__(self, servers, spec, number, draw, chance):
        super().__init__(servers, spec, number)
        self.draw, self.chance, self.servers = draw, chance, self
        self.alive = servers

    def say(self, *call):
        if self.draw.random() < self.chance:
            raise Died
        return self.alive.say(*call)

    def all(self, head):
        return [self.say(server, head) for server in range(self.spec.servers)]


def live(servers, spec, number, steps, draw, chance):
    """A worker that is restarted whenever it dies, and goes on from what the servers know of it."""
    while True:
        worker = Mortal(servers, spec, number, draw, chance)
        try:
            worker.seq = min(answer.head["seq"] for answer in worker.all({"op": "hello", "worker": number})) + 1
            if worker.seq:
                worker.all({"op": "commit", "worker": number, "seq": worker.seq - 1})
            while worker.seq < steps:
                worker.step(batch(worker.seq, number))
            return
        except Died:
            continue


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", ["sync", "bounded"])
def test_workers_that_die_all_the_time_lose_and_repeat_nothing(mode, seed):
    spec, steps = job(2, 2, mode, Adagrad(lr=0.1), staleness=1), 6
    servers, _ = started(spec)
    failures = []

    def run(number):
        try:
            live(servers, spec, number, steps, random.Random(10 * seed + number), 0.1)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [shard.version for shard in servers.shards] == [steps if mode == "sync" else 2 * steps] * 2
    if mode == "sync":
        assert_same(state(servers), undisturbed(spec, steps))
