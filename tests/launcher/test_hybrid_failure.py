"""A rank of a pipeline, a split or a sharded job fails: all end soon, the first lines say who and where, and a restart
ends as if nothing had been. And mistakes in spreading a model get one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from command import Ended, echelon, here
from harness import errors, run, script
from safetensors.torch import load_file
from torch import Tensor, nn
from zoo import QUIET

import echelon as framework
from echelon import Strategy, cluster, pipeline, split, stage
from echelon.base.errors import EchelonError

TRAIN = """
import os, signal, sys
import torch, torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
import echelon
from echelon import pipeline, split, stage

how, spread, victim, fatal = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
moment = 2 if spread == "pipeline" else 1  # the second micro-batch, where there are any
echelon.init(seed=3)

class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x):
        if not isinstance(x, FakeTensor) and not isinstance(self.linear.weight.data, FakeTensor):  # it runs for real
            first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            self.calls += engine.steps == fatal
            if first and echelon.rank() == victim and engine.steps == fatal and self.calls == moment:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "raise":
                    raise ValueError("the data of this batch are broken")
        return self.linear(x)

net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), Fragile(), nn.Dropout(0.2), nn.Linear(16, 3))
if spread == "pipeline":
    marks = {"": pipeline(micro_batches=4), "0-2": stage(0), "3-5": stage(1)}
else:
    marks = {"split": {"2": split(), "5": split()}, "shard": {}}[spread]
echelon.annotate(net, marks)
engine = echelon.distribute(
    net,
    loss=F.cross_entropy,
    optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
    strategy=echelon.Strategy(shard=3 if spread == "shard" else None),
    checkpoint=echelon.Checkpoint(dir="ckpt", every=2, keep=2),
)
g = torch.Generator().manual_seed(0)
data = torch.randn(64, 6, generator=g), torch.randint(3, (64,), generator=g)
loader = engine.loader(data, global_batch=16)
for _ in loader.epochs(3):
    for x, y in loader:
        engine.step(x, y)
engine.save("final", wait=True)
"""


def train(directory: Path, procs: int, *words: object, restarts: int = 0) -> Ended:
    path = written(directory)
    options = ("--procs", procs, "--max-restarts", restarts)
    return echelon("run", *options, path.name, *words, cwd=directory, OMP_NUM_THREADS="1")


def written(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "train.py").write_text(TRAIN)
    return directory / "train.py"


def test_stage_error_is_told_with_rank_stage_and_micro_batch(tmp_path: Path) -> None:
    end = train(tmp_path, 4, "raise", "pipeline", 3, 2)
    assert end.code == 1
    words = r"echelon: rank 3 of 4 \(host .*\) raised ValueError: at rank 3, stage 1, micro-batch 1: the data of this"
    assert re.match(words, end.first_line), end.err


@pytest.mark.parametrize(("spread", "procs"), [("pipeline", 4), ("split", 2), ("shard", 2)])
def test_a_killed_rank_ends_all_and_is_named(spread: str, procs: int, tmp_path: Path) -> None:
    end = train(tmp_path, procs, "kill", spread, procs - 1, 2)
    assert end.code == 128 + 9, end.err
    words = rf"echelon: rank {procs - 1} of {procs} \(host .*, pid \d+\) was killed by SIGKILL"
    assert re.match(words, end.first_line), end.err


def weights(directory: Path) -> dict[str, Any]:
    assert here("export", "final", "out.safetensors", cwd=directory).code == 0
    return {name: value.tolist() for name, value in load_file(directory / "out.safetensors").items()}


def test_restarted_pipeline_ends_with_undisturbed_weights(tmp_path: Path) -> None:
    run(script, str(written(tmp_path / "undisturbed")), ["", "pipeline", "-1", "-1"])
    end = train(tmp_path / "killed", 2, "kill", "pipeline", 1, 5, restarts=1)
    assert end.code == 0, end.err
    assert "restarting all ranks (restart 1 of 1) because rank 1 was killed by SIGKILL" in end.err
    assert re.search("resumed from .*, after step [24]$", end.out, re.MULTILINE), (
        "the checkpoint before the last at worst"
    )
    assert weights(tmp_path / "killed") == weights(tmp_path / "undisturbed")


# ---- mistakes ----


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.rnn = nn.RNN(8, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.body(x)[:, None, :])[0][:, 0])


PIPELINE = {"": pipeline(micro_batches=2), "body": stage(0), "rnn": stage(1), "head": stage(1)}
BATCH = torch.ones(4, 4), torch.zeros(4, dtype=torch.int64)


def spread(marks: dict[str, Any], **options: Any) -> Any:
    of = options.pop("cluster", None)
    net = framework.annotate(Net(), marks)
    made = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return framework.distribute(
        net, loss=F.cross_entropy, optimizer=made, strategy=Strategy(**options), cluster=of, log=QUIET
    )


def four_stages() -> None:
    spread({f"body.{i}": stage(i) for i in range(4)})


def stages_with_a_gap() -> None:
    spread({"body": stage(0), "head": stage(2)})


def no_micro_batches() -> None:
    spread({"": pipeline(micro_batches=0), "body": stage(0), "head": stage(1)})


def split_a_recurrence() -> None:
    spread({"rnn": split()})


def slices_of_three() -> None:
    spread({"head": split()}, cluster=cluster(average=3))


def save_too_early() -> None:
    spread(PIPELINE).save("nowhere")


def show_too_early() -> None:
    spread(PIPELINE).whole_state()


def own_loop() -> None:
    engine = spread(PIPELINE)
    engine.backward(engine.model(BATCH[0]).sum())


def compressed_split() -> None:
    spread({"head": split()}, dgc=True)


def compressed_pipeline() -> None:
    spread(PIPELINE, dgc=True)


def alone_in_a_split() -> None:
    spread({"head": split()}, localsgd=True)


def alone_in_a_pipeline() -> None:
    spread(PIPELINE, adaptive_localsgd=True)


def compressed_shards() -> None:
    spread({}, shard=2, dgc=True)


#: what is done, on how many ranks, and what the line must say: what was asked, and what to do
MISTAKES: list[tuple[Callable[[], None], int, str, str]] = [
    (four_stages, 3, "4 stages", "start 4 processes"),
    (slices_of_three, 4, "split over 3", "4 is not a multiple"),
    (stages_with_a_gap, 2, "stages 0, 2 are marked and 1 is not", "without gaps"),
    (no_micro_batches, 2, "micro_batches", "1 or more"),
    (split_a_recurrence, 2, "'rnn'", "RNN"),
    (save_too_early, 2, "cut by its first batch", "distribute(sample=batch)"),
    (show_too_early, 2, "cut by its first batch", "distribute(sample=batch)"),
    (own_loop, 2, "a pipeline runs its own backward", "call engine.step()"),
    (compressed_split, 2, "dgc and split do not combine", "drop dgc, or the marks"),
    (compressed_pipeline, 2, "dgc and pipeline do not combine", "drop dgc, or the marks"),
    (alone_in_a_split, 2, "localsgd and split do not combine", "drop localsgd, or the marks"),
    (alone_in_a_pipeline, 2, "adaptive_localsgd and pipeline do not combine", "drop adaptive_localsgd, or the marks"),
    (compressed_shards, 2, "dgc and shard do not combine", "choose one of the two"),
]


def told(mistakes: list[Callable[[], None]]) -> list[str]:
    framework.init()
    return [_line(mistake) for mistake in mistakes]


def _line(mistake: Callable[[], None]) -> str:
    try:
        mistake()
    except EchelonError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def lines() -> dict[str, list[str]]:
    """Return the lines that every rank printed."""
    found: dict[str, list[str]] = {}
    for ranks in (2, 3, 4):
        here = [mistake for mistake, needed, _, _ in MISTAKES if needed == ranks]
        results = run(told, here, ranks=ranks)
        found |= {mistake.__name__: [result[i] for result in results] for i, mistake in enumerate(here)}
    return found


@pytest.mark.parametrize(
    ("mistake", "ranks", "asked", "remedy"), MISTAKES, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_mistake_gets_one_line_on_every_rank(
    mistake: Callable[[], None], ranks: int, asked: str, remedy: str, lines: dict[str, list[str]]
) -> None:
    for line in lines[mistake.__name__]:
        assert asked in line, line
        assert remedy in line, line
        assert "\n" not in line


def differing(marks: dict[str, Any]) -> None:
    framework.init()
    engine = spread(marks)
    x, y = BATCH
    engine.step(x + framework.rank(), y)


@pytest.mark.parametrize("marks", [PIPELINE, {"head": split()}], ids=["pipeline", "split"])
def test_partners_with_different_batches_are_told_in_first_step(marks: dict[str, Any]) -> None:
    for line in errors(differing, marks):
        assert re.match("DataError: .*batch", line), line
        assert "\n" not in line
