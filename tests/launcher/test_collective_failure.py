"""A worker that holds rows of sparse tables is killed: the job restarts and ends with the same bits."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from command import echelon
from harness import run, script

TRAIN = """
import os, signal, sys
import numpy as np, torch
from torch import nn
import echelon

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.ids = echelon.nn.SparseEmbedding(4, optimizer="adam", admit_after=2)
        self.net = nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, ids):
        if self.training and sys.argv[1] == "kill" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            if echelon.rank() == 1 and engine.steps == 8:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.net(self.ids(ids).flatten(1)).squeeze(1)

echelon.init(seed=3)
model = Model()
engine = echelon.distribute(
    model,
    loss=nn.functional.mse_loss,
    optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
    checkpoint=echelon.Checkpoint(dir="ckpt", every=3, keep=2),
)
g = torch.Generator().manual_seed(0)
ids = torch.randint(-50, 50, (96, 3), generator=g)
loader = engine.loader((ids, torch.randn(96, generator=g)), global_batch=16)
for _ in loader.epochs(2):
    for batch in loader:
        engine.step(*batch)
model.eval()
with torch.no_grad():
    rows = model.ids(torch.arange(-50, 50))
if echelon.rank() == 0:
    np.savez("end.npz", rows=rows.numpy(), **{n: p.detach().numpy() for n, p in model.net.named_parameters()})
"""


def test_killed_worker_leaves_no_trace_in_rows_and_weights(tmp_path: Path) -> None:
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(TRAIN)
    run(script, str(tmp_path / "undisturbed" / "train.py"), ["run"], ranks=2)
    options = ("--procs", 2, "--max-restarts", 1, "--copies", 1)
    ended = echelon("run", *options, "train.py", "kill", cwd=tmp_path / "killed")
    assert ended.code == 0, ended.err
    assert "in-memory snapshots disabled: they hold no rows of sparse tables" in ended.out
    assert re.search("resumed from .*, after step [36]$", ended.out, re.MULTILINE), ended.out
    wanted, found = (np.load(tmp_path / name / "end.npz") for name in ("undisturbed", "killed"))
    for name in wanted.files:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
