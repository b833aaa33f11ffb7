"""The training that ``faults.py`` disturbs: MODE PLACE STEPS.

Each rank notes its progress, and rank 0 the weights it ended with.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import echelon
from echelon import pipeline, split, stage
from echelon.nn import SparseEmbedding

BATCH, EVERY, PAUSE = 16, 5, 0.05
MARKS = {
    "pipeline": {"": pipeline(micro_batches=4), "0-2": stage(0), "3-7": stage(1)},
    "split": {"2": split(), "7": split()},
}
KNOWN = torch.arange(40) * 987654321987 - 5


class Clicks(nn.Module):
    """A model for parameter servers: rows of a table, then a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SparseEmbedding(4, name="rows")
        self.dense = nn.Linear(12, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dense(self.table(ids).flatten(1))


def network() -> nn.Module:
    ends = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16)], [nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)]
    return nn.Sequential(*ends[0], *ends[1], nn.Linear(16, 16), nn.Linear(16, 3))


def note(place: Path, step: int) -> None:
    with (place / f"progress-{echelon.rank()}").open("a") as file:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("ECHELON_RESTARTS", "0")
        file.write(f"{time.time():.3f} {step} {max(map(int, restarts))}\n")


def main(mode: str, place: Path, steps: int) -> None:
    torch.set_num_threads(1)
    echelon.init(seed=3, timeout=60)
    served = mode == "ps"
    tables = mode in ("ps", "collective")
    net = Clicks() if tables else network()
    echelon.annotate(net, MARKS.get(mode, {}))
    settings = {"ps": echelon.ParameterServer(patience=30.0), "shard": None} if served else {}
    engine = echelon.distribute(
        net,
        loss=F.cross_entropy,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
        strategy=echelon.Strategy(**{"shard": 2 if mode == "shard" else None, **settings}),
        checkpoint=echelon.Checkpoint(dir=str(place / "ckpt"), every=EVERY, keep=3),
    )
    draw = torch.Generator().manual_seed(0)
    count = BATCH * 8
    inputs = KNOWN[torch.randint(40, (count, 3), generator=draw)] if tables else torch.randn(count, 6, generator=draw)
    loader = engine.loader((inputs, torch.randint(3, (count,), generator=draw)), global_batch=BATCH)
    for _ in loader.epochs(steps // 8):
        for x, y in loader:
            engine.step(x, y)
            note(place, engine.steps)
            time.sleep(PAUSE)
    engine.synchronize()
    weights = engine.whole_state()
    if isinstance(net, Clicks):
        with torch.no_grad():
            weights["rows"] = net.table(KNOWN)
    if echelon.rank() == 0:
        save_file(weights, place / "final.part")
        os.replace(place / "final.part", place / "final.safetensors")
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
