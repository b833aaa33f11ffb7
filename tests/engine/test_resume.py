"""Work is safe: a run that is stopped and goes on ends, bit for bit, where an undisturbed one ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import errors, run
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from zoo import QUIET, TiedTransformer, token_loss

import echelon
from echelon import Checkpoint, Strategy
from echelon.checkpoint import export, latest


class Dropping(nn.Module):
    """Dropout, batch norm and a schedule: everything that has state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def data(samples: int = 50) -> TensorDataset:
    g = torch.Generator().manual_seed(9)
    return TensorDataset(torch.randn(samples, 6, generator=g), torch.randint(3, (samples,), generator=g))


def make(
    directory: str, merge: int = 1, every: int | None = None, optimizer: str = "adam"
) -> tuple[Any, Any, nn.Module]:
    echelon.init(seed=4)
    net = Dropping()
    made: torch.optim.Optimizer
    if optimizer == "adam":
        made = torch.optim.AdamW(net.parameters(), lr=0.01)
    else:
        made = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    engine = echelon.distribute(
        net,
        loss=F.cross_entropy,
        optimizer=made,
        scheduler=torch.optim.lr_scheduler.MultiStepLR(made, [5, 12], 0.3),
        strategy=Strategy(gradient_merge=merge),
        checkpoint=Checkpoint(dir=directory, every=every),
        log=QUIET,
    )
    return engine, engine.loader(data(), batch_size=4), net


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def train(directory: str, stop: int | None, **options: Any) -> dict[str, Tensor]:
    """Three epochs, or until ``stop``."""
    engine, loader, net = make(directory, **options)
    go(engine, loader, 3, stop)
    return weights(net)


def go(engine: Any, loader: Any, epochs: int, stop: int | None) -> None:
    """Train to the end; or for ``stop`` batches, save and leave."""
    batches = ((x, y) for _ in loader.epochs(epochs) for x, y in loader)
    for count, (x, y) in enumerate(batches, start=1):
        engine.step(x, y)
        if count == stop:
            engine.save(wait=True)
            return


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_resumed_training_is_bit_equal(ranks: int, optimizer: str, tmp_path: Path) -> None:
    whole = run(train, str(tmp_path / "a"), None, ranks=ranks, optimizer=optimizer)
    run(train, str(tmp_path / "b"), 9, ranks=ranks, optimizer=optimizer)
    resumed = run(train, str(tmp_path / "b"), None, ranks=ranks, optimizer=optimizer)
    for mine, expected in zip(resumed, whole, strict=True):
        for name, value in expected.items():
            assert torch.equal(mine[name], value), name


def test_resume_between_merged_steps_is_bit_equal(tmp_path: Path) -> None:
    """Nine batches, merged by four: one is waiting to be reduced when the run stops."""
    whole = run(train, str(tmp_path / "a"), None, ranks=2, merge=4)
    run(train, str(tmp_path / "b"), 9, ranks=2, merge=4)
    resumed = run(train, str(tmp_path / "b"), None, ranks=2, merge=4)
    for name, value in whole[0].items():
        assert torch.equal(resumed[0][name], value), name


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def train_plain(directory: str, stop: int | None, global_batch: int = 8, merge: int = 1) -> dict[str, Tensor]:
    """No dropout, so that any number of ranks gives the same numbers."""
    echelon.init()
    torch.manual_seed(3)
    net = Plain()
    engine = echelon.distribute(
        net,
        loss=F.cross_entropy,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
        strategy=Strategy(gradient_merge=merge),
        checkpoint=Checkpoint(dir=directory),
        log=QUIET,
    )
    loader = engine.loader(data(), batch_size=global_batch // echelon.world_size(), uneven="join")
    go(engine, loader, 2, stop)
    return weights(net)


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_resume_on_another_number_of_processes(before: int, after: int, merge: int, tmp_path: Path) -> None:
    whole = run(train_plain, str(tmp_path / "a"), None, ranks=1, merge=merge)[0]
    run(train_plain, str(tmp_path / "b"), 5, ranks=before, merge=merge)
    for resumed in run(train_plain, str(tmp_path / "b"), None, ranks=after, merge=merge):
        for name, value in whole.items():
            torch.testing.assert_close(resumed[name], value, rtol=1e-5, atol=1e-6)


def staged(directory: str, stop: int | None) -> dict[str, Tensor]:
    """The same as a pipeline, which its first batch cuts: after it is known where to go on from."""
    echelon.init(seed=4)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    echelon.annotate(net, {"": echelon.pipeline(micro_batches=2, stages=2)})
    engine = echelon.distribute(
        net,
        loss=F.cross_entropy,
        optimizer=torch.optim.AdamW(net.parameters(), lr=0.01),
        checkpoint=Checkpoint(dir=directory, every=3),
        log=QUIET,
    )
    go(engine, engine.loader(data(), batch_size=8), 2, stop)
    return engine.whole_state()


def halfway(directory: str, stop: int | None) -> dict[str, Tensor]:
    return train(directory, stop, every=3)


@pytest.mark.parametrize("how", [halfway, staged])
def test_a_damaged_checkpoint_is_passed_over_on_all_ranks(how: Any, tmp_path: Path) -> None:
    whole = run(how, str(tmp_path / "whole"), None)
    run(how, str(tmp_path / "stopped"), 8)
    newest = latest(tmp_path / "stopped")
    assert newest is not None
    (tmp_path / "stopped" / "step-00000006" / "index.json").write_text("{")
    file = newest / "rank-1.safetensors"  # which rank 0 of two replicas need not read
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for mine, other in zip(run(how, str(tmp_path / "stopped"), None), whole, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in other)


def test_when_no_checkpoint_is_whole_all_ranks_say_so(tmp_path: Path) -> None:
    run(halfway, str(tmp_path), 4)
    for index in tmp_path.glob("step-*/index.json"):
        index.write_text("{")
    for line in errors(halfway, str(tmp_path), None):
        assert "none of 2 checkpoints is whole: " in line
        assert "step-00000003" in line


def autosaving(directory: str) -> list[str]:
    engine, loader, _ = make(directory, every=4)
    for x, y in loader:
        engine.step(x, y)
    engine.close()
    return sorted(path.name for path in Path(directory).iterdir())


def test_saves_by_itself(tmp_path: Path) -> None:
    assert run(autosaving, str(tmp_path / "two"), ranks=2)[0] == ["step-00000004"]
    assert run(autosaving, str(tmp_path / "one"), ranks=1)[0] == ["step-00000004", "step-00000008", "step-00000012"]


def another_model(directory: str) -> None:
    echelon.init()
    net = nn.Linear(6, 4)
    echelon.distribute(
        net,
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        checkpoint=Checkpoint(dir=directory),
        log=QUIET,
    )


def test_a_checkpoint_of_another_model_is_one_clear_line(tmp_path: Path) -> None:
    run(train_plain, str(tmp_path), 2, ranks=1)
    (line,) = errors(another_model, str(tmp_path), ranks=1)
    assert line.startswith("CheckpointError: ")
    assert "weight" in line
    assert "\n" not in line


def save_tied(directory: str) -> dict[str, Tensor]:
    echelon.init()
    net = TiedTransformer()
    engine = echelon.distribute(net, loss=token_loss, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), log=QUIET)
    engine.step(torch.arange(14).view(2, 7), torch.arange(14).view(2, 7))
    engine.save(directory, wait=True)
    return weights(net)


def test_export_gives_a_file_that_the_plain_model_loads(tmp_path: Path) -> None:
    expected = run(save_tied, str(tmp_path / "c"), ranks=2)[0]
    found = latest(tmp_path / "c")
    assert found is not None
    export(found, tmp_path / "out.safetensors")
    loaded = load_file(tmp_path / "out.safetensors")
    TiedTransformer().load_state_dict(loaded, strict=True)
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(loaded[name], value), name


def test_saving_without_a_place_says_what_to_do() -> None:
    net = nn.Linear(1, 1)
    engine = echelon.distribute(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), log=QUIET)
    with pytest.raises(echelon.EchelonError, match="needs a directory"):
        engine.save()
