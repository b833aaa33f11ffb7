"""``echelon serve --read-only``: a checkpoint of two servers, answered by one that changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import finish, start
from harness import free_port

from echelon.base.errors import EchelonError
from echelon.base.security import Security
from echelon.parameter_server.persistence.persistence import ShardPersistence
from echelon.parameter_server.protocol.channel import ServerChannel
from echelon.parameter_server.protocol.hashing import bucket_of, owner_of
from echelon.parameter_server.protocol.job_spec import BUCKETS, Initializer, JobSpec, TableSpec
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.shard import ServerShard
from echelon.strategy.sparse_update_rules import Sgd

IDS = np.arange(-50, 50, dtype=np.int64)
GRADIENTS = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
FIRST = 0.5


def push(ids: Any, gradients: Any) -> WireMessage:
    head = {"op": "push", "worker": 0, "seq": 0, "weight": 1.0, "version": 0, "tables": {"words": len(ids)}, "lrs": {}}
    more = {"groups": [], "dense": False, "values": False, "commit": True, "kind": "gradient", "has": ["ids", "rows"]}
    return WireMessage(head | more, [ids, gradients.ravel()])


def save_checkpoint(path: Path, state: Path) -> None:
    """Return the rows of two servers after one push of all ids."""
    table = TableSpec(name="words", dim=3, rule=Sgd(lr=1.0), initializer=Initializer(kind="constant", low=FIRST))
    job = JobSpec(session="s", mode="async", trainers=1, servers=2, tables=(table,))
    owners = np.array([owner_of(int(bucket), BUCKETS, 2) for bucket in bucket_of(IDS, BUCKETS)])
    for server in range(2):
        directory = state / str(server)
        shard = ServerShard(server, 2, keep=lambda made, at=directory: ShardPersistence(made, at, made.job.keeping))
        mine = owners == server
        for frame in (
            WireMessage({"op": "open", "worker": 0, "job": job.to_json()}),
            WireMessage({"op": "begin", "worker": 0}, [np.empty(0, np.float32)]),
            push(IDS[mine], GRADIENTS[mine]),
            WireMessage({"op": "save", "worker": 0, "path": str(path), "step": 7}),
        ):
            assert "error" not in (answer := shard.handle(frame)).head, answer.head
        shard.close()


def test_a_checkpoint_is_served_and_never_changed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "ckpt", tmp_path / "state")
    endpoint = f"127.0.0.1:{free_port()}"
    server = start("serve", "--endpoint", endpoint, "--read-only", "ckpt", cwd=tmp_path)
    link = ServerChannel(endpoint, security=Security().for_loopback([endpoint]), timeout=60)
    asked = np.concatenate([IDS, [2**62]])
    pull = {"op": "pull", "worker": -1, "step": 0, "tables": {"words": len(asked)}, "dense": False, "commit": None}
    (rows,) = link.call(WireMessage(pull | {"peek": True}, [asked])).arrays
    expected = np.concatenate([np.float32(FIRST) - GRADIENTS, np.full((1, 3), FIRST, np.float32)])
    np.testing.assert_array_equal(rows.reshape(-1, 3), expected)
    with pytest.raises(EchelonError, match=r"server 0 is read-only: 'push' is refused; use hello, pull, stats"):
        link.call(push(IDS, GRADIENTS))
    server.terminate()
    end = finish(server)
    link.close()
    assert (end.code, end.out) == (143, f"echelon: server 0 of 1 serves step 7 at {endpoint}\n")
    assert end.err == ""


def test_what_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    end = finish(start("serve", "--endpoint", "127.0.0.1:1", "--read-only", "nowhere", cwd=tmp_path))
    assert end.err == ("echelon: no checkpoint of servers at nowhere: no server-0-of-N.json there; check the path\n")
    assert end.code == 1
