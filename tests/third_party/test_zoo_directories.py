"""``hf:DIR`` in ``echelon train``, ``plan`` and ``memory``: the directory's weights, or sizes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from harness import run
from typer.testing import CliRunner
from zoo import QUIET

import echelon
from echelon.base.errors import CheckpointError, UsageError
from echelon.checkpoint.safetensors_source import SafetensorsSource
from echelon.cli.app import app
from echelon.zoo.entry import Request
from echelon.zoo.library_models import borrow
from echelon.zoo.sample import sample


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tiny.llama().save_pretrained(tmp_path / "llama", max_shard_size="30KB")  # type: ignore[operator]
    return tmp_path / "llama"


def request_for(model: Any, task: str = "language_model", **values: Any) -> Request:
    return Request({**{each.name: each.default for each in model.settings}, **values}, task)


def differences(folder: Path) -> list[str]:
    """Return the names of weights that differ from the directory's in a model that is split and sharded."""
    echelon.init()
    entry = borrow("hf", str(folder))
    model = entry.build(request_for(entry, vocab_size=30))
    assert all(parameter.is_meta for parameter in model.parameters())
    strategy = echelon.Strategy(fast=False, split=2, shard=3)
    engine = echelon.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.CrossEntropyLoss(), strategy=strategy, log=QUIET
    )
    expected = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
    found = engine.whole_state()
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def test_training_begins_with_the_weights_of_the_directory(folder: Path) -> None:
    assert run(differences, folder, ranks=4) == [[]] * 4


def test_plan_and_memory_read_sizes_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SafetensorsSource, "read", None)
    model = sample(f"hf:{folder}", {"max_seq_length": 16}, batch=2, device="meta").model
    assert all(parameter.is_meta for parameter in model.parameters())
    done = CliRunner().invoke(app, ["memory", f"hf:{folder},max_seq_length=16", "--batch", "8", "--json"])
    assert done.exit_code == 0, done.output
    assert '"parameters"' in done.output


def test_a_vocabulary_that_does_not_fit_is_one_line(folder: Path) -> None:
    entry = borrow("hf", str(folder))
    with pytest.raises(UsageError, match="has 40 words, and the data 41; encode it with the vocabulary of this model"):
        entry.build(request_for(entry, vocab_size=41))


def test_a_directory_with_pickles_alone_is_refused(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has pickled weights only"):
        borrow("hf", str(folder))
