"""``--on ray``: real jobs on a real cluster of Ray nodes on this machine.

The command is started afresh: Ray does not work in a process that was forked from another.
"""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from command import LIMIT, command_lines, finish, here, processes_with, start_fresh, until, write
from safetensors.torch import load_file

TRAIN = """
import os, sys, time
from pathlib import Path
import torch, torch.nn.functional as F
import echelon

echelon.init(seed=3)
net = torch.nn.Linear(6, 3)
with torch.no_grad():
    for p in net.parameters():
        p.fill_(0.1)
engine = echelon.distribute(
    net, loss=F.cross_entropy, optimizer=torch.optim.SGD(net.parameters(), lr=0.5),
    checkpoint=echelon.Checkpoint(dir="ckpt", every=2),
)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(80, 6, generator=g), torch.randint(3, (80,), generator=g)
while engine.steps < 10:
    if engine.steps == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        Path(f"up-{echelon.rank()}.part").write_text(os.environ["RAY_RAYLET_PID"])
        os.rename(f"up-{echelon.rank()}.part", f"up-{echelon.rank()}")
        time.sleep(600)
    part = slice(8 * engine.steps + 4 * echelon.rank(), 8 * engine.steps + 4 * echelon.rank() + 4)
    engine.step(x[part], y[part])
engine.save("final", wait=True)
"""


class RayCluster:
    def __init__(self):
        program = Path(__file__).with_name("ray_cluster.py")
        self._process = subprocess.Popen(
            [sys.executable, program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self.files = ""

    def tell(self, *words):
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline().split()
        assert said, "the cluster has ended"
        self.address, self.files = said

    def close(self):
        self._process.communicate(timeout=LIMIT)


@pytest.fixture(scope="module")
def cluster():
    nodes = RayCluster()
    nodes.tell("add")
    nodes.tell("add")
    yield nodes
    nodes.close()
    until(lambda: not [line for line in command_lines() if nodes.files in line], "the end of all of Ray")


def weights_of_one_process():
    net = torch.nn.Linear(6, 3)
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(0.1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(80, 6, generator=g), torch.randint(3, (80,), generator=g)
    for step in range(10):
        optimizer.zero_grad()
        F.cross_entropy(net(x[8 * step : 8 * step + 8]), y[8 * step : 8 * step + 8]).backward()
        optimizer.step()
    return net.state_dict()


def carriers(secret, *directories):
    """Files, and command lines of living processes, in which the secret can be read."""
    found = [path for top in directories for path in Path(top).rglob("*") if path.is_file() and not path.is_symlink()]
    found += [one / "cmdline" for one in Path("/proc").iterdir() if one.name.isdigit()]
    held = []
    for path in found:
        with contextlib.suppress(OSError):
            if secret.encode() in path.read_bytes():
                held.append(path)
    return held


@pytest.mark.timeout(600)
def test_a_job_goes_on_when_a_node_is_lost_and_another_comes(cluster, tmp_path):
    """Training on two nodes ends with the weights of one process; its secret is in no file and no command line."""
    write(tmp_path / "train.py", TRAIN)
    secret = "hush-hush-0123456789"
    words = ["--nnodes", 2, "--procs", 1, "--max-restarts", 1, "--host-timeout", 5, "train.py"]
    job = start_fresh(
        "run", "--on", "ray", "--ray-address", cluster.address, *words, cwd=tmp_path, ECHELON_TOKEN=secret
    )
    until(lambda: len(list(tmp_path.glob("up-?"))) == 2, "both ranks")
    ray_files = Path(cluster.files, "logs")
    assert ray_files.is_dir()
    assert carriers(secret, tmp_path, ray_files) == []
    cluster.tell("lose", (tmp_path / "up-1").read_text())
    cluster.tell("add")
    end = finish(job)
    assert end.code == 0, end
    assert "echelon: the Ray node of host 1 (" in end.err
    assert "was lost; another node replaces it as soon as the cluster has one\n" in end.err
    assert "resumed from " in end.out
    assert carriers(secret, tmp_path, ray_files) == []
    assert secret not in end.out + end.err
    assert here("export", "final", "out.safetensors", cwd=tmp_path).code == 0
    torch.testing.assert_close(load_file(tmp_path / "out.safetensors"), weights_of_one_process())


def test_too_large_job_is_one_line_killed_command_leaves_nothing(cluster, tmp_path):
    """A job that the cluster cannot hold ends in one line, and a command that is killed leaves no process behind."""
    write(tmp_path / "sleep.py", "import os, time\nopen('up-' + os.environ['RANK'], 'w')\ntime.sleep(600)\n")
    common = ["--on", "ray", "--ray-address", cluster.address, "--procs", 1]
    marker = str(tmp_path)
    job = start_fresh("run", *common, "--nnodes", 1, "sleep.py", marker, cwd=tmp_path)
    many = start_fresh("run", *common, "--nnodes", 7, "sleep.py", cwd=tmp_path)
    until((tmp_path / "up-0").exists, "the rank")
    assert len(processes_with(marker)) > 2  # command, launcher, rank
    job.send_signal(signal.SIGKILL)
    job.communicate()
    until(lambda: not processes_with(marker), "the end of launchers and ranks")
    end = finish(many)
    assert (end.code, end.err) == (
        2,
        "echelon: --nnodes 7 needs 7 nodes with 1 CPU each, but the Ray cluster has 2; "
        "add nodes, or ask for less by --procs or --gpus\n",
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--on", "ray"], "--on ray needs ray: pip install 'echelon[ray]'"),
        (["--on", "rai"], "--on rai: the only known cluster is ray; write --on ray, or leave --on out"),
        (["--ray-address", "a:1"], "--ray-address is for jobs on a Ray cluster; add --on ray"),
        (["--on", "ray", "--master", "a:1"], "--master chooses hosts; with --on ray, Ray chooses them: leave it out"),
        (
            ["--on", "ray", "--servers", "1"],
            "--on ray starts jobs without parameter servers; leave --servers and --pservers out",
        ),
        (
            ["--on", "ray", "--gpus", "0,1"],
            "--gpus 0,1 names GPUs; with --on ray, Ray chooses them: give their number on each host",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, words, line):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    write(tmp_path / "any.py", "")
    end = here("run", *words, "any.py", cwd=tmp_path)
    assert (end.code, end.err) == (2, f"echelon: {line}\n")
