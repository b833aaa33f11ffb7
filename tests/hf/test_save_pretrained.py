"""The directory of a model from ranks of any layout: whole, equal to the weights, and never half of it after a kill."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Died, errors, run, run_raw
from safetensors.torch import load_file
from torch import Tensor, nn

import echelon
from echelon import Strategy, pipeline, split, stage
from echelon.base.errors import CheckpointError, UsageError
from echelon.checkpoint import directory_swap, tensorfile

QUIET = echelon.Log(console=False)


class TiedNet(nn.Module):
    """An embedding that is the output layer too, layers to split, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12)) for _ in range(2))
        self.head = nn.Linear(12, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.arange(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


LAYOUTS: dict[str, tuple[Mapping[str, Any], Strategy]] = {
    "replicas": ({}, Strategy(fast=False)),
    "shard 3": ({}, Strategy(fast=False, shard=3)),
    "split": ({"blocks.*.0": split("column"), "blocks.*.2": split("row")}, Strategy(fast=False)),
    "split x shard 3": ({"blocks.*.0": split("column"), "blocks.*.2": split("row")}, Strategy(fast=False, shard=3)),
    "stages": (
        {"": pipeline(micro_batches=2), "embedding": stage(0), "blocks.0": stage(0), "blocks.1": stage(1)}
        | {"head": stage(1)},
        Strategy(fast=False),
    ),
}  # fmt: skip


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def make_engine(layout: str) -> echelon.Engine:
    echelon.init()
    torch.manual_seed(0)
    model = TiedNet()
    marks, strategy = LAYOUTS[layout]
    if marks:
        echelon.annotate(model, marks)
    tokens = torch.randint(20, (8, 4), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (tokens, tokens)
    engine = echelon.distribute(model, optimizer, token_loss, strategy=strategy, sample=batch, log=QUIET)
    engine.step(*batch)
    return engine


def read_directory(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(weight_map.values())}
    assert {file.name for file in folder.glob("*.safetensors")} == set(files)
    return {name: files[file][name] for name, file in weight_map.items()}


def save_and_compare(layout: str, folder: Path) -> None:
    engine = make_engine(layout)
    state = engine.whole_state()
    del state["head.weight"]  # the second name of the embedding
    assert engine.save_pretrained(folder / "small", max_shard_size="1 KB") == folder / "small"
    engine.save_pretrained(folder / "one", dtype="bfloat16")
    if echelon.rank() == 0:
        small, one = read_directory(folder / "small"), read_directory(folder / "one")
        assert small.keys() == one.keys() == state.keys()
        assert len(list((folder / "small").glob("model-*-of-*.safetensors"))) > 3
        for name, value in state.items():
            assert torch.equal(small[name], value), name
            assert torch.equal(one[name], value.bfloat16() if value.is_floating_point() else value), name
    engine.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_hold_the_weights_of_any_layout(layout: str, tmp_path: Path) -> None:
    run(save_and_compare, layout, tmp_path, ranks=4 if "x" in layout else 2)


def save_twice_and_die(folder: Path, rank: int, place: str) -> None:
    """Save, and let one rank be killed in the next save: while it writes, or after the directory has its name."""
    engine = make_engine("shard 3")
    engine.save_pretrained(folder, max_shard_size="1 KB")
    (folder / "notes.txt").write_text("kept")
    tokens = torch.zeros(8, 4, dtype=torch.long)
    engine.step(tokens, tokens)
    if echelon.rank() == rank:
        module: Any = tensorfile if place == "write" else directory_swap
        former, calls = getattr(module, place), []

        def die(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            if len(calls) == 1 and place == "remove_tree":
                os.kill(os.getpid(), signal.SIGKILL)
            if len(calls) == 2:
                args[0].write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
            return former(*args, **kwargs)

        setattr(module, place, die)
    engine.save_pretrained(folder, max_shard_size="1 KB")


@pytest.mark.parametrize(("rank", "place"), [(0, "write"), (0, "remove_tree")])
def test_kill_in_a_save_leaves_a_whole_directory(rank: int, place: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    ended = run_raw(save_twice_and_die, folder, rank, place, ranks=2)
    assert isinstance(ended[rank], Died)
    assert set(read_directory(folder)) == {
        "embedding.weight",
        "steps",
        *(f"blocks.{i}.{j}.{kind}" for i in range(2) for j in (0, 2) for kind in ("weight", "bias")),
    }
    assert (folder / "notes.txt").read_text() == "kept"
    assert len(list(tmp_path.iterdir())) == 2  # with what the killed save left
    run(save_and_compare, "replicas", tmp_path, ranks=1)
    run(save_again, folder, ranks=1)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "small", "one"}


def save_again(folder: Path) -> None:
    engine = make_engine("replicas")
    engine.save_pretrained(folder)
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "notes.txt"}
    engine.close()


def save_to_full_disk(folder: Path) -> None:
    engine = make_engine("shard 3")
    former = tensorfile.write

    def write(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name.startswith("model-00002"):  # a file of rank 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return former(path, *args, **kwargs)

    tensorfile.write = write
    engine.save_pretrained(folder, max_shard_size="1 KB")


def test_full_disk_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    lines = errors(save_to_full_disk, tmp_path / "model", ranks=2)
    assert len(set(lines)) == 1
    assert "rank 1: cannot write" in lines[0]
    assert "No space left on device; free some space" in lines[0]
    assert list(tmp_path.iterdir()) == []


def refuse_mistakes(folder: Path) -> None:
    engine = make_engine("replicas")
    (folder / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file; give a directory"):
        engine.save_pretrained(folder / "file")
    with pytest.raises(UsageError, match="max_shard_size: 'much' is no quantity in bytes"):
        engine.save_pretrained(folder / "model", max_shard_size="much")
    with pytest.raises(UsageError, match="dtype=int8 is no dtype of weights"):
        engine.save_pretrained(folder / "model", dtype="int8")
    checkpoint = engine.save(folder / "checkpoints", wait=True)
    engine.close()
    export_checkpoint(checkpoint, folder / "exported")


def export_checkpoint(checkpoint: Path, out: Path) -> None:
    from typer.testing import CliRunner

    from echelon.cli.app import app

    done = CliRunner().invoke(app, ["export", str(checkpoint), str(out), "--format", "hf", "--max-shard-size", "1 KB"])
    assert done.exit_code == 0, done.output
    found, expected = read_directory(out), load_file(checkpoint / "rank-0.safetensors")
    assert len(found) == 10
    for name, value in found.items():
        assert torch.equal(value, expected[f"model.{name}"])


def test_mistakes_are_one_line_and_checkpoints_export(tmp_path: Path) -> None:
    run(refuse_mistakes, tmp_path, ranks=1)


def test_missing_transformers_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="needs the library transformers, which is not installed; pip install transf"):
        echelon.hf.from_pretrained(tmp_path)
