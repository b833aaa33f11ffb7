"""Copies in memory: new ranks go on from them as if nothing had been, even when a host took its own along."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run, run_raw
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from zoo import QUIET

import echelon
from echelon import Dgc, LocalSgd, Strategy, annotate, pipeline, split, stage
from echelon.base.environment import MEMORY
from echelon.base.job_secret import prove
from echelon.base.json_head import PREFIX
from echelon.checkpoint.in_memory.snapshot_buffer import SnapshotBuffer
from echelon.checkpoint.in_memory.snapshot_wire import LONGEST, SnapshotClient, SnapshotRefusedError
from echelon.launcher.memory_plugin import MemoryCheckpointPlugin, describe

TOKEN = b"a secret of the job"
TOTAL, COPIED = 6, 4  # steps in all, and those of which the first ranks leave a copy


@dataclass(frozen=True)
class Case:
    strategy: Strategy = field(default_factory=Strategy)
    stages: bool = False
    splits: bool = False
    optimizer: str = "adam"
    dropout: float = 0.3
    batch_norm: bool = False

    def marks(self) -> dict[str, Any]:
        if self.stages:
            return {"": pipeline(micro_batches=2), "0-2": stage(0), "3-6": stage(1)}
        return {"0": split(), "4": split("row")} if self.splits else {}

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        norm = nn.BatchNorm1d(16) if self.batch_norm else nn.LayerNorm(16)
        net = nn.Sequential(
            *(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(self.dropout), norm, nn.Linear(16, 16), nn.Tanh()),
            nn.Linear(16, 3),
        )
        if self.optimizer == "adam":
            return annotate(net, self.marks()), torch.optim.Adam(net.parameters(), lr=0.01)
        return annotate(net, self.marks()), torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


CASES = {
    "data parallel": Case(batch_norm=True),
    "shard 1": Case(Strategy(shard=1)),
    "shard 2": Case(Strategy(shard=2)),
    "shard 3": Case(Strategy(shard=3)),
    "pipeline x data": Case(stages=True),
    "split x data": Case(splits=True),
    "localsgd": Case(Strategy(localsgd=LocalSgd(k_steps=2)), dropout=0.0),
    "dgc": Case(Strategy(dgc=Dgc(sparsity=(0.75,), min_size=10)), optimizer="sgd"),
    "low_memory": Case(Strategy(low_memory=True)),
}
#: Without dropout: other ranks have other random streams.
MOVED = {
    "data parallel": Case(dropout=0.0),
    "shard 3": Case(Strategy(shard=3), dropout=0.0),
    "pipeline x data": Case(stages=True, dropout=0.0),
}


def data() -> TensorDataset:
    g = torch.Generator().manual_seed(9)
    return TensorDataset(torch.randn(56, 6, generator=g), torch.randint(3, (56,), generator=g))


def train(case: Case, steps: int, die: int | None = None) -> dict[str, Any]:
    echelon.init(seed=4)
    torch.manual_seed(4)
    net, optimizer = case.build()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    engine = echelon.distribute(
        net, loss=F.cross_entropy, optimizer=optimizer, scheduler=schedule, strategy=case.strategy, log=QUIET
    )
    loader = engine.loader(data(), global_batch=16)
    began, losses = engine.steps, []
    while engine.steps < steps:
        for batch in loader:
            losses.append(float(engine.step(*batch)))
            if engine.steps == die:
                os._exit(9)
            if engine.steps == steps:
                break
    buffers = {name: value.clone() for name, value in net.named_buffers()}  # a replica's own
    result = {"began": began, "losses": losses, "state": engine.whole_state(), "buffers": buffers}
    engine.close()
    return result


def all_cases(cases: dict[str, Case], said: dict[str, list[dict[str, str]]]) -> dict[str, Any]:
    """Train every case, each with memories of its own: ``said`` is the environment by case and host."""
    found = {}
    for name, case in cases.items():
        os.environ.update(said[name][int(os.environ.get("GROUP_RANK", "0"))])
        os.environ["ECHELON_TOKEN"] = TOKEN.decode()
        found[name] = train(case, TOTAL)
    return found


def told(
    memories: list[MemoryCheckpointPlugin], ranks: list[int], round_number: int, copies: int
) -> list[dict[str, str]]:
    """Return the environment of ranks, host by host."""
    hosts = [(memory.server.address, memory.announcement.get("memory_key", "")) for memory in memories]
    return [describe(round_number, here, hosts, ranks, copies) for here in range(len(memories))]


@pytest.fixture
def memories() -> Iterator[Any]:
    made: list[MemoryCheckpointPlugin] = []

    def make(token: bytes | None = TOKEN) -> MemoryCheckpointPlugin:
        made.append(MemoryCheckpointPlugin("127.0.0.1", token, 1))
        return made[-1]

    yield make
    for memory in made:
        memory.close()


@pytest.mark.parametrize("lost", [0, 1])
def test_memory_lost_host_new_ranks_end_bit_identical(lost: int, memories: Any) -> None:
    """When one of two hosts is lost, the new ranks end bit for bit where an uninterrupted run ends."""
    cases = CASES if lost == 0 else {"pipeline x data": CASES["pipeline x data"]}
    pairs = {name: [memories(), memories()] for name in cases}
    first = {name: told(pair, [2, 2], 0, COPIED) for name, pair in pairs.items()}
    undisturbed = run_raw(all_cases, cases, first, ranks=4, hosts=2)
    for pair in pairs.values():
        pair[lost].close()
        pair[lost] = memories()  # another host takes its place
    again = {name: told(pair, [2, 2], 1, 1) for name, pair in pairs.items()}
    resumed = run_raw(all_cases, cases, again, ranks=4, hosts=2)
    for name in cases:
        for before, after in zip(undisturbed, resumed, strict=True):
            assert isinstance(before, dict), before
            assert isinstance(after, dict), after
            assert after[name]["began"] == COPIED, name
            assert after[name]["losses"] == before[name]["losses"][COPIED:], name
            same(after[name]["state"], before[name]["state"])
            same(after[name]["buffers"], before[name]["buffers"])


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_another_number_of_ranks_goes_on_with_the_same_numbers(memories: Any) -> None:
    pairs = {name: [memories(), memories()] for name in MOVED}
    first = {name: told(pair, [2, 2], 0, COPIED) for name, pair in pairs.items()}
    undisturbed = run_raw(all_cases, MOVED, first, ranks=4, hosts=2)
    for pair in pairs.values():
        pair[0].close()
    left = {name: told(pair[1:], [2], 1, 1) for name, pair in pairs.items()}
    resumed = run(all_cases, MOVED, left, ranks=2)
    for name in MOVED:
        assert resumed[0][name]["began"] == COPIED
        torch.testing.assert_close(
            resumed[0][name]["losses"], undisturbed[0][name]["losses"][COPIED:], rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(resumed[0][name]["state"], undisturbed[0][name]["state"], rtol=1e-5, atol=1e-5)


def test_silent_strangers_keep_no_rank_out(memories: Any) -> None:
    memory = memories()
    host, port = memory.server.address.rsplit(":", 1)
    crowd = [socket.create_connection((host, int(port))) for _ in range(300)]
    own = SnapshotClient(memory.server.address, TOKEN)
    assert own.ask("list") == {"copies": []}
    own.close()
    for stranger in crowd[:40]:  # the oldest have gone
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    for stranger in crowd:
        stranger.close()


def dies(case: Case, said: list[dict[str, str]], steps: int, die: dict[int, int]) -> dict[str, Any]:
    """Train; a rank that is named in ``die`` is gone after that step."""
    rank = int(os.environ["RANK"])
    os.environ.update(said[int(os.environ["GROUP_RANK"])])
    os.environ["ECHELON_TOKEN"] = TOKEN.decode()
    return train(case, steps, die.get(rank))


def held(memory: MemoryCheckpointPlugin) -> list[tuple[int, int, int]]:
    """Round, rank and step of every whole copy."""
    line = SnapshotClient(memory.server.address, TOKEN)
    found = [(copy["round"], copy["rank"], copy["step"]) for copy in line.ask("list")["copies"]]
    line.close()
    return sorted(found)


def test_memory_copy_every_step_loses_at_most_one_old_rounds_go(memories: Any) -> None:
    """With a copy every step at most one step is lost, and the copies of older rounds are removed."""
    pair, case = [memories(), memories()], Case(Strategy(shard=3))
    whole = run_raw(dies, case, told([memories(), memories()], [1, 1], 0, 100), TOTAL, {}, ranks=2, hosts=2)
    run_raw(dies, case, told(pair, [1, 1], 0, 1), TOTAL, {0: 4, 1: 4}, ranks=2, hosts=2)
    assert {(0, 0, 3), (0, 1, 3)} <= set(held(pair[0])), "each host has its own copies and those of the other"
    pair[0].close()
    pair[0] = memories()
    said = [out_of_reach(env) for env in told(pair, [1, 1], 1, 1)]
    again = run_raw(dies, case, said, TOTAL, {}, ranks=2, hosts=2)
    began = again[0]["began"]
    assert began in (3, 4)
    assert [each["losses"] for each in again] == [each["losses"][began:] for each in whole]
    same(again[0]["state"], whole[0]["state"])
    copies = {(1, rank, step) for rank in (0, 1) for step in (TOTAL - 1, TOTAL)}
    assert [set(held(memory)) for memory in pair] == [copies, copies], "those of the round before are gone"


def out_of_reach(env: dict[str, str]) -> dict[str, str]:
    """Send the snapshot if a rank cannot open the launcher's memory."""
    return {**env, MEMORY: json.dumps(json.loads(env[MEMORY]) | {"pid": 1})}


def test_a_memory_that_cannot_be_reached_does_not_stop_training(memories: Any) -> None:
    pair, case = [memories(), memories()], Case(Strategy(shard=2))
    alone = run_raw(dies, case, [{}, {}], TOTAL, {}, ranks=2, hosts=2)
    pair[1].close()
    found = run_raw(dies, case, told(pair, [1, 1], 0, 1), TOTAL, {}, ranks=2, hosts=2)
    assert [each["losses"] for each in found] == [each["losses"] for each in alone]
    same(found[0]["state"], alone[0]["state"])
    assert len(held(pair[0])) <= 1, "nobody went on without the other"


def test_a_copy_that_was_not_finished_is_not_there() -> None:
    buffer = SnapshotBuffer.make(room=100, nbytes=64)
    buffer.seal(0, seq=2, step=7, facts=b'{"a":1}')
    buffer.seal(1, seq=3, step=8, facts=b"{}")
    assert [found and (found.seq, found.step) for found in map(buffer.sealed, (0, 1))] == [(2, 7), (3, 8)]
    buffer.break_seal(0)
    buffer.memory[buffer.data(0) : buffer.data(0) + 8] = b"half of "
    assert buffer.sealed(0) is None
    assert buffer.sealed(1) is not None
    buffer.memory[buffer.data(1) - 4096 + 64] ^= 1  # a fact that is not the one that was sealed
    assert buffer.sealed(1) is None
    buffer.close()


def test_memory_server_rejects_strangers_and_malformed_requests(memories: Any) -> None:
    """Connections without the secret or with malformed requests are closed and take no memory."""
    memory = memories()
    host, port = memory.server.address.split(":")
    with pytest.raises(SnapshotRefusedError, match="secret"):
        SnapshotClient(memory.server.address, b"another secret")

    def says(data: bytes, proves: bool) -> bytes:
        with socket.create_connection((host, int(port)), timeout=30) as caller:
            if proves:
                prove(caller, TOKEN)
            with contextlib.suppress(OSError):  # hung up on while still speaking
                caller.sendall(data)
                caller.shutdown(socket.SHUT_WR)
                return caller.recv(100)
            return b""

    assert says(b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n" + bytes(100), proves=False) == b""
    refusal = framed(b'{"error":"the snapshot buffer no longer exists"}')
    nonsense = [
        (LONGEST + 1).to_bytes(PREFIX, "little"),
        b"\xff" * PREFIX,
        (100).to_bytes(PREFIX, "little") + b'{"op":',
        (4).to_bytes(PREFIX, "little") + b"[[[[",
        (2).to_bytes(PREFIX, "little") + b"[]",
        (12).to_bytes(PREFIX, "little") + b'{"op":"huh"}',
        (2000).to_bytes(PREFIX, "little") + b"[" * 2000,
        framed(b'{"op":"open","round":-1,"world":2,"rank":0,"engine":0,"table":[],"room":9,"nbytes":9}'),
        framed(b'{"op":"keep","bank":1,"seq":1,"step":1,"bytes":99999999,"facts":"{}"}'),
    ]
    for words in nonsense:
        assert says(words, proves=True) in (b"", refusal), words
    line = SnapshotClient(memory.server.address, TOKEN)
    with pytest.raises(SnapshotRefusedError, match="free"):
        line.ask("open", round=0, world=1, rank=0, engine=0, table=[], room=10, nbytes=1 << 45)
    assert line.ask("list") == {"copies": []}
    assert memory.server.nbytes == 0
    line.close()


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(PREFIX, "little") + text
