"""A real shard with a keeper, and pushes that are always the same: what tests of keeping have in common."""

import numpy as np

from echelon.parameter_server.persistence.persistence import ShardPersistence
from echelon.parameter_server.protocol.hashing import bucket_of, owned_by
from echelon.parameter_server.protocol.job_spec import (
    BUCKETS,
    DenseBlock,
    DenseRule,
    JobSpec,
    PersistenceSettings,
    TableSpec,
)
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.shard import ServerShard
from echelon.strategy.sparse_update_rules import Adagrad, Adam

IDS, BATCH = 6400, 640  # ids in use, and in a push
#: One of so many servers: 64 buckets, which keeps tests short.
SERVERS = 16
PASS = 20  # pushes of a worker
PARAMETERS = {"weight": (6, 5), "bias": (7,)}
QUIET = PersistenceSettings(snapshot_every=3600.0)


def blocks(servers):
    """Two parameters, the first cut into so many runs of rows."""
    rows = -(-6 // servers)
    weight = [
        DenseBlock(
            parameter="weight", offset=at * 5, length=min(rows, 6 - at) * 5, shape=(min(rows, 6 - at), 5), server=i
        )
        for i, at in enumerate(range(0, 6, rows))
    ]
    return (*weight, DenseBlock(parameter="bias", offset=0, length=7, shape=(7,), server=servers - 1))


def make_job(servers=SERVERS, mode="async", keeping=QUIET, trainers=1, **table):
    return JobSpec(
        session="test",
        mode=mode,
        trainers=trainers,
        servers=servers,
        tables=(
            TableSpec(name="a", dim=3, seed=1, rule=Adam(), admit_after=2),
            TableSpec(name="b", dim=2, seed=2, rule=Adagrad(row_wise=True), **{"expire_passes": 2, **table}),
        ),
        blocks=blocks(servers),
        dense=DenseRule(kind="Adam", groups=({"lr": 0.1},)),
        keeping=keeping,
    )


def ask(shard, head, arrays=()):
    """A request's answer; an error is one."""
    answer = shard.handle(WireMessage({"worker": -1, **head}, list(arrays)))
    assert "error" not in answer.head, answer.head["error"]
    return answer


def opened(job, server=0, directory=None, mirror=None, wall=lambda: 1000.0, **options):
    """A shard of ``job``, kept in ``directory`` and restored from it if it holds anything."""

    def keep(shard):
        return ShardPersistence(shard, directory, job.keeping, mirror, **options)

    fixed = {"wall": wall, "clock": lambda: 0.0}
    shard = ServerShard(server, job.servers, keep=keep if directory is not None else None, **fixed)
    ask(shard, {"op": "open", "worker": 0, "job": job.to_json()})
    first = np.linspace(-1, 1, sum(int(np.prod(shape)) for shape in PARAMETERS.values())).astype(np.float32)
    ask(shard, {"op": "begin", "worker": 0}, [_own(_parameters(first), job, server)])
    return shard


def _parameters(flat):
    at, found = 0, {}
    for name, shape in PARAMETERS.items():
        found[name] = flat[at : at + int(np.prod(shape))]
        at += int(np.prod(shape))
    return found


def _own(parameters, job, server):
    """A server's part of the dense parameters."""
    held = [b for b in job.blocks if b.server == server]
    return np.concatenate([np.zeros(0, np.float32)] + [parameters[b.parameter][b.offset :][: b.length] for b in held])


def push(shard, number):
    """Push ``number`` of the job, from the workers in turn: this server's part of it. Some begin a pass."""
    job, server, chance = shard.job, shard.server, np.random.default_rng(number)
    worker, seq = number % job.trainers, number // job.trainers
    ids, rows, counts = [], [np.zeros(0, np.float32)], {}
    for spec in job.tables:
        width = spec.push_width + (shard.tables[spec.name].state if job.mode == "geo" else 0)
        own = chance.choice(IDS, size=BATCH, replace=False).astype(np.int64) - IDS // 2
        values = chance.standard_normal((BATCH, width)).astype(np.float32)
        here = np.isin(bucket_of(own, BUCKETS), owned_by(server, BUCKETS, job.servers))
        ids.append(own[here])
        rows.append(values[here].reshape(-1))
        counts[spec.name] = int(here.sum())
    dense = _own(_parameters(chance.standard_normal(37).astype(np.float32)), job, server)
    head = {"op": "push", "worker": worker, "seq": seq, "weight": 1.0 + worker, "version": 0, "tables": counts}
    head |= {"groups": [{"lr": 0.1}], "dense": True, "commit": True, "has": ["ids", "rows", "dense", "blob"]}
    head["kind"] = "delta" if job.mode == "geo" else "gradient"
    blob = chance.integers(0, 256, 33).astype(np.uint8)
    if seq % PASS == 0:
        new_pass(shard, worker, seq // PASS)
    return ask(shard, head, [np.concatenate(ids), np.concatenate(rows), dense, blob]).head


def new_pass(shard, worker, passes):
    """Say that a worker has been through the data so many times; again does no harm."""
    ask(shard, {"op": "new_pass", "worker": worker, "passes": passes})


def received(shard):
    """Return the number of pushes that the shard has."""
    return sum(membership.seq + 1 for membership in shard.members.memberships.values())


def trained(count, job, server=0):
    """A shard that was neither kept nor stopped."""
    shard = opened(job, server)
    for number in range(count):
        push(shard, number)
    return shard


def state_of(shard):
    """All of a shard's state in comparable form."""
    facts = shard.facts()
    found = {"facts": [(frame.head, [a.tobytes() for a in frame.arrays]) for frame in facts]}
    found["facts"][0][0].pop("lsn"), found["facts"][0][0].pop("counts")
    return found | numbers_of(shard)


def numbers_of(shard):
    """Rows and dense blocks alone."""
    found = {f"dense/{name}": array.tobytes() for name, array in shard.dense.to_arrays().items()}
    for name, table in shard.tables.items():
        for bucket in table.buckets:
            rows = table.rows_of(bucket)
            if len(rows.ids):
                found[f"{name}/{bucket}"] = rows.ids.tobytes() + rows.records.tobytes()
    return found
