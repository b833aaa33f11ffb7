"""``echelon memory`` of LoRA on models of transformers, with the key-value cache they have by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.planner.profiling.profile import profile
from echelon.tools.memory_profile import TrainingJob, find_footprint

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SAMPLES, WORDS = 4, 128


def gpt2() -> Any:
    options = {"n_layer": 3, "n_embd": 48, "n_head": 2, "vocab_size": WORDS, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options)), ["c_attn"]


def llama() -> Any:
    options = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**options, intermediate_size=96, vocab_size=WORDS)
    return transformers.LlamaForCausalLM(config), ["q_proj", "v_proj"]


def kept_by_autograd(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """Bytes of the storages that a real forward pass keeps for backward, weights left out."""
    kept: dict[int, tuple[int, Tensor]] = {}
    weights = {value.untyped_storage().data_ptr() for value in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss
    del loss
    return sum(size for size, _ in kept.values())


@pytest.mark.filterwarnings("ignore")  # of the two libraries about each other
@pytest.mark.parametrize("make", [gpt2, llama])
def test_activations_of_lora_with_a_cache_are_those_of_autograd(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model, targets = make()
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    assert model.config.use_cache
    model.train()
    ids = torch.randint(1, WORDS, (SAMPLES, 24))
    mask = torch.ones_like(ids)
    mask[0, 20:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    found = find_footprint(profile(model, batch, device="cpu"), TrainingJob(samples=SAMPLES), "adamw")
    assert sum(row.activations for row in found.modules) == kept_by_autograd(model, batch)
