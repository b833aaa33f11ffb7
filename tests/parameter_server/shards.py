"""Servers of a job in this process, spoken to in frames, and a small model with tables to train on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from echelon.base.errors import EchelonError
from echelon.parameter_server.protocol.dense_placement import DenseParameter, place
from echelon.parameter_server.protocol.hashing import bucket_of, owner_of
from echelon.parameter_server.protocol.job_spec import BUCKETS, DenseRule, JobSpec, TableSpec
from echelon.parameter_server.protocol.message import WireMessage, pack, unpack
from echelon.parameter_server.server.shard import ServerShard
from echelon.strategy.sparse_update_rules import Rule, Sgd

#: Any int64 will do as an id.
VOCABULARY = np.array([0, -1, 7, 2**63 - 1, -(2**63), 12345678901234, *range(100, 130)], np.int64)
DIMS = {"users": 4, "words": 3}
SGD = Sgd(lr=0.1)


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def carried(frame: WireMessage) -> WireMessage:
    """Pass a frame through the wire format: its arrays become views of foreign read-only memory."""
    head, bodies = pack(frame)
    return unpack(head, [bytes(body) for body in bodies])


class Servers:
    """The shards of one job, which can ask each other. ``down`` are those that do not answer."""

    def __init__(self, servers: int, **options: Any) -> None:
        self.down: set[int] = set()
        self.shards = [ServerShard(s, servers, ask=self._ask, **options) for s in range(servers)]

    def _ask(self, server: int, frame: WireMessage) -> WireMessage:
        if server in self.down:
            raise EchelonError(f"server {server} does not answer")
        return carried(self.shards[server].handle(carried(frame)))

    def say(self, server: int, head: dict[str, Any], *arrays: Any) -> WireMessage:
        """One request; its answer, or its error raised."""
        answer = carried(self.shards[server].handle(carried(WireMessage(head, list(arrays)))))
        if "error" in answer.head:
            raise EchelonError(answer.head["error"])
        return answer

    def all(self, head: dict[str, Any]) -> list[WireMessage]:
        return [self.say(server, head) for server in range(len(self.shards))]

    def rows(self, table: str) -> np.ndarray:
        """Return the rows of all ids, from whichever server has them."""
        owner = owners(VOCABULARY, len(self.shards))
        rows = np.empty((len(VOCABULARY), DIMS[table]), np.float32)
        for server, shard in enumerate(self.shards):
            rows[owner == server] = shard.tables[table].pull(VOCABULARY[owner == server])
        return rows

    def dense(self) -> dict[str, np.ndarray]:
        """Every parameter, flat."""
        found: dict[str, np.ndarray] = {}
        for shard in self.shards:
            at = 0
            for block in shard.dense.blocks:
                whole = found.setdefault(block.parameter, np.empty(SIZES[block.parameter], np.float32))
                whole[block.offset : block.offset + block.length] = shard.dense.values()[at : at + block.length]
                at += block.length
        return found


def owners(ids: np.ndarray, servers: int) -> np.ndarray:
    return np.array([owner_of(int(bucket), BUCKETS, servers) for bucket in bucket_of(ids, BUCKETS)], np.int64)


class Net(nn.Module):
    """Scores examples from the mean of their users' rows and the row of their word."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 6), nn.Linear(6, 1)

    def forward(self, users: Tensor, words: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(torch.cat([users.mean(1), words], 1)))).squeeze(1)
        return out


def net() -> Net:
    torch.manual_seed(3)
    return Net()


SHAPES = {name: tuple(parameter.shape) for name, parameter in net().named_parameters()}
SIZES = {name: parameter.numel() for name, parameter in net().named_parameters()}


def job(
    servers: int = 1, trainers: int = 1, mode: str = "sync", rule: Rule = SGD, dense: Any = None, **more: Any
) -> JobSpec:
    """A job that trains ``Net`` and its two tables."""
    dense = dense or DenseRule(kind="SGD", groups=({"lr": 0.1},))
    whole = dense.kind in ("LARS", "LAMB")
    groups = len(dense.groups)
    pieces = [DenseParameter(name, shape, index % groups, whole) for index, (name, shape) in enumerate(SHAPES.items())]
    tables = tuple(TableSpec(name=name, dim=dim, seed=17 + dim, rule=rule) for name, dim in DIMS.items())
    return JobSpec(
        **{
            "session": "test", "mode": mode, "trainers": trainers, "servers": servers, "tables": tables,
            "blocks": place(pieces, servers, min_block=5), "dense": dense, **more,
        }
    )  # fmt: skip


class Batch:
    """Examples: users are three ids each, words one."""

    def __init__(self, seed: int, size: int) -> None:
        draw = np.random.default_rng(seed)
        self.users = VOCABULARY[draw.integers(0, len(VOCABULARY), (size, 3))]
        self.words = VOCABULARY[draw.integers(0, len(VOCABULARY), size)]
        self.target = draw.normal(size=size).astype(np.float32)

    @classmethod
    def joined(cls, parts: list[Batch]) -> Batch:
        whole = cls(0, 0)
        for name in ("users", "words", "target"):
            setattr(whole, name, np.concatenate([getattr(part, name) for part in parts]))
        return whole

    def __len__(self) -> int:
        return len(self.target)


class Worker:
    """A worker in its plainest form: pulls, computes, pushes, commits."""

    def __init__(self, servers: Servers, spec: JobSpec, number: int, seq: int = 0) -> None:
        self.servers, self.spec, self.number, self.seq = servers, spec, number, seq
        self.net = net()
        self.versions = [0] * spec.servers

    def begin(self) -> None:
        self.servers.all({"op": "open", "worker": self.number, "job": self.spec.to_json()})
        for server, values in enumerate(self._flat({n: p.detach() for n, p in self.net.named_parameters()})):
            self.servers.say(server, {"op": "begin", "worker": self.number}, values)

    def pull(self, batch: Batch, commit: int | None = None, **more: Any) -> None:
        """Weights for the batch."""
        self.batch, self.rows = batch, {}
        self.ids = {"users": np.unique(batch.users), "words": np.unique(batch.words)}
        self.rows = {name: np.empty((len(ids), DIMS[name]), np.float32) for name, ids in self.ids.items()}
        for server in range(self.spec.servers):
            own = {name: owners(ids, self.spec.servers) == server for name, ids in self.ids.items()}
            head = {"op": "pull", "worker": self.number, "step": self.seq, "dense": True, "peek": False}
            head |= {"commit": commit, "tables": {name: int(mask.sum()) for name, mask in own.items()}, **more}
            ids = np.concatenate([self.ids[name][mask] for name, mask in own.items()])
            answer = self.servers.say(server, head, ids)
            self._take(server, answer, own)

    def _take(self, server: int, answer: WireMessage, own: dict[str, np.ndarray]) -> None:
        self.versions[server], (flat, dense), at = answer.head["version"], answer.arrays, 0
        for name, mask in own.items():
            size = int(mask.sum()) * DIMS[name]
            self.rows[name][mask] = flat[at : at + size].reshape(-1, DIMS[name])
            at += size
        at = 0
        parameters = dict(self.net.named_parameters())
        for block in (block for block in self.spec.blocks if block.server == server):
            part = parameters[block.parameter].data.view(-1)[block.offset : block.offset + block.length]
            part.copy_(torch.from_numpy(dense[at : at + block.length].copy()))
            at += block.length

    def compute(self) -> None:
        """Gradients of the mean loss over the batch."""
        rows = {name: torch.from_numpy(rows.copy()).requires_grad_() for name, rows in self.rows.items()}
        looked = {
            name: rows[name][torch.from_numpy(np.searchsorted(self.ids[name], getattr(self.batch, name)))]
            for name in rows
        }
        self.net.zero_grad()
        loss = (self.net(**looked) - torch.from_numpy(self.batch.target)).square().mean()
        loss.backward()
        self.gradients = {name: tensor.grad.numpy() for name, tensor in rows.items() if tensor.grad is not None}
        self.dense = self._flat({n: p.grad for n, p in self.net.named_parameters() if p.grad is not None})

    def frame(self, server: int, **more: Any) -> tuple[dict[str, Any], list[np.ndarray]]:
        own = {name: owners(ids, self.spec.servers) == server for name, ids in self.ids.items()}
        ids = np.concatenate([self.ids[name][mask] for name, mask in own.items()])
        rows = np.concatenate([self.gradients[name][mask].reshape(-1) for name, mask in own.items()])
        head = {
            "op": "push", "worker": self.number, "seq": self.seq, "weight": float(len(self.batch)),
            "version": self.versions[server], "tables": {name: int(mask.sum()) for name, mask in own.items()},
            "lrs": {}, "groups": [], "dense": True, "values": False, "commit": False, "kind": "gradient",
            "has": ["ids", "rows", "dense"], **more,
        }  # fmt: skip
        return head, [ids, rows, self.dense[server]]

    def push(self, only: int | None = None, **more: Any) -> list[WireMessage]:
        """To all servers, or to one; ``seq`` moves on with the commit."""
        chosen = range(self.spec.servers) if only is None else [only]
        answers = []
        for server in chosen:
            head, arrays = self.frame(server, **more)
            answers.append(self.servers.say(server, head, *arrays))
        return answers

    def commit(self) -> None:
        if self.spec.servers > 1:
            self.servers.all({"op": "commit", "worker": self.number, "seq": self.seq})
        self.seq += 1

    def step(self, batch: Batch, **more: Any) -> None:
        self.pull(batch)
        self.compute()
        self.push(**more)
        self.commit()

    def _flat(self, tensors: dict[str, Tensor]) -> list[np.ndarray]:
        parts: list[list[np.ndarray]] = [[] for _ in range(self.spec.servers)]
        for block in self.spec.blocks:
            flat = tensors[block.parameter].reshape(-1)[block.offset : block.offset + block.length]
            parts[block.server].append(flat.numpy().copy())
        return [np.concatenate(part) if part else np.empty(0, np.float32) for part in parts]


def started(spec: JobSpec, **options: Any) -> tuple[Servers, list[Worker]]:
    """Servers with an open job, and its workers."""
    servers = Servers(spec.servers, **options)
    workers = [Worker(servers, spec, number) for number in range(spec.trainers)]
    for worker in workers:
        worker.begin()
    return servers, workers


def sync_step(workers: list[Worker], batches: list[Batch], **more: Any) -> None:
    """All workers together, their pushes in turn."""
    for worker, batch in zip(workers, batches, strict=True):
        worker.pull(batch)
        worker.compute()
    for worker in workers:
        worker.push(**more)
    for worker in workers:
        worker.commit()
