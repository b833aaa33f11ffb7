"""Models whose weights stay in files until ranks read their parts, and models that are saved with adapters merged."""

from __future__ import annotations

from pathlib import Path

import torch
from harness import run
from test_save_pretrained import LAYOUTS, QUIET, TiedNet, read_directory, token_loss
from typer.testing import CliRunner

import echelon
from echelon import Lora, Strategy
from echelon.checkpoint.region_tensor import region_tensors
from echelon.checkpoint.weight_source import MappedWeights
from echelon.cli.app import app
from echelon.construction.weight_recipe import stored_parameter

NAMES = ("replicas", "shard 3", "split x shard 3", "stages")


def unread_net() -> tuple[TiedNet, dict[str, torch.Tensor]]:
    """Return a model whose parameters are on meta, and the values that they are to get."""
    torch.manual_seed(5)
    values = {name: value.clone() for name, value in TiedNet().state_dict().items()}
    tensors, model = region_tensors(MappedWeights(values)), TiedNet()
    for name, tensor in tensors.items():
        module, _, key = name.rpartition(".")
        if model.get_submodule(module)._parameters.get(key) is not None:
            model.get_submodule(module)._parameters[key] = stored_parameter(tensor, requires_grad=True)
    model.head.weight = model.embedding.weight
    return model, values


def weights_after_start() -> list[str]:
    echelon.init()
    different = []
    tokens = torch.zeros(8, 4, dtype=torch.long)
    for layout in NAMES:
        model, expected = unread_net()
        marks, strategy = LAYOUTS[layout]
        echelon.annotate(model, marks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = echelon.distribute(model, optimizer, token_loss, strategy=strategy, sample=(tokens, tokens), log=QUIET)
        found = engine.whole_state()
        assert found.keys() == expected.keys()
        different += [f"{layout}: {name}" for name, value in expected.items() if not torch.equal(found[name], value)]
        engine.step(tokens, tokens)
        engine.close()
    return different


def test_weights_that_are_read_late_are_those_of_the_files() -> None:
    assert run(weights_after_start, ranks=4) == [[]] * 4


def save_adapted(folder: Path) -> None:
    echelon.init()
    torch.manual_seed(0)
    model = echelon.annotate(TiedNet(), LAYOUTS["split x shard 3"][0])
    tokens = torch.randint(20, (8, 4), generator=torch.Generator().manual_seed(1))
    strategy = Strategy(fast=False, shard=3, lora=Lora(rank=2, alpha=6, targets=r"blocks\.\d\.[02]"))
    engine = echelon.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.5), token_loss, strategy=strategy, log=QUIET
    )
    for _ in range(2):
        engine.step(tokens, tokens)
    engine.save_pretrained(folder / "merged", max_shard_size="1 KB")
    engine.save(folder / "checkpoints", wait=True)
    state = engine.whole_state()
    engine.close()
    if echelon.rank() > 0:
        return
    out = CliRunner().invoke(app, ["export", str(folder / "checkpoints"), str(folder / "exported"), "--format", "hf"])
    assert out.exit_code == 0, out.output
    for written in (read_directory(folder / "merged"), read_directory(folder / "exported")):
        assert written.keys() == TiedNet().state_dict().keys() - {"head.weight"}
        for block in ("blocks.0", "blocks.1"):
            for layer in (f"{block}.0", f"{block}.2"):
                product = 3 * state[f"{layer}.lora_B.weight"] @ state[f"{layer}.lora_A.weight"]
                assert product.abs().max() > 1e-4
                torch.testing.assert_close(written[f"{layer}.weight"], state[f"{layer}.weight"] + product)
                assert torch.equal(written[f"{layer}.bias"], state[f"{layer}.bias"])


def test_adapters_are_merged_into_the_saved_model(tmp_path: Path) -> None:
    run(save_adapted, tmp_path, ranks=4)
