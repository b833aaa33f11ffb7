"""A launcher records events of a run beside its ranks: the restart, and why it ended."""

from pathlib import Path

from command import echelon, write

from echelon.observability import runlog

TRAIN = """
import os
import torch, echelon
from torch import nn
echelon.init()
net = nn.Linear(2, 1)
engine = echelon.distribute(net, loss=nn.MSELoss(), optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
                            log=echelon.Log(every=1, lines=False))
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(2 + again):
    engine.step(torch.ones(2, 2), torch.ones(2, 1))
os._exit(3 + again)
"""


def test_record_has_restart_last_attempt_and_final_failure(tmp_path: Path) -> None:
    """The record holds the restart, the steps of the later attempt count, and the failure is its last event."""
    write(tmp_path / "train.py", TRAIN)
    end = echelon("run", "--procs", 1, "--max-restarts", 1, "--log-dir", "out", "train.py", cwd=tmp_path)
    assert end.code == 4, end.err
    seen = runlog.read(tmp_path / "out")
    assert seen.facts is not None
    assert seen.facts.attempt == 1
    assert seen.facts.world.launcher == "echelon run"
    assert [step.step for step in seen.steps] == [1, 2, 3]
    assert all((step.time or 0.0) >= seen.facts.started for step in seen.steps)
    restart, failed = (event for event in seen.events if event.kind != "notice")
    assert (restart.kind, restart.rank, failed.kind, failed.rank) == ("restart", 0, "failed", 0)
    assert restart.text.endswith("because rank 0 failed with exit code 3")
    assert failed.text in end.err
    assert failed.log == str(tmp_path / "out" / "rank-0.log")
    assert seen.facts.optimizer.startswith("SGD(lr=")
    assert seen.facts.began < restart.time < seen.facts.started < failed.time
