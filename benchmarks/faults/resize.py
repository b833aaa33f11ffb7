"""One job on 1, 2, 3, 2 and 1 hosts, without a restart of the command: it must end with the weights of one process.

    python benchmarks/faults/resize.py [--out resize.json]          # hosts are network namespaces (Linux, root)

Two hosts come one after the other; then one is lost (kill -9 of its launcher) and one leaves (SIGTERM). The global
batch stays the same by the default rule, so every step is the one that a single process makes. A step after which ranks
leave is made, but not noted by the script: the engine ends it there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file

from benchmarks import ROOT
from benchmarks.support.network import Network

STEPS, EACH, HANGS = 160, 12, 90.0
TRAIN = """
import os, sys, time
import torch, torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
import echelon

torch.set_num_threads(1)
echelon.init(seed=3)
# A bias before batch norm has no gradient but rounding, which Adam would make large.
net = nn.Sequential(nn.Linear(6, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
engine = echelon.distribute(net, loss=F.cross_entropy, optimizer=torch.optim.Adam(net.parameters(), lr=0.003))
draw = torch.Generator().manual_seed(0)
loader = engine.loader((torch.randn(240, 6, generator=draw), torch.randint(3, (240,), generator=draw)), global_batch=12)
for _ in loader.epochs(int(sys.argv[1]) // len(loader)):
    for x, y in loader:
        engine.step(x, y)
        if echelon.rank() == 0:
            print(time.time(), engine.steps, echelon.world_size(), file=open("progress", "a"))
        time.sleep(float(sys.argv[2]))
if echelon.rank() == 0:
    save_file(net.state_dict(), "final.safetensors")
"""


def progress(place: Path) -> list[tuple[float, int, int]]:
    """When, which step, on how many ranks."""
    path = place / "progress"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(float(line[0]), int(line[1]), int(line[2])) for line in lines if len(line) == 3]


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + HANGS
    while not holds():
        assert time.monotonic() < end, "the job stands still"
        time.sleep(0.05)


def run(network: Network, place: Path, env: dict[str, str]) -> list[dict[str, float]]:
    """Return each change, and the seconds until a step was made with the new number of ranks."""
    log = (place / "said").open("ab")
    words = [sys.executable, "-m", "echelon", "run", "--nnodes", "1:3", "--procs", "1", "--last-call", "1"]
    words += ["--master", f"{network.addresses[0]}:29500", "--host-timeout", "8", "train.py", str(STEPS), "0.15"]
    command = ["sh", "-c", 'cd "$0" && exec "$@"', str(place), *words]
    hosts: list[subprocess.Popen[bytes]] = []
    changes: list[dict[str, float]] = []

    def change(ranks: int, act: Callable[[], object]) -> None:
        began = time.time()
        act()
        until(lambda: any(when > began and size == ranks for when, _, size in progress(place)))
        first = min(when for when, _, size in progress(place) if when > began and size == ranks)
        changes.append({"ranks": ranks, "seconds": round(first - began, 2)})
        before = progress(place)[-1][1]
        until(lambda: progress(place)[-1][1] >= before + EACH)

    change(1, lambda: hosts.append(network.start(0, command, env, log, log)))
    change(2, lambda: hosts.append(network.start(1, command, env, log, log)))
    change(3, lambda: hosts.append(network.start(2, command, env, log, log)))
    change(2, hosts[2].kill)
    change(1, lambda: hosts[1].send_signal(signal.SIGTERM))
    until(lambda: hosts[0].poll() is not None)
    assert hosts[0].returncode == 0, (place / "said").read_text()
    return changes


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path)
    asked = ask.parse_args()
    root = Path(tempfile.mkdtemp(prefix="resize-"))
    env = os.environ | {"PYTHONPATH": str(ROOT), "ECHELON_TOKEN": os.urandom(8).hex()}
    for name in ("many", "one"):
        (root / name).mkdir()
        (root / name / "train.py").write_text(TRAIN)
    subprocess.run([sys.executable, "train.py", str(STEPS), "0"], cwd=root / "one", env=env, check=True)
    with Network(3) as network:
        changes = run(network, root / "many", env)
    ours, theirs = (load_file(root / name / "final.safetensors") for name in ("many", "one"))
    apart = max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in theirs)
    steps = [step for _, step, _ in progress(root / "many")]
    result = {
        "changes": changes,
        "largest difference of a weight": apart,
        "steps made again": len(steps) - len(set(steps)),
        "steps not noted": sorted(set(range(1, STEPS + 1)) - set(steps)),
    }
    print(json.dumps(result, indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1))
    sys.exit(apart > 1e-5)


if __name__ == "__main__":
    main()
