"""Finetuning begins with exactly the weights of the file, and what does not fit is said or refused in one line."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import echelon
from echelon.base.errors import CheckpointError, EchelonError, UsageError
from echelon.zoo.entry import Request
from echelon.zoo.models.bert import BertClassifier, BertPretraining, BertSizes
from echelon.zoo.train.parameters import PARAMETERS
from echelon.zoo.train.restore import check_vocabulary, read_weights, restore, sizes

SIZES = BertSizes(
    vocabulary=20,
    positions=8,
    segments=2,
    hidden=8,
    layers=2,
    heads=2,
    inner=16,
    dropout=0.0,
    attention_dropout=0.0,
    norm_eps=1e-12,
    masked=True,
)


class Net(nn.Module):
    def __init__(self, classes: int = 5, hidden: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(4, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.stem(x)))
        return out


def request(directory: Path | None, file: str | None, **values: Any) -> Request:
    given = {"model_dir": directory and str(directory), "ckpt_file_name": file, "task_type": "finetune"}
    return Request(
        {one.name: one.default for one in PARAMETERS} | {"model_name": "lenet", **given, **values}, "classify_images"
    )


def one_line(error: type[EchelonError], call: Any, *args: Any) -> str:
    with pytest.raises(error) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def trained() -> Net:
    torch.manual_seed(1)
    net = Net()
    for _ in range(3):
        net(torch.randn(8, 4))  # so that the statistics are not those of a new one
    return net.eval()


X = torch.linspace(-1, 1, 12).view(3, 4)

# ---- every kind of file ----


def halves(state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    names = list(state)
    return [{name: state[name] for name in part} for part in (names[:3], names[3:])]


def write_set(folder: Path, state: dict[str, Tensor], save: Any, stem: str, end: str) -> str:
    places = {}
    for at, part in enumerate(halves(state), 1):
        file = f"{stem}-0000{at}-of-00002.{end}"
        save(part, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / f"{stem}.{end}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return f"{stem}.{end}"  # as if it were one file: the index is found


def write(kind: str, folder: Path, net: Net) -> str:
    state = net.state_dict()
    wrapped = {f"module.{name}": value for name, value in state.items()}
    if kind == "ours":
        engine = echelon.distribute(
            net, loss=F.mse_loss, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), log=echelon.Log(console=False)
        )
        engine.save(folder / "checkpoints", wait=True)
        engine.close()
        return "checkpoints"
    if kind == "set":
        return write_set(folder, state, save_file, "model", "safetensors")
    if kind == "torch set":
        return write_set(folder, state, torch.save, "pytorch_model", "bin")
    if kind == "safetensors":
        save_file(state, folder / "model.safetensors")
        return "model.safetensors"
    content: Any = {
        "plain": state,
        "old": state,
        "state_dict": {"state_dict": wrapped, "epoch": 3, "optimizer": {"state": {}}},
        "nested": {"model": {"module": {f"_orig_mod.{name}": value for name, value in wrapped.items()}}},
    }[kind]
    torch.save(content, folder / "w.pth", _use_new_zipfile_serialization=kind != "old")
    return "w.pth"


@pytest.mark.parametrize("kind", ["ours", "plain", "old", "state_dict", "nested", "safetensors", "set", "torch set"])
def test_outputs_are_those_of_the_model_that_was_saved(kind: str, trained: Net, tmp_path: Path) -> None:
    expected = trained(X)
    file = write(kind, tmp_path, trained)
    net = Net()
    found = restore(net, read_weights(request(tmp_path, file)))
    assert torch.equal(net.eval()(X), expected)
    assert (len(found.taken), found.remade, found.missing, found.unused) == (9, {}, [], [])


def test_half_precision_weights_are_taken_as_they_are(trained: Net, tmp_path: Path) -> None:
    torch.save({name: value.half() for name, value in trained.state_dict().items()}, tmp_path / "w.pt")
    net = Net()
    restore(net, read_weights(request(tmp_path, "w.pt")))
    assert net.stem.weight.dtype is torch.float32
    assert torch.equal(net.stem.weight, trained.stem.weight.half().float())


# ---- heads, and what does not fit ----


def test_a_head_of_another_size_is_made_anew_and_said_so(trained: Net) -> None:
    net = Net(classes=2)
    fresh = net.head.weight.clone()
    found = restore(net, trained.state_dict())
    assert torch.equal(net.head.weight, fresh)
    assert torch.equal(net.stem.weight, trained.stem.weight)
    assert "head.weight: the checkpoint has 5 classes, this run 2; it is initialized" in found.lines()
    assert list(found.remade) == ["head.weight", "head.bias"]


def test_restore_of_another_size_is_refused_and_changes_nothing(trained: Net) -> None:
    """A tensor of another size outside the head is refused, and the model is not changed."""
    net = Net(hidden=7)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    line = one_line(CheckpointError, restore, net, trained.state_dict())
    assert line.startswith("'stem.weight' is [6, 4] in the checkpoint and [7, 4] in this model")
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_weights_of_another_model_are_refused(trained: Net) -> None:
    assert "is of another model" in one_line(CheckpointError, restore, Net(), {"conv.weight": torch.zeros(3)})
    little = {"stem.bias": trained.stem.bias.detach(), "head.weight": trained.head.weight.detach()}
    assert "lacks 6 of the model's 7 weights: stem.weight," in one_line(CheckpointError, restore, Net(), little)


def test_a_tied_weight_that_is_stored_once_is_not_missing() -> None:
    net = BertPretraining(SIZES)
    state = dict(net.state_dict())
    del state["guess.words.weight"]
    found = restore(BertPretraining(SIZES), state)
    assert found.missing == []


# ---- BERT of others ----


def their_bert(net: BertPretraining) -> dict[str, Tensor]:
    """The names of Hugging Face, written out independently of how we read them."""
    theirs: dict[str, Tensor] = {}
    ends = ("weight", "bias")
    state = net.state_dict()
    for ours, name in (("words", "word"), ("positions", "position"), ("segments", "token_type")):
        theirs[f"bert.embeddings.{name}_embeddings.weight"] = state[f"embeddings.{ours}.weight"]
    for end in ends:
        theirs[f"bert.embeddings.LayerNorm.{end}"] = state[f"embeddings.norm.{end}"]
        theirs[f"bert.pooler.dense.{end}"] = state[f"pooler.{end}"]
        theirs[f"cls.predictions.transform.dense.{end}"] = state[f"guess.transform.{end}"]
        theirs[f"cls.predictions.transform.LayerNorm.{end}"] = state[f"guess.norm.{end}"]
        theirs[f"cls.seq_relationship.{end}"] = state[f"next_sentence.{end}"]
    theirs["cls.predictions.bias"] = state["guess.words.bias"]
    for layer in range(SIZES.layers):
        at, there = f"layers.{layer}", f"bert.encoder.layer.{layer}"
        for end in ends:
            by_head = state[f"{at}.attention.qkv.{end}"].unflatten(0, (SIZES.heads, 3, -1))
            for place, name in enumerate(("query", "key", "value")):
                theirs[f"{there}.attention.self.{name}.{end}"] = by_head[:, place].flatten(0, 1).contiguous()
            theirs[f"{there}.attention.output.dense.{end}"] = state[f"{at}.attention.project.{end}"]
            theirs[f"{there}.attention.output.LayerNorm.{end}"] = state[f"{at}.norm1.{end}"]
            theirs[f"{there}.intermediate.dense.{end}"] = state[f"{at}.mlp.0.{end}"]
            theirs[f"{there}.output.dense.{end}"] = state[f"{at}.mlp.2.{end}"]
            theirs[f"{there}.output.LayerNorm.{end}"] = state[f"{at}.norm2.{end}"]
    return theirs


def test_a_bert_of_hugging_face_classifies_with_its_own_features(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pretrained, classifier = BertPretraining(SIZES), BertClassifier(SIZES, 3)
    torch.save(their_bert(pretrained), tmp_path / "pytorch_model.bin")
    weights = read_weights(request(tmp_path, "pytorch_model.bin", model_name="bert_tiny", num_heads=2))
    found = restore(classifier, weights)
    assert found.missing == ["head.weight", "head.bias"]
    assert {name.split(".")[0] for name in found.unused} == {"guess", "next_sentence"}
    tokens = torch.arange(8).view(1, 8)
    batch = (tokens, torch.zeros_like(tokens), torch.ones_like(tokens))
    assert torch.equal(classifier.encode(*batch), pretrained.encode(*batch))


CONFIG = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20, "model_type": "bert"}


def config(directory: Path, content: Any, model: str = "bert_tiny") -> Request:
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / "config.json").write_text(text)
    return request(directory, None, model_config_file_name="config.json", model_name=model)


def test_sizes_come_from_the_config_beside_the_weights(tmp_path: Path) -> None:
    theirs = {"hidden_size": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 20}
    assert sizes(config(tmp_path, CONFIG)) == theirs
    assert sizes(config(tmp_path, {"model_name": "bert_tiny", "num_layers": 3})) == {"num_layers": 3}
    assert sizes(request(None, None)) == {}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds list"),
        ({"num_layer": 3}, "bert_tiny has no setting 'num_layer'; did you mean 'num_layers'?"),
        ({"num_layers": "3"}, "num_layers is '3'; expected int"),
        ({"model_name": "lenet"}, "is of model 'lenet', and --model_name is 'bert_tiny'"),
    ],
)
def test_a_config_that_cannot_be_is_refused(content: Any, line: str, tmp_path: Path) -> None:
    assert line in one_line(UsageError, sizes, config(tmp_path, content))


def test_a_vocabulary_of_another_size_is_refused() -> None:
    weights = {"embeddings.words.weight": torch.zeros(30, 8)}
    asked = request(None, None, vocab_size=20)
    line = one_line(CheckpointError, check_vocabulary, BertClassifier(SIZES, 2), weights, asked)
    assert line.startswith("the vocabulary has 20 entries, and the checkpoint's 'embeddings.words' 30 rows")
    check_vocabulary(BertClassifier(SIZES, 2), {"embeddings.words.weight": torch.zeros(20, 8)}, asked)


# ---- files that cannot be used ----


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_file_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(2)}, "x": Harmful(tmp_path / "harmed")}, tmp_path / "w.pt")
    line = one_line(CheckpointError, read_weights, request(tmp_path, "w.pt"))
    assert "holds a Python object (posix.mkdir)" in line
    assert not (tmp_path / "harmed").exists()
    torch.save({"model": {}, "args": argparse.Namespace(lr=1)}, tmp_path / "w.pt")
    assert "(argparse.Namespace)" in one_line(CheckpointError, read_weights, request(tmp_path, "w.pt"))


@pytest.mark.parametrize("kind", ["plain", "old", "safetensors", "set", "ours"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_a_truncated_file_is_refused(kind: str, part: float, trained: Net, tmp_path: Path) -> None:
    file = write(kind, tmp_path, trained)
    for path in tmp_path.rglob("*"):
        if path.suffix in (".pth", ".safetensors"):
            path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    line = one_line(CheckpointError, read_weights, request(tmp_path, file))
    assert "truncated" in line


def test_missing_files_are_named_with_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    (tmp_path / "vocab.txt").touch()
    for directory, file, line in (
        (None, None, "--task_type finetune needs --model_dir"),
        (tmp_path, None, f"--task_type finetune needs --ckpt_file_name; '{tmp_path}' holds model.bin, vocab.txt"),
        (tmp_path, "model.pt", f"there is no 'model.pt' in '{tmp_path}'; it holds model.bin, vocab.txt"),
        (tmp_path / "none", "w.pt", "does not exist"),
        (tmp_path / "vocab.txt", "w.pt", "is a file, not a folder"),
    ):
        assert line in one_line(UsageError, read_weights, request(directory, file))


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("w.pt", [1, 2], "holds list; it must hold weights by name"),
        ("w.pt", {"epoch": 3}, "holds no weights, but 'epoch'"),
        ("vocab.txt", None, "is no file of weights that can be read; give .safetensors"),
        ("m.index.json", {"weight_map": {"w": "../outside.pt"}}, "it may only name files of weights beside it"),
        ("m.index.json", {"weight_map": {"w": "m.index.json"}}, "it may only name files of weights beside it"),
        ("m.index.json", {"weight_map": {"w": "gone.pt"}}, "and it is not there; copy the whole set"),
        ("m.index.json", {"weight_map": {"w": "v.pt"}}, "names 'w', but 'v.pt' does not hold it"),
        ("m.index.json", {"weight_map": [1]}, "is no index of weights"),
        ("m.index.json", [1], "is no index of weights"),
    ],
)
def test_a_file_of_something_else_is_refused(name: str, content: Any, line: str, tmp_path: Path) -> None:
    torch.save({"v": torch.zeros(1)}, tmp_path / "v.pt")
    if name.endswith(".pt"):
        torch.save(content, tmp_path / name)
    else:
        (tmp_path / name).write_text(json.dumps(content))
    assert line in one_line(CheckpointError, read_weights, request(tmp_path, name))
