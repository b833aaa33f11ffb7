"""Adapters on a Llama: peft's own, and those of ``Strategy(lora=...)``, in every layout beside peft in one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import tiny
import torch
import transformers
from beside import ROWS
from families import LAYOUTS
from harness import run
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner
from zoo import QUIET

import echelon
from echelon import Lora, Strategy
from echelon.cli.app import app

STEPS, TARGETS = 3, ["q_proj", "v_proj", "o_proj", "down_proj"]
#: Needs eight ranks: two replicas of two stages of two parts.
ALL = {"split": 2, "stages": 2, "shard": 3}


class Paths(NamedTuple):
    base: Path
    adapter: Path


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """Write a model, and an adapter with random values for it."""
    made = Paths(*(tmp_path_factory.mktemp(name) for name in Paths._fields))
    torch.manual_seed(3)
    tiny.llama().save_pretrained(made.base, max_shard_size="30KB")  # type: ignore[operator]
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, init_lora_weights=False)
    tiny.with_adapter(base_of(made), config).save_pretrained(made.adapter)
    return made


def base_of(paths: Paths, **options: Any) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(paths.base, **options)


def peft_model(paths: Paths, adapter: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses names that version 6 of transformers will not have
        return peft.PeftModel.from_pretrained(base_of(paths, **options), adapter, is_trainable=True)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def train(paths: Paths, out: Path, kind: str, strategy: dict[str, Any]) -> list[float]:
    if kind == "peft":
        model = peft_model(paths, paths.adapter)
    else:
        model, strategy = echelon.hf.from_pretrained(paths.base), {**strategy, "lora": Lora(weights=str(paths.adapter))}
    engine = echelon.distribute(model, optimizer_of(model), strategy=Strategy(fast=False, **strategy), log=QUIET)
    rows, at = ROWS // engine.plan.replicas, engine.world.data_rank
    losses = []
    for step in range(STEPS):
        batch = {name: value[at * rows : (at + 1) * rows] for name, value in tiny.words(step).items()}
        losses.append(float(engine.step(**batch)))
    engine.save_adapter(out / "adapter")
    engine.save_pretrained(out / "merged", max_shard_size="30KB")
    engine.save(out / "checkpoints", wait=True)
    engine.close()
    return losses


def train_all(paths: Paths, out: Path, kind: str, layouts: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    echelon.init()
    return {name: train(paths, out / name, kind, strategy) for name, strategy in layouts.items()}


def alone(paths: Paths, **options: Any) -> tuple[list[float], Any]:
    """Return the losses and the model of peft in one process."""
    model, losses = peft_model(paths, paths.adapter, **options), []
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        loss = model(**tiny.words(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


def check(paths: Paths, out: Path, losses: list[float]) -> None:
    expected_losses, expected = alone(paths)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
    adapters = {name: value.detach() for name, value in peft.get_peft_model_state_dict(expected).items()}
    written = load_file(out / "adapter" / "adapter_model.safetensors")
    torch.testing.assert_close(
        written, {name: value.detach() for name, value in adapters.items()}, rtol=1e-5, atol=1e-5
    )
    read, batch = peft_model(paths, out / "adapter"), tiny.words(9)
    merged = transformers.AutoModelForCausalLM.from_pretrained(out / "merged")
    assert type(merged) is transformers.LlamaForCausalLM
    logits = expected.eval()(**batch).logits
    for model in (read.eval(), merged.eval()):
        torch.testing.assert_close(model(**batch).logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["peft", "strategy"])
def test_adapters_of_every_layout_equal_one_process(kind: str, paths: Paths, tmp_path: Path) -> None:
    for ranks, layouts in ((4, LAYOUTS), (8, {"all": ALL})):
        results = run(train_all, paths, tmp_path, kind, layouts, ranks=ranks)
        for layout in layouts:
            for losses in results:
                check(paths, tmp_path / layout, losses[layout])


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def test_a_checkpoint_with_adapters_is_exported_merged(paths: Paths, tmp_path: Path) -> None:
    run(train_all, paths, tmp_path, "strategy", {"shard 3": {"shard": 3}}, ranks=2)
    out = tmp_path / "exported"
    words = [
        "export",
        str(tmp_path / "shard 3" / "checkpoints"),
        str(out),
        "--format",
        "hf",
        "--config",
        str(paths.base),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    torch.testing.assert_close(weights_of(out), weights_of(tmp_path / "shard 3" / "merged"), rtol=0, atol=0)


def train_in_bf16(paths: Paths, layouts: dict[str, dict[str, Any]]) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    echelon.init()
    found = {}
    for name, strategy in layouts.items():
        model = echelon.hf.from_pretrained(paths.base)
        lora = Lora(weights=str(paths.adapter), base_dtype="bf16")
        options = Strategy(fast=False, lora=lora, **strategy)
        engine = echelon.distribute(model, optimizer_of(model), strategy=options, log=QUIET)
        rows, at, losses = ROWS // engine.plan.replicas, engine.world.data_rank, []
        for step in range(STEPS):
            batch = {name: value[at * rows : (at + 1) * rows] for name, value in tiny.words(step).items()}
            losses.append(float(engine.step(**batch)))
        found[name] = losses, engine.whole_state()
        engine.close()
    return found


def test_a_base_in_bf16_stays_as_it_is_in_every_layout(paths: Paths) -> None:
    expected_losses, _ = alone(paths, dtype=torch.bfloat16)
    base = base_of(paths, dtype=torch.bfloat16).state_dict()
    for name, (losses, state) in run(train_in_bf16, paths, LAYOUTS, ranks=4)[0].items():
        torch.testing.assert_close(losses, expected_losses, rtol=1e-2, atol=1e-2, msg=name)
        assert all(torch.equal(state[key], value) and state[key].dtype == value.dtype for key, value in base.items())
        assert all(value.dtype == torch.float32 for key, value in state.items() if "lora_" in key)
