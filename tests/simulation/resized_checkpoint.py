"""A checkpoint of a life's servers, loaded by another number of servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from simulated_job import SimulatedJob

from echelon.parameter_server.persistence.checkpoint import load_into
from echelon.parameter_server.protocol.hashing import bucket_of, owner_of
from echelon.parameter_server.protocol.job_spec import BUCKETS
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.shard import ServerShard

Values = dict[int, tuple[float, ...]]


def find_difference(job: SimulatedJob, saved: Path, count: int) -> str:
    """Save the job's servers, load them into ``count`` servers, and return what differs; '' if nothing does."""
    shards = [job.shard(server) for server in range(job.shape.servers)]
    if not all(shards):
        return ""
    for shard in shards:
        assert shard is not None
        answer = shard.handle(WireMessage({"op": "save", "worker": -1, "path": str(saved), "step": 1}))
        if "error" in answer.head:
            return f"no checkpoint: {answer.head['error']}"
    blocks = tuple(replace(block, server=block.server % count) for block in job.spec.blocks)
    spec, others = replace(job.spec, servers=count, blocks=blocks), []
    for server in range(count):
        other = ServerShard(server, count)
        other.install(spec)
        load_into(other, saved)
        others.append(other)
    ids = [*(i for own in job.history.sent.values() for i in own), *job.shared]
    was, now = _values(ids, shards), _values(ids, others)
    differing = [name for name, value in was.items() if now[name] != value]
    return f"{count} servers load other rows of {differing[:5]} than {len(shards)} have saved" if differing else ""


def _values(ids: Sequence[int], shards: Sequence[ServerShard | None]) -> Values:
    """Return the rows of ``ids`` from the servers that own them, and under -1 all dense entries in order."""
    result: Values = {}
    for id_ in ids:
        key = np.array([id_], np.int64)
        shard = shards[owner_of(int(bucket_of(key, BUCKETS)[0]), BUCKETS, len(shards))]
        assert shard is not None
        result[id_] = tuple(shard.tables["t"].pull(key)[0].tolist())
    entries = [float(value) for shard in shards if shard is not None for value in shard.dense.values()]
    return result | {-1: tuple(sorted(entries))}
