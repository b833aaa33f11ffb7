"""The training that ``many_kills.py`` disturbs: LAYOUT PAUSE. It ends with the epoch that the file ``end`` names.

Each rank notes the loss of each step that it makes, and rank 0 the weights that training ended with.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import echelon
from benchmarks.faults.faults_train import BATCH, KNOWN, MARKS, Clicks, network

EPOCH = 20  # steps


def main(layout: str, pause: float) -> None:
    torch.set_num_threads(1)
    echelon.init(seed=3)
    Path(f"pid-{echelon.rank()}").write_text(str(os.getpid()))
    tables = layout == "collective"
    net = Clicks() if tables else network()
    echelon.annotate(net, MARKS.get(layout, {}))
    engine = echelon.distribute(
        net,
        loss=F.cross_entropy,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.003),
        strategy=echelon.Strategy(shard=2 if layout == "shard" else None),
        checkpoint=echelon.Checkpoint(dir="ckpt", every=5, keep=2) if tables else None,  # copies in memory have no rows
        log=echelon.Log(console=False),
    )
    draw = torch.Generator().manual_seed(0)
    count = BATCH * EPOCH
    inputs = KNOWN[torch.randint(40, (count, 3), generator=draw)] if tables else torch.randn(count, 6, generator=draw)
    loader = engine.loader((inputs, torch.randint(3, (count,), generator=draw)), global_batch=BATCH)
    for epoch in loader.epochs(10**6):
        if Path("end").exists() and epoch >= int(Path("end").read_text()):
            break
        for x, y in loader:
            loss = float(engine.step(x, y))
            with open(f"losses-{echelon.rank()}", "a") as file:
                file.write(f"{engine.steps} {loss!r}\n")
            time.sleep(pause)
    engine.synchronize()
    weights = engine.whole_state()
    if isinstance(net, Clicks):
        with torch.no_grad():
            weights["rows"] = net.table(KNOWN)
    if echelon.rank() == 0:
        save_file(weights, "final.part")
        os.replace("final.part", "final.safetensors")
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
