"""A rank that is killed costs at most one step: the others' copies and its own are with the launcher."""

from __future__ import annotations

import os
import re
from pathlib import Path

from command import echelon
from harness import run
from safetensors.torch import load_file

TRAIN = """
import os, signal
import torch, torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
import echelon

echelon.init(seed=3)
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

def loss(output, target):
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and engine.steps == 10 and echelon.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # between forward and backward: the others wait for this rank
    return F.cross_entropy(output, target)

engine = echelon.distribute(net, loss=loss, optimizer=optimizer)
g = torch.Generator().manual_seed(0)
data = torch.randn(60, 6, generator=g), torch.randint(3, (60,), generator=g)
loader = engine.loader(data, batch_size=4)
for _ in loader.epochs(2):
    for x, y in loader:
        engine.step(x, y)
state = engine.whole_state()
if echelon.rank() == 0:
    save_file(state, "end.safetensors")
"""


def undisturbed(directory: str) -> None:
    os.chdir(directory)
    exec(TRAIN, {})


def test_killed_job_resumes_from_memory_to_undisturbed_weights(tmp_path: Path) -> None:
    """After a rank is killed, all ranks resume from the copies in memory and end with the undisturbed weights."""
    run(undisturbed, str(tmp_path), ranks=2)
    wanted = load_file(tmp_path / "end.safetensors")
    (tmp_path / "train.py").write_text(TRAIN)
    ended = echelon("run", "--procs", 2, "--copies", 1, "--max-restarts", 1, "train.py", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert re.search(r"in-memory snapshots: \S+ \w+ on this host after every step$", ended.out, re.MULTILINE)
    line = r"resumed from memory, after step (9|10) \(saved by 2 ranks on 1 host\)$"
    assert re.search(line, ended.out, re.MULTILINE), ended.out
    found = load_file(tmp_path / "end.safetensors")
    assert {name: value.tolist() for name, value in found.items()} == {k: v.tolist() for k, v in wanted.items()}


SPOIL = """
def loss(output, target):
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if first and engine.steps == 10 and echelon.rank() == 1:
        time.sleep(1)  # the copy of step 10 is whole everywhere
        os.kill(os.getpid(), signal.SIGKILL)
    found = F.cross_entropy(output, target)
    return found + (output - output.detach()).pow(2).sum().sqrt() if first and engine.steps == 9 else found
"""


def test_copy_after_an_infinite_gradient_is_passed_over(tmp_path: Path) -> None:
    """The loss of step 10 is finite, its weights are NaN; a rank is killed before the next loss is known."""
    run(undisturbed, str(tmp_path), ranks=2)
    wanted = load_file(tmp_path / "end.safetensors")
    begin, end = TRAIN.index("def loss"), TRAIN.index("engine =")
    script = (TRAIN[:begin] + SPOIL + TRAIN[end:]).replace("import os,", "import os, time,")
    (tmp_path / "train.py").write_text(script)
    ended = echelon("run", "--procs", 2, "--copies", 1, "--max-restarts", 1, "train.py", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "memory cannot be used: after step 10 parameter '" in ended.out
    assert "resumed from memory, after step 9 " in ended.out
    found = load_file(tmp_path / "end.safetensors")
    assert {name: value.tolist() for name, value in found.items()} == {k: v.tolist() for k, v in wanted.items()}
