"""``save_pretrained`` of a model of which ranks hold parts."""

from __future__ import annotations

import tempfile
from typing import Any

import peft
import pytest
import torch
import transformers
from diffusers.training_utils import EMAModel
from harness import run
from torch import nn
from zoo import QUIET

import echelon
from echelon import Strategy, pipeline, split, stage
from echelon.base.errors import UsageError

MARKS: dict[str, dict[str, Any]] = {
    "split": {f"*.{name}": split("column") for name in ("q_proj", "k_proj", "v_proj")} | {"*.o_proj": split("row")},
    "pipeline": {
        "": pipeline(micro_batches=2),
        "model.layers.0": stage(0),
        "model.layers.1": stage(1),
        "lm_head": stage(1),
    },
    "shard 3": {},
}


def _llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, max_position_embeddings=32, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _trained(model: nn.Module, layout: str) -> echelon.Engine:
    echelon.annotate(model, MARKS[layout])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    strategy = Strategy(fast=False, shard=3 if layout == "shard 3" else None)
    engine = echelon.distribute(model, optimizer=optimizer, strategy=strategy, log=QUIET)
    engine.ema(0.9)
    tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(1))
    engine.step(input_ids=tokens, labels=tokens)
    return engine


def save_layouts() -> dict[str, str]:
    echelon.init()
    said: dict[str, str] = {}
    for layout in MARKS:
        model = _llama()
        theirs = EMAModel(model.parameters(), decay=0.9)
        engine = _trained(model, layout)
        with tempfile.TemporaryDirectory() as place, pytest.raises(UsageError) as refused:
            model.save_pretrained(place)
        said[layout] = str(refused.value)
        with pytest.raises(UsageError, match=r"EMAModel.step.*use engine.ema"):
            theirs.step(model.parameters())
        for state in (engine.whole_state(), engine.ema.whole_state()):
            with tempfile.TemporaryDirectory() as place:
                model.save_pretrained(place, state_dict=dict(state))  # which it empties
                if echelon.rank() == 0:  # it writes there alone
                    again = transformers.LlamaForCausalLM.from_pretrained(place)
                    torch.testing.assert_close(dict(again.state_dict()), state, rtol=0, atol=0)
        engine.close()
    return said


def test_save_pretrained_of_parts_is_refused_in_a_line() -> None:
    for said in run(save_layouts):
        for layout, line in said.items():
            assert line.startswith("state_dict(): "), layout
            assert line.endswith("or save_pretrained(dir, state_dict=state)")


def save_adapter() -> tuple[str, float]:
    echelon.init()
    options = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: Any = peft.get_peft_model(_llama(), options)
    engine = _trained(model, "shard 3")
    with tempfile.TemporaryDirectory() as place:
        with pytest.raises(UsageError) as refused:
            model.save_pretrained(place)
        state = engine.whole_state()
        model.save_pretrained(place, state_dict=state)
        again = peft.PeftModel.from_pretrained(_llama(), place)
        name = next(name for name in state if "lora_A" in name)
        found = dict(again.state_dict())[name]
    return str(refused.value), float((found - state[name]).abs().max())


def test_adapters_of_shards_are_saved_with_the_whole_state() -> None:
    for line, difference in run(save_adapter):
        assert line.startswith("state_dict(): shard=3")
        assert difference == 0.0
