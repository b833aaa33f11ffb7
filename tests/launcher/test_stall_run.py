"""The stall watch under ``echelon run``: a rank that does not come is named on every console, and the job ends."""

import re
import socket

from command import echelon, finish, start, write
from harness import free_port

from echelon.launcher.stall_plugin import process_state
from echelon.observability.runlog import read

TRAIN = """\
import os, signal, time, torch, echelon
from torch import nn

echelon.init(device="cpu", timeout=100)
model = nn.Linear(4, 2)
engine = echelon.distribute(
    model, loss=nn.functional.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    log=echelon.Log(console=False),
)
batch = torch.randn(4, 4), torch.tensor([0, 1, 0, 1])
for step in range(8):
    if step == 5 and echelon.rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        LATE
    engine.step(*batch)
print("finished at", engine.steps)
"""


def test_frozen_rank_is_named_on_both_hosts_leaves_no_process(tmp_path):
    """A frozen rank is named on the consoles of both hosts, and its process is gone at the end."""
    freeze = "open('pid', 'w').write(str(os.getpid())); os.kill(os.getpid(), signal.SIGSTOP)"
    write(tmp_path / "train.py", TRAIN.replace("LATE", freeze))
    words = ["--nnodes", 2, "--master", f"127.0.0.1:{free_port()}", "--procs", 1, "--stall", 3, "train.py"]
    launchers = [start("run", *words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="") for _ in range(2)]
    ends = [finish(launcher) for launcher in launchers]
    host, pid = socket.gethostname(), int((tmp_path / "pid").read_text())
    late = rf"rank 1 \(host {host}, pid {pid}\) is late: it has sent no heartbeat for \d+ s; its process is stopped"
    for end in ends:
        assert end.err.startswith("echelon: the job has stalled\nrank  host"), ends
        assert re.search(r"^0 .* 6 +communicate +sum of gradients: bucket 0 .* +rank 1 +\d+ s$", end.err, re.MULTILINE)
        assert re.search(late, end.err)
        assert re.search(
            rf"^echelon: rank 1 of 2 \(host {host}, pid {pid}\) stalled: it has sent no heartbeat",
            end.err,
            re.MULTILINE,
        )
        assert end.err.count("the job has stalled") == 1
        assert end.code == 1
    assert process_state(pid) == ""


def test_sleeping_rank_is_shown_with_stack_and_restart_goes_on(tmp_path):
    write(tmp_path / "train.py", TRAIN.replace("LATE", "time.sleep(600)"))
    end = echelon("run", "--procs", 2, "--stall", 3, "--max-restarts", 1, "train.py", cwd=tmp_path)
    assert re.search(r"^rank 1 \(.*\) is late: it has been in user code for \d+ s$", end.err, re.MULTILINE), end.err
    assert 'train.py", line 13, in <module>\n      time.sleep(600)\n' in end.err
    assert (
        "echelon: restarting all ranks (restart 1 of 1) because rank 1 stalled: it has been in user code for" in end.err
    )
    assert end.code == 0
    assert end.out.splitlines() == ["finished at 8"]
    stall, restart, *ended = read(tmp_path / "log").events
    assert (stall.kind, stall.rank, restart.kind) == ("stall", 1, "restart")
    assert stall.text in end.err
    assert [(event.kind, event.rank) for event in ended] == [("ended", 0), ("ended", None)]
