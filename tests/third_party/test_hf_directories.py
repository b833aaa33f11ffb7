"""Directories of transformers: read by region, trained under a layout, and written so that the library reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from harness import run
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon import Strategy, pipeline, split, stage

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=tiny.WORDS, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def qwen2_moe() -> nn.Module:
    config = transformers.Qwen2MoeConfig(
        **tiny.DECODER, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )  # fmt: skip
    return transformers.Qwen2MoeForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": tiny.llama,
    "gpt2": tiny.gpt2,
    "bert": bert,
    "t5": tiny.t5,
    "mixtral": tiny.mixtral,
    "qwen2_moe": qwen2_moe,
    "wav2vec2": tiny.wav2vec2,
}


def saved(name: str, folder: Path, **options: Any) -> Path:
    """Save a random model of a family; its norms and biases differ from their initial values."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 50)
    model.save_pretrained(folder, **options)  # type: ignore[operator]
    (folder / "tokenizer.json").write_text("{}")
    return folder


def weights_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("name", MODELS)
def test_model_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path, max_shard_size="20KB")
    found = echelon.hf.from_pretrained(folder, deferred=False)
    expected = type(found).from_pretrained(folder)  # type: ignore[attr-defined]
    assert found.training
    assert dict(found.state_dict()).keys() == expected.state_dict().keys()
    for (key, value), other in zip(found.state_dict().items(), expected.state_dict().values(), strict=True):
        assert type(value) is Tensor
        assert torch.equal(value, other), key
    for (key, value), other in zip(found.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(value, other), key
    assert [p.requires_grad for p in found.parameters()] == [p.requires_grad for p in expected.parameters()]


LAYOUTS: dict[str, tuple[Mapping[str, Any], Strategy]] = {
    "shard 3": ({}, Strategy(fast=False, shard=3)),
    "split 2 x shard 3": (
        {f"*.{name}": split("column") for name in ("q_proj", "k_proj", "v_proj")} | {"*.o_proj": split("row")},
        Strategy(fast=False, shard=3),
    ),
    "stages 2": (
        {
            "": pipeline(micro_batches=2),
            "model.layers.0-1": stage(0),
            "model.layers.2-3": stage(1),
            "lm_head": stage(1),
        },
        Strategy(fast=False),
    ),
}


def round_trip(source: Path, target: Path, layout: str) -> None:
    echelon.init()
    model = echelon.hf.from_pretrained(source)
    marks, strategy = LAYOUTS[layout]
    if marks:
        echelon.annotate(model, marks)
    batch = tiny.words(0)
    engine = echelon.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy, sample=batch, log=QUIET
    )
    engine.save_pretrained(target, max_shard_size="20 KB")
    engine.step(**batch)
    engine.save_pretrained(target.with_name("trained"))
    engine.close()


@pytest.mark.parametrize(
    ("name", "layout", "ranks"),
    [
        ("llama", "split 2 x shard 3", 4),
        ("llama", "stages 2", 2),
        ("gpt2", "shard 3", 2),
        ("mixtral", "shard 3", 2),
        ("bert", "shard 3", 3),
        ("t5", "shard 3", 2),
    ],
)
def test_round_trip_is_bit_equal(name: str, layout: str, ranks: int, tmp_path: Path) -> None:
    source, target = saved(name, tmp_path / "source", max_shard_size="30KB"), tmp_path / "target"
    run(round_trip, source, target, layout, ranks=ranks)
    before, after = weights_of(source), weights_of(target)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert (target / "tokenizer.json").read_text() == "{}"
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (target, source))
    assert ours == theirs
    assert (target / "generation_config.json").exists() == (source / "generation_config.json").exists()
    trained = getattr(transformers, ours["architectures"][0]).from_pretrained(tmp_path / "trained")
    expected = getattr(transformers, ours["architectures"][0]).from_pretrained(source).train()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    expected(**tiny.words(0)).loss.backward()
    optimizer.step()
    torch.testing.assert_close(dict(trained.state_dict()), dict(expected.state_dict()), rtol=1e-5, atol=1e-6)
