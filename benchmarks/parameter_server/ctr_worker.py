"""One worker of work C, or of its bound; started by ``ctr.py`` and printing ``RESULT {json}``.

    echelon run --servers 1 --workers 2 benchmarks/parameter_server/ctr_worker.py --mode async
            [--steps 150] [--warmup 20]
    python benchmarks/parameter_server/ctr_worker.py --mode bound

With ``--files PATTERN`` the batches come from Criteo files through ``CtrFiles`` instead of from memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.parameter_server.ctr_work import BATCH, DIM, RATE, SLOTS, Dense, batches, dealt

MODES = ("bound", "collective", "sync", "async", "bounded", "geo", "hybrid")


class Stopwatch:
    """Times of the steps after the first ``warmup``, and all losses."""

    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self._clock, self._used = [time.perf_counter()], [time.process_time()]
        self.losses: list[float] = []

    def step(self, loss: Any) -> None:
        self.losses.append(float(loss))
        self._clock.append(time.perf_counter())
        self._used.append(time.process_time())

    def results(self) -> dict[str, Any]:
        wall, used = (np.diff(np.array(times))[self._warmup :] for times in (self._clock, self._used))
        return {
            "steps": len(wall),
            "ex_s": round(BATCH * len(wall) / float(wall.sum()), 1),
            "step_ms_p50": round(1e3 * float(np.median(wall)), 2),
            "step_ms_p99": round(1e3 * float(np.percentile(wall, 99)), 2),
            "cpu_ms_step": round(1e3 * float(np.mean(used)), 2),
            "loss_first": round(self.losses[0], 4),
            "loss_last": round(statistics.fmean(self.losses[-5:]), 4),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }


class RoundTrips:
    """Seconds from sending a request to its answer, by what was asked; waiting for a turn on the server included."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def watch(self) -> None:
        from echelon.parameter_server.protocol.channel import ServerChannel
        from echelon.parameter_server.protocol.message import WireMessage

        send, seconds = ServerChannel.send, self._seconds

        def timed(link: ServerChannel, frame: WireMessage) -> Any:
            begin, answer = time.perf_counter(), send(link, frame)
            answer.add_done_callback(lambda _: seconds[frame.head["op"]].append(time.perf_counter() - begin))
            return answer

        ServerChannel.send = timed  # type: ignore[method-assign]

    def results(self, warmup: int) -> dict[str, Any]:
        kept = {op: times[warmup:] for op, times in self._seconds.items() if len(times) > warmup + 10}
        return {
            f"{op}_ms": {f"p{p}": round(1e3 * float(np.percentile(times, p)), 2) for p in (50, 99)}
            for op, times in kept.items()
        }


def bound(steps: int, warmup: int) -> dict[str, Any]:
    """The network alone: rows cost nothing, but their gradient is computed, as any training must."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _, numbers, labels = (torch.from_numpy(a) for a in batches(0, 20))
    rows = torch.empty(BATCH, SLOTS * DIM).uniform_(-0.01, 0.01).requires_grad_()
    model = Dense()
    optimizer, watch = torch.optim.SGD(model.parameters(), lr=RATE), Stopwatch(warmup)
    for step in range(warmup + steps):
        at = step % len(labels)
        loss = F.binary_cross_entropy_with_logits(model(rows, numbers[at]), labels[at])
        optimizer.zero_grad()
        rows.grad = None
        loss.backward()
        optimizer.step()
        watch.step(loss.detach())
    return {"contender": "bound", **watch.results()}


class Model(nn.Module):
    def __init__(self, accumulator: float) -> None:
        import echelon
        from echelon.parameter_server.protocol.job_spec import Initializer
        from echelon.strategy.sparse_update_rules import Adagrad

        super().__init__()
        self.rows = echelon.nn.SparseEmbedding(
            DIM,
            name="rows",
            optimizer=Adagrad(lr=RATE, row_wise=True, initial_accumulator=accumulator),
            initializer=Initializer(low=-0.01, high=0.01),
        )
        self.dense = Dense()

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        out: Tensor = self.dense(self.rows(ids).flatten(1), numbers)
        return out


def endless(loader: Any) -> Iterator[list[Tensor]]:
    while True:
        yield from loader


def servers_cpu() -> float:
    """Processor seconds of this job's servers so far: they have the same parent as this worker. Linux only."""
    seconds = 0.0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == os.getppid() and b"echelon.launcher.server_main" in (process / "cmdline").read_bytes():
                seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def meet(folder: Path | None, worker: int, workers: int) -> None:
    """Wait until all workers are here: data takes different times to make, and asynchronous workers have no barrier."""
    if folder is None:
        return
    (folder / f"worker-{worker}").touch()
    while len(list(folder.glob("worker-*"))) < workers:
        time.sleep(0.01)


def train(given: argparse.Namespace) -> dict[str, Any]:
    import echelon
    import echelon.nn

    torch.set_num_threads(1)
    trips = RoundTrips()
    trips.watch()
    echelon.init()
    torch.manual_seed(0)
    model = Model(given.accumulator)
    engine = echelon.distribute(
        model,
        loss=F.binary_cross_entropy_with_logits,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        strategy=echelon.Strategy(ps=echelon.ParameterServer(mode=given.mode, journal=given.journal)),
    )
    loader = engine.loader(_data(given), batch_size=BATCH, shuffle=False)
    meet(given.meet, echelon.worker_index(), echelon.worker_num())
    watch = Stopwatch(given.warmup)
    for step, batch in zip(range(given.warmup + given.steps), endless(loader), strict=False):
        if step == given.warmup:
            served = servers_cpu()
        watch.step(engine.step(*batch))
    served = (servers_cpu() - served) / given.steps / echelon.worker_num()
    results = {
        "contender": given.mode,
        "worker": echelon.worker_index(),
        **watch.results(),
        "servers_cpu_ms_step": round(1e3 * served, 2),
        **trips.results(given.warmup),
    }
    engine.close()
    return results


def _data(given: argparse.Namespace) -> Any:
    import echelon

    if given.files:
        return echelon.data.CtrFiles(given.files, format="criteo")
    return dealt(max(echelon.worker_num(), 1), same=given.same_data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--accumulator", type=float, default=0.0, help="Adagrad's first value for rows")
    parser.add_argument("--same-data", action="store_true", help="every worker trains on worker 0's batches")
    parser.add_argument("--files")
    parser.add_argument("--meet", type=Path, help="an empty folder in which workers wait for each other")
    parser.add_argument("--journal", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    results = bound(given.steps, given.warmup) if given.mode == "bound" else train(given)
    print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
