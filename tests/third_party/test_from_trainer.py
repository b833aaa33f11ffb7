"""The two scripts of docs/from_trainer.md give the same losses: Trainer on one process, the port on one and two."""

from __future__ import annotations

import contextlib
import io
import os
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from harness import run
from tiny import DECODER, WORDS

PAGE = Path(__file__).parents[2] / "docs" / "from_trainer.md"


def given() -> dict[str, Any]:
    """Model and rows with which both scripts begin: 22 rows, so that an epoch ends with a batch of two."""
    transformers.set_seed(0)
    lengths = np.random.default_rng(0).integers(3, 12, size=22)
    g = torch.Generator().manual_seed(1)
    rows = [{"input_ids": torch.randint(3, WORDS, (int(n),), generator=g).tolist()} for n in lengths]
    return {"model": transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)), "rows": rows}


def blocks() -> list[str]:
    return re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)


def by_trainer(directory: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    os.chdir(directory)
    names = given()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # torch warns of pinned memory without a GPU
        exec(blocks()[0], names)
    losses = [line["loss"] for line in names["trainer"].state.log_history if "loss" in line]
    return losses, {name: value.detach().clone() for name, value in names["model"].state_dict().items()}


def by_port(directory: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    os.chdir(directory)
    names = given()
    exec(blocks()[0].partition("arguments =")[0], names)  # collate
    exec(blocks()[1], names)
    state = names["engine"].whole_state()
    names["engine"].close()
    return names["losses"][1::2], state  # the loss of an update is returned by its last call


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_port_has_the_losses_and_weights_of_trainer(ranks: int, tmp_path: Path) -> None:
    ((expected, weights),) = run(by_trainer, str(tmp_path), ranks=1)
    assert len(expected) == 6
    for losses, state in run(by_port, str(tmp_path), ranks=ranks):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=2e-6, msg=name)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs/ported/model")
    torch.testing.assert_close(loaded.lm_head.weight.detach(), weights["lm_head.weight"], rtol=1e-5, atol=2e-6)
