"""Directories that ``from_pretrained`` cannot read, and adapters that do not fit: one line each, before training."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import tiny
import torch
from families import bert

import echelon
from echelon.base.errors import EchelonError


def without_a_file(folder: Path) -> None:
    (folder / "model-00002-of-00006.safetensors").unlink()


def truncated(folder: Path) -> None:
    path = folder / "model-00002-of-00006.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def cut_in_its_header(folder: Path) -> None:
    path = folder / "model-00002-of-00006.safetensors"
    path.write_bytes(path.read_bytes()[:50])


def without_its_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def of_another_architecture(folder: Path) -> None:
    bert().config.save_pretrained(folder)


def of_other_sizes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))


def of_an_unknown_kind(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nothing"}))


def without_a_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def of_pickles(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def of_an_adapter(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "adapter_model.safetensors").write_bytes(b"")


DAMAGES: dict[Callable[[Path], None], str] = {
    without_a_file: "1 of the 6 files that model.safetensors.index.json names are missing: model-00002",
    truncated: "model-00002-of-00006.safetensors",
    cut_in_its_header: "model-00002-of-00006.safetensors",
    without_its_index: "model.safetensors.index.json is missing; copy or download",
    of_another_architecture: "it is the model of another architecture",
    of_other_sizes: "config.json and weights must be of one model",
    of_an_unknown_kind: "is no config that transformers",
    without_a_config: "has no config.json; give the directory of a saved model",
    of_pickles: "has pickled weights only, which can run code and are not read; save",
    of_an_adapter: "holds an adapter and no model; give the directory of its base",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_directory_that_cannot_be_read_is_one_line(damage: Callable[[Path], None], tmp_path: Path) -> None:
    torch.manual_seed(0)
    tiny.llama().save_pretrained(tmp_path, max_shard_size="30KB")  # type: ignore[operator]
    damage(tmp_path)
    with pytest.raises(EchelonError) as refused:
        echelon.hf.from_pretrained(tmp_path)
    assert DAMAGES[damage] in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_no_transformers_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EchelonError, match="which is not installed; pip install transformers"):
        echelon.hf.from_pretrained(tmp_path)


def test_a_tokenizer_of_another_model_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny.llama().save_pretrained(tmp_path)  # type: ignore[operator]
    for words, fits in ((tiny.WORDS, True), (tiny.WORDS + 1, False)):
        vocabulary = {f"word{number}": number for number in range(words)}
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
        echelon.hf.from_pretrained(tmp_path)
        said = (
            "has ids up to 40, and the model 40 words; it is the tokenizer of another model" in capfd.readouterr().err
        )
        assert said is not fits


def test_an_adapter_for_other_targets_is_one_line(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    tiny.with_adapter(tiny.gpt2(), config).save_pretrained(tmp_path)
    with pytest.raises(EchelonError) as refused:
        echelon.distribute(
            llama := tiny.llama(),
            torch.optim.SGD(llama.parameters(), lr=0.1),
            strategy=echelon.Strategy(lora=echelon.Lora(weights=str(tmp_path))),
        )
    assert "c_attn" in str(refused.value)
    assert "\n" not in str(refused.value)
