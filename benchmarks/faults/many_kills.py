"""kill -9 of a random rank, again and again, in one long data-parallel run: it must end with the losses of a quiet one.

    python benchmarks/faults/many_kills.py [--kills 100] [--procs 2] [--out many_kills.json] [--losses losses.json]

The next rank is killed when training has gone on after the last one, a random moment later.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import ROOT
from echelon.distributed import rank_main

HANGS = 120.0
EACH = 6  # steps between two kills, about
TRAIN = """
import os, sys, time
import torch, torch.nn.functional as F
from torch import nn
import echelon

torch.set_num_threads(1)
echelon.init(seed=3)
net = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
engine = echelon.distribute(
    net, loss=F.cross_entropy, optimizer=torch.optim.Adam(net.parameters(), lr=0.003), log=echelon.Log(console=False)
)
draw = torch.Generator().manual_seed(0)
x = torch.randn(320, 6, generator=draw)
loader = engine.loader((x, x.argmax(1) % 3), batch_size=8)
for _ in loader.epochs(int(sys.argv[1]) // len(loader)):
    for x, y in loader:
        loss = float(engine.step(x, y))
        with open(f"losses-{echelon.rank()}", "a") as file:
            file.write(f"{engine.steps} {loss!r}\\n")
        time.sleep(0.05)
"""


def start(place: Path, steps: int, procs: int, kills: int) -> subprocess.Popen[bytes]:
    place.mkdir(parents=True)
    (place / "train.py").write_text(TRAIN)
    words = ["--procs", str(procs), "--max-restarts", str(kills), "--copies", "1", "train.py", str(steps)]
    with (place / "said").open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "echelon", "run", *words],
            cwd=place,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=said,
        )


def losses(place: Path, rank: int = 0) -> dict[int, list[str]]:
    """Every loss that the rank has seen at each step: one, or more where a step was made again."""
    found: dict[int, list[str]] = {}
    path = place / f"losses-{rank}"
    for line in path.read_text().splitlines() if path.exists() else ():
        step, _, loss = line.partition(" ")
        found.setdefault(int(step), []).append(loss)
    return found


def ranks_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children if rank_main.__file__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]


def until(holds: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + HANGS
    while not holds():
        assert time.monotonic() < end, "the job stands still"
        assert process.poll() is None, f"the job ended early, with {process.returncode}"
        time.sleep(0.02)


def resumed(place: Path) -> list[int]:
    """Return the step after which training went on, for each restart."""
    events = map(json.loads, (place / "log" / "events.jsonl").read_text().splitlines())
    return [int(re.findall(r"after step (\d+)", each["text"])[0]) for each in events if each["kind"] == "resumed"]


def disturb(process: subprocess.Popen[bytes], place: Path, kills: int, minutes: float) -> list[float]:
    """Kill so often, or as often as there are minutes for; return the seconds until training had gone on, each time."""
    draw, recovery = random.Random(1), []
    until(lambda: len(losses(place)) > 2, process)
    end = time.monotonic() + 60 * minutes
    for _ in range(kills):
        if time.monotonic() > end:
            break
        time.sleep(draw.uniform(0.0, 0.3))
        until(lambda: ranks_of(process.pid), process)
        os.kill(draw.choice(ranks_of(process.pid)), signal.SIGKILL)
        began, before = time.monotonic(), max(losses(place))
        until(lambda seen=before: max(losses(place)) > seen + 1, process)
        recovery.append(time.monotonic() - began)
    return recovery


def curves(place: Path) -> dict[str, list[float]]:
    """Return the losses of both runs by step, and the steps after which the killed one resumed."""
    found: dict[str, list[float]] = {"resumed after step": list(resumed(place / "killed"))}
    for run in ("quiet", "killed"):
        found[run] = [float(loss[-1]) for _, loss in sorted(losses(place / run).items())]
    return found


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--kills", type=int, default=100)
    ask.add_argument("--procs", type=int, default=2)
    ask.add_argument("--minutes", type=float, default=math.inf, help="kill for so long; then the run ends undisturbed")
    ask.add_argument("--out", type=Path)
    ask.add_argument("--losses", type=Path, help="where to write both curves, for the picture in docs/faults.md")
    asked = ask.parse_args()
    place, steps = Path(tempfile.mkdtemp(prefix="kills-")), 20 * -(-asked.kills * EACH // 20) + 40
    quiet = start(place / "quiet", steps, asked.procs, 0)
    quiet.wait()
    process = start(place / "killed", steps, asked.procs, asked.kills)
    recovery = disturb(process, place / "killed", asked.kills, asked.minutes)
    code = process.wait()
    expected, found = losses(place / "quiet"), losses(place / "killed")
    differ = [step for step in expected if set(found.get(step, [])) != set(expected[step])]
    again = sum(len(seen) - 1 for seen in found.values())
    result = {
        "kills": len(recovery), "ranks": asked.procs, "steps": steps, "exit code": code,
        "steps whose loss differs from the quiet run's": differ,
        "steps made again, over all kills": again,
        "seconds until gone on": {"median": statistics.median(recovery), "worst": max(recovery)},
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1))
    if asked.losses:
        asked.losses.write_text(json.dumps(curves(place)) + "\n")
    sys.exit(bool(code or differ))


if __name__ == "__main__":
    main()
