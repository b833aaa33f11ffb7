"""Parsers of what other processes and people write: files, messages at the rendezvous, messages of servers."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from mutations import damaged, hostile_json, json_or_bytes

from echelon import Strategy
from echelon.base.errors import EchelonError
from echelon.base.json_head import MalformedHeadError, parse_object
from echelon.checkpoint import Stored
from echelon.data.download.spec import parse_spec
from echelon.launcher.failure import Failure, read_record
from echelon.launcher.rendezvous.messages import JoinRequest, RendezvousHost, RoundMembers, RoundOutcome
from echelon.observability.runlog.run_reader import Run
from echelon.observability.runlog.run_reader import read as read_run
from echelon.observability.stall.rank_status import RankStatus, RankWait
from echelon.parameter_server.persistence.file_record import TornRecord
from echelon.parameter_server.persistence.file_record import read as read_file_record
from echelon.parameter_server.persistence.restore import read_json
from echelon.parameter_server.protocol.job_spec import JobSpec, TableSpec, job_from_json
from echelon.parameter_server.protocol.message import WireMessage, WireMessageError, pack, unpack
from echelon.plan import Plan
from echelon.plan.saved_plan import SavedPlan
from echelon.planner.cluster.bench_file import read as read_bench
from echelon.strategy.strategy_files import read as read_strategy

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "tests" / "layout" / "before_moves"
Mutation = Callable[[bytes, Random], bytes]


@dataclass(frozen=True)
class Target:
    """One parser. ``parse`` gets the bytes and a directory of its own.

    sample:   a valid input
    refusals: what it may raise, with one line; anything else is a fault of the parser
    mutate:   how inputs are made from the sample
    """

    name: str
    sample: bytes
    parse: Callable[[bytes, Path], Any]
    refusals: tuple[type[Exception], ...] = (EchelonError,)
    mutate: Mutation = json_or_bytes

    def __str__(self) -> str:
        return self.name


def sealed_index(data: bytes, random: Random) -> bytes:
    """Return a hostile index of a checkpoint, with the checksum that fits it."""
    content = json.loads(data)
    del content["checksum"]
    changed = hostile_json(json.dumps(content), random).rstrip("}").encode()
    return changed + b',\n"checksum": "%08x"\n}\n' % zlib.crc32(changed)


def sealed_manifest(data: bytes, random: Random) -> bytes:
    text = hostile_json(data.decode().partition(" ")[2], random)
    return f"{zlib.crc32(text.encode()):08x} {text}\n".encode()


def in_file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes, Path], Any]:
    """Return a parser of the bytes in a file of this name."""

    def parse(data: bytes, directory: Path) -> Any:
        (directory / name).write_bytes(data)
        return read(directory / name)

    return parse


def _checkpoint(index: Path) -> list[torch.Size]:
    weights = index.parent / "rank-0.safetensors"
    if not weights.exists():
        shutil.copy(KEPT / "checkpoint" / "step-00000003" / weights.name, weights)
    stored = Stored(index.parent)
    return [stored.read(name).shape for name in stored.names()]


def _server_file(path: Path) -> list[int]:
    """Read all records of a journal or a snapshot."""
    offset, lsns, size = 0, [], path.stat().st_size
    handle = os.open(path, os.O_RDONLY)
    try:
        while offset < size:
            record = read_file_record(handle, path, offset, size)
            lsns.append(record.lsn)
            offset = record.end
    finally:
        os.close(handle)
    return lsns


def _run(file: Path) -> Run:
    return read_run(file.parent)


_HOST = RendezvousHost("token", "host", "10.0.0.1", ("10.0.0.1:7000",), "1:4", 0, True, {"memory": "{}"})
_FAILURE = Failure(1, 0, "host", 77, 1, 1.0, message="ValueError: no")
_STATUS = RankStatus(
    *(1, "host", 77, 3, 5, "data", 0.5, "engine.step", RankWait("engine.step", "loss", "0-3", 2, 0.5)),
    *({"engine.step": 3}, 1.0, 5, {"data": 0.1}, 4, "0-3"),
)
_JOB = JobSpec(session="run", mode="sync", trainers=2, servers=1, tables=(TableSpec(name="ids", dim=4),))
_FRAME = WireMessage({"verb": "push", "step": 3}, [np.arange(6, dtype=np.int64), np.ones((3, 2), np.float32)])
#: The head of the message, as on the wire, and the bytes of its arrays.
_HEAD, _BODIES = pack(_FRAME)
_END = {"kind": "E", "message": "", "place": "", "ours": True, "traceback": "", "secondary": False, "time": 1.0}
_SPEC = {"base": "https://example.org/data", "files": [{"name": "a.bin", "size": 5}, "b.bin"], "retries": 2}


def of_bytes(parse: Callable[[bytes], Any]) -> Callable[[bytes, Path], Any]:
    return lambda data, _: parse(data)


def of_text(parse: Callable[[str], Any]) -> Callable[[bytes, Path], Any]:
    return lambda data, _: parse(data.decode(errors="replace"))


def _kept(name: str) -> bytes:
    return (KEPT / name).read_bytes()


_TORN = (EchelonError, TornRecord)
TARGETS = (
    Target("plan of a run", _kept("run_plan.json"), of_text(Plan.from_json)),
    Target("saved plan", _kept("plan.json"), in_file("plan.json", SavedPlan.load)),
    Target(
        "bench file",
        (ROOT / "benchmarks/measured/bench_cpu.json").read_bytes(),
        in_file("bench.json", read_bench),
    ),
    Target(
        "strategy",
        b'{"amp": "bf16", "shard": {"level": 2}, "recompute": true, "gradient_merge": 4}',
        in_file("strategy.json", lambda path: Strategy(**read_strategy(path))),
    ),
    Target(
        "download spec",
        json.dumps(_SPEC).encode(),
        of_text(lambda text: parse_spec(text, "spec.json")),
    ),
    Target(
        "index of a checkpoint",
        _kept("checkpoint/step-00000003/index.json"),
        in_file("index.json", _checkpoint),
        mutate=sealed_index,
    ),
    Target(
        "manifest of a server",
        _kept("server/manifest.json"),
        in_file("manifest.json", read_json),
        mutate=sealed_manifest,
    ),
    Target(
        "journal of a server",
        _kept("server/journal-00000003.seg"),
        in_file("journal.seg", _server_file),
        _TORN,
        damaged,
    ),
    Target(
        "snapshot of a server",
        _kept("server/snapshot-00000001.rec"),
        in_file("snapshot.rec", _server_file),
        _TORN,
        damaged,
    ),
    Target(
        "job for a server",
        json.dumps(_JOB.to_json()).encode(),
        of_bytes(lambda data: job_from_json(parse_object(data))),
        (EchelonError, MalformedHeadError),
    ),
    Target(
        "head of a message",
        _HEAD,
        of_bytes(lambda data: unpack(data, _BODIES)),
        (WireMessageError,),
    ),
    Target("join request", JoinRequest(0, _HOST).to_json().encode(), of_bytes(JoinRequest.from_json)),
    Target("round", RoundMembers((_HOST,), 1, 1).to_json().encode(), of_bytes(RoundMembers.from_json)),
    Target(
        "outcome",
        RoundOutcome(_FAILURE, True).to_json().encode(),
        of_bytes(RoundOutcome.from_json),
    ),
    Target("failure", _FAILURE.to_json().encode(), of_bytes(Failure.from_json), (ValueError,)),
    Target("end of a rank", json.dumps(_END).encode(), in_file("end.json", read_record), ()),
    Target(
        "status of a rank",
        _STATUS.to_json().encode(),
        of_bytes(RankStatus.from_json),
        (ValueError,),
    ),
    Target("run.json", _kept("run/run.json"), in_file("run.json", _run), ()),
    Target("metrics of a run", _kept("run/metrics.jsonl"), in_file("metrics.jsonl", _run), (), damaged),
    Target("steps of a rank", _kept("run/rank-0.jsonl"), in_file("rank-0.jsonl", _run), (), damaged),
)
