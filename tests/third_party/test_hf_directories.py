"""Directories of transformers: read by region, trained under a layout, and written so that the library reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from beside import ROWS
from families import FAMILIES, LAYOUTS, Family
from harness import run
from peft import LoraConfig
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon import Strategy

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def qwen2_moe() -> nn.Module:
    config = transformers.Qwen2MoeConfig(
        **tiny.DECODER, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )  # fmt: skip
    return transformers.Qwen2MoeForCausalLM(config)


MODELS = {
    **FAMILIES,
    "Qwen2-MoE": Family(qwen2_moe, tiny.words),
    "Wav2Vec2": Family(tiny.wav2vec2, tiny.waves),
}


def saved(name: str, folder: Path, **options: Any) -> Path:
    """Save a random model of a family; its norms and biases differ from their initial values."""
    torch.manual_seed(0)
    model = MODELS[name].make()
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


def round_trip(sources: Mapping[str, Path], layout: str) -> None:
    echelon.init()
    for name, source in sources.items():
        model, batch = echelon.hf.from_pretrained(source), MODELS[name].batches(0)
        assert all(parameter.is_meta for parameter in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = Strategy(fast=False, **LAYOUTS[layout])
        engine = echelon.distribute(model, optimizer, strategy=strategy, sample=batch, log=QUIET)
        target = source.with_name(f"{source.name} saved")
        engine.save_pretrained(target, max_shard_size="20 KB")
        rows, at = ROWS // engine.plan.replicas, engine.world.data_rank
        engine.step(**{key: value[at * rows : (at + 1) * rows] for key, value in batch.items()})
        engine.save_pretrained(source.with_name(f"{source.name} trained"))
        engine.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_of_every_family_is_bit_equal(layout: str, tmp_path: Path) -> None:
    """The directory before a step is the one that was read; after a step it has the weights of one process."""
    sources = {name: saved(name, tmp_path / name, max_shard_size="30KB") for name in MODELS}
    run(round_trip, sources, layout, ranks=4)
    for name, source in sources.items():
        target = tmp_path / f"{name} saved"
        compare_directories(source, target)
        kind = getattr(transformers, json.loads((target / "config.json").read_text())["architectures"][0])
        found, expected = (kind.from_pretrained(folder) for folder in (target, source))
        batch = MODELS[name].batches(0)
        assert torch.equal(found(**batch).logits, expected(**batch).logits), name
        optimizer = torch.optim.SGD(expected.train().parameters(), lr=0.1)
        expected(**batch).loss.backward()
        optimizer.step()
        trained = kind.from_pretrained(tmp_path / f"{name} trained")
        torch.testing.assert_close(dict(trained.state_dict()), dict(expected.state_dict()), rtol=1e-5, atol=1e-6)


def compare_directories(source: Path, target: Path) -> None:
    before, after = weights_of(source), weights_of(target)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys()
    files = {path.name for path in target.iterdir()}
    shards = {name for name in files if name.startswith("model")}
    assert shards == {*index["weight_map"].values(), "model.safetensors.index.json"}
    assert files - shards == {path.name for path in source.iterdir() if not path.name.startswith("model")}
    assert (target / "tokenizer.json").read_text() == "{}"
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (target, source))
    assert ours == theirs


ADAPTER = LoraConfig(r=2, target_modules=["q_proj"])


def weights_read_inside_of_deferred(source: Path) -> list[dict[str, Tensor]]:
    """Return the first weights of a model that a function reads, and of one that peft adapts before it is read."""
    echelon.init()

    def adapted() -> nn.Module:
        torch.manual_seed(1)
        return tiny.with_adapter(echelon.hf.from_pretrained(source), ADAPTER)

    found = []
    for make in (lambda: echelon.hf.from_pretrained(source), adapted):
        engine = echelon.distribute(
            make,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            strategy=Strategy(shard=3),
            log=QUIET,
        )
        found.append(engine.whole_state())
        engine.close()
    return found


def test_weights_read_inside_of_deferred_are_those_of_the_files(tmp_path: Path) -> None:
    source = saved("Llama", tmp_path)
    plain = transformers.LlamaForCausalLM.from_pretrained(source)
    torch.manual_seed(1)
    adapted = tiny.with_adapter(transformers.LlamaForCausalLM.from_pretrained(source), ADAPTER)
    for found in run(weights_read_inside_of_deferred, source):
        for state, expected in zip(found, (plain, adapted), strict=True):
            torch.testing.assert_close(state, dict(expected.state_dict()), rtol=0, atol=0)
