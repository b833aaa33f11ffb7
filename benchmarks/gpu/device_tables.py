"""Tables with rows in the memory of a GPU: work C through the engine, one large lookup, and a cache a quarter as large.

    python -m benchmarks.gpu.device_tables [--out benchmarks/measured/device_tables.json]      2 minutes on an H200
    python -m benchmarks.gpu.device_tables --device cpu                                        tiny: that it runs

Goals on an H200 (issue of tables in the workers): work C at batch 8192 1,500,000 examples/s with rows on the GPU and
400,000 with rows on the host; 1.05 M ids, 350,000 of them distinct, dim 128, forward, backward and Adam in 2.2 ms; a
table 4 times as large as its cache at zipf 1.1 with 0.6 of the speed of one that lies on the GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import echelon
from benchmarks.parameter_server.ctr_work import DIM, RATE, Dense, batches
from echelon.nn import SparseEmbedding
from echelon.parameter_server.device_table.cached_table import CachedTable
from echelon.parameter_server.device_table.device_table import DeviceTable
from echelon.parameter_server.protocol.hashing import mix_all
from echelon.parameter_server.protocol.job_spec import TableSpec
from echelon.parameter_server.table import Table
from echelon.strategy.sparse_update_rules import NAMED, Adagrad, Adam


@dataclass(frozen=True)
class Sizes:
    """The sizes of the three parts.

    ids, distinct: positions and distinct ids of the large lookup, from a table of ``present`` rows
    table, positions: rows of the table behind the cache, and ids of a batch
    """

    batch: int = 8192
    steps: int = 60
    ids: int = 1_050_000
    distinct: int = 350_000
    present: int = 4_000_000
    dim: int = 128
    table: int = 4_000_000
    positions: int = 200_000
    cache_dim: int = 64


TINY = Sizes(batch=64, steps=4, ids=3000, distinct=1000, present=4000, dim=8, table=4000, positions=400, cache_dim=8)


class Model(torch.nn.Module):
    """Work C with its rows somewhere."""

    def __init__(self, location: Any) -> None:
        super().__init__()
        rule = Adagrad(lr=RATE, row_wise=True, initial_accumulator=0.1)
        self.rows = SparseEmbedding(DIM, name="rows", optimizer=rule, location=location)
        self.dense = Dense()

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        out: Tensor = self.dense(self.rows(ids).flatten(1), numbers)
        return out


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def work_c(location: str, sizes: Sizes, device: torch.device) -> dict[str, float]:
    """Train through the engine; the first third of the steps, which makes most rows, is not counted."""
    torch.manual_seed(0)
    model = Model(location)
    engine = echelon.distribute(
        model,
        loss=F.binary_cross_entropy_with_logits,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        log=echelon.Log(console=False),
    )
    count = -(-min(sizes.steps, 24) * sizes.batch // 512)
    given = tuple(torch.from_numpy(part.reshape(-1, *part.shape[2:])) for part in batches(0, count))
    loader = engine.loader(given, batch_size=sizes.batch, shuffle=False)
    losses: list[Any] = []
    begin, counted = 0.0, 0
    while len(losses) < sizes.steps:
        for ids, numbers, labels in loader:
            if len(losses) == sizes.steps // 3:
                wait_for(device)
                begin = time.perf_counter()
            losses.append(engine.step(ids, numbers, labels))
            counted += len(labels) if begin else 0
            if len(losses) == sizes.steps:
                break
    wait_for(device)
    seconds = time.perf_counter() - begin
    found = {"examples_s": round(counted / seconds), "loss": round(float(losses[-1]), 4)}
    engine.close()
    return found


def timed(call: Callable[[], object], device: torch.device, times: int) -> float:
    """Return the median of the milliseconds of a call, after three calls that are not counted."""
    found = []
    for number in range(times + 3):
        wait_for(device)
        begin = time.perf_counter()
        call()
        wait_for(device)
        if number >= 3:
            found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found)


def filled(table: DeviceTable | CachedTable, ids: Tensor, dim: int) -> None:
    """Make the rows of these ids."""
    for part in torch.split(ids, min(1 << 17, len(ids) // 8)):
        table.update(part, torch.full((len(part), dim), 1e-3, device=ids.device))


def every_id(count: int, device: torch.device) -> Tensor:
    return torch.from_numpy(mix_all(np.arange(count, dtype=np.int64)).view(np.int64)).to(device)


def large_lookup(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Time forward, backward and Adam of one large batch, its parts, and the same with torch's operations."""
    spec = TableSpec(name="rows", dim=sizes.dim, rule=Adam())
    table = DeviceTable(spec, device)
    known = every_id(sizes.present, device)
    filled(table, known, sizes.dim)
    draw = torch.Generator(device).manual_seed(0)
    chosen = known[torch.randperm(sizes.present, generator=draw, device=device)[: sizes.distinct]]
    more = torch.randint(sizes.distinct, (sizes.ids - sizes.distinct,), generator=draw, device=device)
    ids = torch.cat([chosen, chosen[more]])[torch.randperm(sizes.ids, generator=draw, device=device)]
    grads = torch.randn(sizes.ids, sizes.dim, generator=draw, device=device)

    def step() -> None:
        table.read(ids)
        table.update(ids, grads)

    times = 30 if device.type == "cuda" else 3
    return {
        "kernels": table.kernels,
        "step_ms": round(timed(step, device, times), 3),
        "forward_ms": round(timed(lambda: table.read(ids), device, times), 3),
        "update_ms": round(timed(lambda: table.update(ids, grads), device, times), 3),
    }


def zipf_batches(sizes: Sizes, device: torch.device, count: int) -> Iterator[Tensor]:
    """Yield batches of ids by a zipf law of exponent 1.1 over all ids of the table."""
    weights = torch.arange(1, sizes.table + 1, dtype=torch.float64, device=device) ** -1.1
    cumulated = (weights / weights.sum()).cumsum(0)
    known, draw = every_id(sizes.table, device), torch.Generator(device).manual_seed(1)
    for _ in range(count):
        drawn = torch.rand(sizes.positions, generator=draw, device=device, dtype=torch.float64)
        yield known[torch.searchsorted(cumulated, drawn).clamp(max=sizes.table - 1)]


def through_cache(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Compare ids a second of a table on the device and of one whose cache holds a quarter of it."""
    spec = TableSpec(name="rows", dim=sizes.cache_dim, rule=NAMED["row_adagrad"])
    found: dict[str, Any] = {}
    given = list(zipf_batches(sizes, device, 40 if device.type == "cuda" else 6))
    grads = torch.randn(sizes.positions, sizes.cache_dim, device=device)
    for name in ("device", "cached"):
        table: DeviceTable | CachedTable = DeviceTable(spec, device)
        if name == "cached":
            table = CachedTable(Table(spec), device, sizes.table // 4)
        filled(table, every_id(sizes.table, device), sizes.cache_dim)
        half = len(given) // 2
        for number, ids in enumerate(given):
            if number == half:  # the first half brings the frequent rows into the cache
                wait_for(device)
                begin = time.perf_counter()
            table.read(ids)
            if isinstance(table, CachedTable) and number + 1 < len(given):
                table.prefetch(given[number + 1])
            table.update(ids, grads)
        wait_for(device)
        found[f"{name}_ids_s"] = round((len(given) - half) * sizes.positions / (time.perf_counter() - begin))
        del table
    return {**found, "ratio": round(found["cached_ids_s"] / found["device_ids_s"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", choices=["work_c", "large_lookup", "through_cache"])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    echelon.init(device=given.device, seed=0)
    device = torch.device(given.device)
    sizes = Sizes() if device.type == "cuda" else TINY
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "work_c": lambda: {place: work_c(place, sizes, device) for place in ("host", "device")},
        "large_lookup": lambda: large_lookup(sizes, device),
        "through_cache": lambda: through_cache(sizes, device),
    }
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "sizes": vars(sizes)}
    for part, measure in parts.items():
        if given.only in (None, part):
            found[part] = measure()
            print(part, json.dumps(found[part]), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
