"""kill -9 of any rank at any moment: the rest stop and say who; with restarts, the job ends as if nothing had been."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
from command import LIMIT, echelon, here
from harness import run, script
from safetensors.torch import load_file

TRAIN = """
import os, signal, sys
import torch, torch.nn.functional as F
from torch import nn
import echelon

victim, fatal = int(sys.argv[1]), int(sys.argv[2])
echelon.init(seed=3)
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

def loss(output, target):
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first and engine.steps == fatal and echelon.rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)  # between forward and backward: the others wait for this rank
    return F.cross_entropy(output, target)

engine = echelon.distribute(
    net, loss=loss, optimizer=optimizer, checkpoint=echelon.Checkpoint(dir="ckpt", every=4, keep=2)
)
g = torch.Generator().manual_seed(0)
data = torch.randn(60, 6, generator=g), torch.randint(3, (60,), generator=g)
loader = engine.loader(data, batch_size=4)
for _ in loader.epochs(3):
    for x, y in loader:
        engine.step(x, y)
engine.save("final", wait=True)
"""


def train(directory: Path, victim: int, fatal: int, *options: object) -> tuple[int, str, str]:
    (directory / "train.py").write_text(TRAIN)
    ended = echelon("run", "--procs", 2, *options, "train.py", victim, fatal, cwd=directory, OMP_NUM_THREADS="1")
    return ended.code, ended.out, ended.err


def weights(directory: Path) -> dict[str, object]:
    assert here("export", "final", "out.safetensors", cwd=directory).code == 0
    return {name: value.tolist() for name, value in load_file(directory / "out.safetensors").items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Return the final weights of a run without kills."""
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "train.py").write_text(TRAIN)
    run(script, str(directory / "train.py"), ["-1", "-1"])
    ended = echelon("export", "final", "out.safetensors", cwd=directory)
    assert (ended.code, ended.err) == (0, "")
    return {name: value.tolist() for name, value in load_file(directory / "out.safetensors").items()}


@pytest.mark.parametrize("victim", [1])
def test_rank_killed_mid_step_is_named_restart_ends_same_weights(
    victim: int, undisturbed: dict[str, object], tmp_path: Path
) -> None:
    """A rank killed in the middle of a step is named, and a restart ends with the undisturbed weights."""
    code, out, err = train(tmp_path, victim, 10, "--max-restarts", 1)
    assert code == 0, err
    assert f"restarting all ranks (restart 1 of 1) because rank {victim} was killed by SIGKILL" in err
    assert re.search("resumed from .*, after step [48]$", out, re.MULTILINE), "the checkpoint before the last at worst"
    assert weights(tmp_path) == undisturbed


def test_without_restarts_others_stop_and_same_command_goes_on(undisturbed: dict[str, object], tmp_path: Path) -> None:
    """Without restarts the other ranks stop with the killed one, and the same command run again resumes."""
    code, _, err = train(tmp_path, 1, 10)
    assert code == 128 + 9
    assert re.match(r"echelon: rank 1 of 2 \(host .*, pid \d+\) was killed by SIGKILL", err.splitlines()[0])
    code, out, err = train(tmp_path, -1, -1)
    assert code == 0, err
    assert re.search("resumed from .*, after step [48]$", out, re.MULTILINE), "the checkpoint before the last at worst"
    assert weights(tmp_path) == undisturbed


BAR = """
import torch, echelon
net = torch.nn.Linear(2, 1)
engine = echelon.distribute(net, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
loader = engine.loader((torch.randn(80, 2), torch.randn(80, 1)), batch_size=2)
for epoch in loader.epochs(2):
    for x, y in loader:
        engine.step(x, y)
    if echelon.is_first_worker():
        print("a line of the script in epoch", epoch)
"""


def test_a_terminal_gets_a_live_bar_and_the_log_gets_plain_lines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BAR)
    screen = on_a_terminal(
        [sys.executable, "-m", "echelon", "run", "--procs", "2", "--log-dir", "log", "train.py"], tmp_path
    )
    assert "40/40" in screen
    assert "examples/s" in screen
    assert "\\x1b[" in repr(screen), "a live bar moves the cursor"
    log = (tmp_path / "log" / "rank-0.log").read_text()
    for text in (screen, log):
        assert "a line of the script in epoch 0" in text
        assert "a line of the script in epoch 1" in text
    assert re.search(r"^step 40/40  loss [\d.]+  [\d,]+ examples/s  data", log, re.MULTILINE)
    assert "\x1b[" not in log


def on_a_terminal(command: list[str], directory: Path) -> str:
    """Run ``command`` with a real pseudo-terminal as its console; what appeared there."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, cwd=directory, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm-256color"}
    )
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # the last process on the terminal has gone, and all that it said is read
        while select.select([ours], [], [], LIMIT)[0]:
            seen += os.read(ours, 65536)
    assert process.wait(timeout=LIMIT) == 0, seen.decode()
    os.close(ours)
    return seen.decode()


FULL_DISK = """
import resource, signal, torch, echelon
net = torch.nn.Linear(64, 64)
engine = echelon.distribute(net, loss=lambda out: out.mean(), optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
engine.step(torch.ones(2, 64))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
engine.save("ckpt")
"""


def test_last_save_failing_in_background_is_not_a_success(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FULL_DISK)
    ended = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("echelon: saving step 1: cannot write")
    assert "File too large" in line
