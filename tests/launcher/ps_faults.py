"""kill -9 of servers and workers at random moments, in each mode: training must end, nothing be lost, nothing doubled.

    export PYTHONPATH=.:tests/support:tests/launcher
    python tests/launcher/ps_faults.py --kills 20 --warm --out faults.json

The tests do a few of these; this script kills each server and each worker so often in each mode, prints JSON and says
how long recovery took. In each job the victims are killed one after another: the next when training has gone on after
the last, and a random moment later. Training lasts until all have been killed; the undisturbed run has as many steps.
With --out, kills are added to those that the file has.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from members import members

SERVERS, WORKERS, BATCH = 2, 2, 8
EPOCH = 30  # steps: training ends with an epoch, so that each sample was seen as often as all others
LIMIT = 240.0  # seconds without progress that are taken for a hang
DRAW = random.Random(1)
MODES = ("sync", "async", "bounded", "geo", "hybrid", "exact hybrid")

#: Rows move by plain SGD along a loss that is linear in them, so that their end tells how often each push was applied,
#: in whatever order. The dense part is a real, if small, network.
TRAIN = """
import json, os, sys, time
import numpy as np, torch, torch.nn.functional as F
import echelon
from echelon.nn import SparseEmbedding
from echelon.strategy.sparse_update_rules import Adagrad, Sgd

mode, epoch, batch, pause, replica, out = sys.argv[1:]
epoch, batch, pause, replica = int(epoch), int(batch), float(pause), replica == "replica"
echelon.init(seed=5)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.counted = SparseEmbedding(2, name="counted", optimizer=Sgd(lr=1.0), initializer=0.0)
        self.learned = SparseEmbedding(4, name="learned", optimizer=Adagrad(lr=0.1))
        self.net = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def forward(self, ids, wanted):
        judged = F.mse_loss(self.net(self.learned(ids).flatten(1)).squeeze(1), wanted)
        return judged + (self.counted(ids).sum((1, 2)).mean() if mode != "sync" else 0.0)

model = Net()
settings = {"mode": "sync", "dense": "allreduce"} if mode == "exact hybrid" else {"mode": mode}
settings |= {"k_steps": 5, "staleness": 2, "replica": replica, "snapshot_every": 0.5, "patience": 60.0}
engine = echelon.distribute(
    model,
    optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
    strategy=echelon.Strategy(ps=echelon.ParameterServer(**settings)),
    checkpoint=echelon.Checkpoint(dir="ckpt", every=10, keep=2) if "hybrid" in mode else None,
    log=echelon.Log(console=False),
)
generator = torch.Generator().manual_seed(1)
ids = torch.randint(0, 50, (epoch * batch * 2, 3), generator=generator) * 987654321987 - 5
wanted = torch.randn(len(ids), generator=generator)
def number(name, otherwise):
    try:
        return int(open(name).read())
    except (OSError, ValueError):
        return otherwise

loader = engine.loader((ids, wanted), batch_size=batch)
for _ in loader.epochs(10**6):
    if engine.steps >= number("end", 10**9):
        break
    for at in loader:
        while engine.steps > number(f"progress-{1 - echelon.rank()}", 0) + 6:  # a killed worker is waited for
            time.sleep(0.01)
        engine.step(*at)
        with open(f"progress-{echelon.rank()}.part", "w") as file:
            file.write(str(engine.steps))
        os.rename(f"progress-{echelon.rank()}.part", f"progress-{echelon.rank()}")
        time.sleep(pause)
engine.synchronize()
known = torch.unique(ids)
with torch.no_grad():
    rows = {"counted": model.counted(known).tolist(), "learned": model.learned(known).tolist()}
dense = {name: value.detach().flatten().tolist() for name, value in model.named_parameters()}
stats = engine.served.stats()
if echelon.rank() == 0:
    while "hybrid" not in mode and not os.path.exists("ended-1"):
        time.sleep(0.05)  # the other's last pushes count, too
    if mode in ("async", "bounded", "geo"):
        engine.synchronize()
        with torch.no_grad():
            rows = {"counted": model.counted(known).tolist(), "learned": model.learned(known).tolist()}
        stats = engine.served.stats()
    json.dump({"rows": rows, "dense": dense, "versions": [s["version"] for s in stats]}, open(out, "w"))
engine.close()
open(f"ended-{echelon.rank()}", "w").close()
"""


@dataclass
class Outcome:
    """Outcome of a job."""

    code: int
    said: str
    result: dict[str, Any] | None
    steps: int  # of each worker
    killed: list[str]
    recovery: list[float]  # after each kill, seconds until the process was replaced and all workers had gone on


def expected_counts(mode: str, steps: int) -> np.ndarray:
    """Return the expected values of the counted rows: minus the sum of all gradients, each applied once."""
    import torch

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50, (EPOCH * BATCH * 2, 3), generator=generator).numpy()
    known = np.unique(ids)
    times = np.array([(ids == one).sum() for one in known], np.float64) * (steps / EPOCH)
    moved = times / BATCH * (0.5 if mode in ("geo", "exact hybrid") else 1.0)
    return -np.repeat(moved[:, None], 2, axis=1)


def fresh(words: list[str], directory: Path) -> Any:
    """``echelon WORDS...`` as its users start it."""
    return subprocess.Popen(
        [sys.executable, "-m", "echelon", *words],
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def warm(words: list[str], directory: Path) -> Any:
    """The same with servers and workers that need no fresh start, the first ones and those that take their places."""
    from forked import Forked

    return Forked(words, cwd=directory, env=os.environ | {"OMP_NUM_THREADS": "1"}, warm=True)


def job(
    mode: str, victims: list[str], directory: Path, *, steps: int = 0, replica: bool = False, start: Any = fresh
) -> Outcome:
    """One job, whose ``victims`` ("server-1", "rank-0") are killed one after another; or one of so many steps."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "train.py").write_text(TRAIN)
    if steps:
        _end_at(steps, directory)
    out = directory / "out.json"
    words = [mode, str(EPOCH), str(BATCH), "0.03" if victims else "0", "replica" if replica else "alone", str(out)]
    options = ["--servers", str(SERVERS), "--workers", str(WORKERS), "--max-restarts", "100"]
    process = start(["run", *options, "--log-dir", str(directory / "log"), "train.py", *words], directory)
    recovery: list[float] = []
    killed: list[str] = []
    trouble = ""
    try:
        if victims:
            _until(lambda: min(progress(directory)) >= 3, process)
        for victim in victims:
            recovery.append(_kill(victim, directory, process))
            killed.append(victim)
        if not steps:
            _end_at((max(progress(directory)) // EPOCH + 2) * EPOCH, directory)
        process.communicate(timeout=LIMIT)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        trouble = f"\n({error})"
    finally:
        process.kill()
        said = "".join(process.communicate())
    result = json.loads(out.read_text()) if out.exists() else None
    return Outcome(process.returncode, said + trouble, result, max(progress(directory)), killed, recovery)


def _end_at(steps: int, directory: Path) -> None:
    (directory / "end.part").write_text(str(steps))
    (directory / "end.part").rename(directory / "end")


def _kill(victim: str, directory: Path, process: Any) -> float:
    time.sleep(DRAW.uniform(0.0, 0.5))
    logs = directory / "log"
    _until(lambda: victim in members(logs), process)
    pid = members(logs)[victim]
    os.kill(pid, signal.SIGKILL)
    began, before = time.monotonic(), progress(directory)
    _until(lambda: members(logs).get(victim, pid) != pid, process)
    _until(lambda: all(now > then + 1 for now, then in zip(progress(directory), before, strict=True)), process)
    return time.monotonic() - began


def progress(directory: Path) -> list[int]:
    """Steps that each worker has made."""
    found = [0] * WORKERS
    for worker in range(WORKERS):
        with contextlib.suppress(OSError, ValueError):
            found[worker] = int((directory / f"progress-{worker}").read_text())
    return found


def _until(holds: Any, process: Any) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end, "the job stands still"
        assert process.poll() is None, "the job ended early"
        time.sleep(0.02)


def faults(mode: str, outcome: Outcome, undisturbed: dict[str, Any] | None) -> list[str]:
    """Return the faults of an outcome."""
    if outcome.code or outcome.result is None:
        return [f"ended with {outcome.code}: {outcome.said[-600:]}"]
    wrong = []
    if mode in ("sync", "exact hybrid"):
        assert undisturbed is not None
        for part in ("rows", "dense"):
            for name, values in undisturbed[part].items():
                if not np.array_equal(outcome.result[part][name], values):
                    apart = np.abs(np.array(outcome.result[part][name]) - np.array(values)).max()
                    wrong.append(f"{part} {name} differ from the undisturbed run by {apart:.3g}")
        return wrong
    apart = np.array(outcome.result["rows"]["counted"]) - expected_counts(mode, outcome.steps)
    if mode == "hybrid":  # whose dense part goes back to a checkpoint, and with it all workers: some steps count twice
        apart = np.maximum(apart, 0.0)
    if np.abs(apart).max() > 1e-4:
        wrong.append(f"rows are {np.abs(apart).max():.3g} from where every push, applied once, would have moved them")
    if mode in ("async", "bounded") and outcome.result["versions"] != [outcome.steps * WORKERS] * SERVERS:
        wrong.append(f"versions {outcome.result['versions']}, expected {outcome.steps * WORKERS}")
    return wrong


def victims_of(kind: str, count: int, kills: int) -> list[str]:
    """Return the processes of a kind, each ``kills`` times, in random order."""
    result = [f"{kind}-{index}" for index in range(count)] * kills
    DRAW.shuffle(result)
    return result


def row(mode: str, victims: list[str], ended: Outcome, undisturbed: dict[str, Any] | None) -> dict[str, Any]:
    """Return the line of a job in the table."""
    missed = (
        [] if ended.killed == victims else [f"only {len(ended.killed)} of {len(victims)} kills: {ended.said[-200:]}"]
    )
    return {
        "jobs": 1,
        "kills": dict(sorted(Counter(ended.killed).items())),
        "wrong": faults(mode, ended, undisturbed) + missed,
        "steps": ended.steps,
        "seconds until all had gone on": sorted(round(seconds, 2) for seconds in ended.recovery),
    }


def joined(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """Return the line of the jobs of before and of this one."""
    if before is None:
        return now
    kills = Counter(before["kills"]) + Counter(now["kills"])
    back = "seconds until all had gone on"
    sums = {name: before[name] + now[name] for name in ("jobs", "wrong", "steps")}
    return sums | {"kills": dict(sorted(kills.items())), back: sorted(before[back] + now[back])}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--kills", type=int, default=20, help="kills of each process; default 20")
    ask.add_argument("--modes", nargs="*", default=list(MODES))
    ask.add_argument("--kinds", nargs="*", default=["server", "server, replica", "rank"])
    ask.add_argument("--seed", type=int, default=1)
    ask.add_argument("--warm", action="store_true", help="fork processes in place of fresh starts, to save time")
    ask.add_argument("--out", type=Path)
    asked = ask.parse_args()
    DRAW.seed(asked.seed)
    place = Path(tempfile.mkdtemp(prefix="faults-"))
    table: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out and asked.out.exists() else {}
    start, wrong = warm if asked.warm else fresh, 0
    for mode, kind in itertools.product(asked.modes, asked.kinds):
        what, _, replica = kind.partition(", ")
        if replica and mode != "async":
            continue
        where = place / f"{mode}-{kind}"
        victims = victims_of(what, SERVERS if what == "server" else WORKERS, asked.kills)
        ended = job(mode, victims, where, replica=bool(replica), start=start)
        plain = None
        if mode in ("sync", "exact hybrid"):
            plain = job(mode, [], where / "undisturbed", steps=ended.steps, start=start).result
        found = row(mode, victims, ended, plain)
        print(json.dumps({f"{mode}, {kind}": found}), flush=True)
        wrong += len(found["wrong"])
        table[f"{mode}, {kind}"] = joined(table.get(f"{mode}, {kind}"), found)
        if asked.out:
            asked.out.write_text(json.dumps(table, indent=1) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
