"""Families of transformers in tiny configurations, as ``save_pretrained`` gets them, and batches with their loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tiny
import torch
import transformers
from beside import ROWS
from torch import Tensor, nn

SIDE = 16  # of pictures, in pixels

#: Layouts of four ranks, by the names of the table's columns.
LAYOUTS: dict[str, dict[str, Any]] = {
    "split 2": {"split": 2},
    "stages 2": {"stages": 2},
    "shard 3": {"shard": 3},
    "split x stages": {"split": 2, "stages": 2},
    "split x shard 3": {"split": 2, "shard": 3},
    "stages x shard 3": {"stages": 2, "shard": 3},
}


class Family(NamedTuple):
    """A model of a family, and its batch of each step."""

    make: Callable[[], nn.Module]
    batches: Callable[[int], dict[str, Tensor]]


def decoder(name: str, **options: Any) -> Callable[[], nn.Module]:
    """Return what makes the language model of a family of decoders."""

    def make() -> nn.Module:
        kind = getattr(transformers, f"{name}ForCausalLM")
        return kind(kind.config_class(**{**tiny.DECODER, **options}))

    return make


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=tiny.WORDS, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, image_size=SIDE, patch_size=4,
        num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        problem_type="single_label_classification",
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def pictures(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {
        "pixel_values": torch.randn(ROWS, 3, SIDE, SIDE, generator=g),
        "labels": torch.randint(5, (ROWS,), generator=g),
    }


FAMILIES = {
    "Llama": Family(tiny.llama, tiny.words),
    "Qwen2": Family(decoder("Qwen2"), tiny.words),
    "Qwen3": Family(decoder("Qwen3"), tiny.words),
    "Mistral": Family(decoder("Mistral"), tiny.words),
    "Gemma": Family(decoder("Gemma", num_key_value_heads=1), tiny.words),
    "Gemma3": Family(decoder("Gemma3", sliding_window=4), tiny.words),
    "Mixtral": Family(tiny.mixtral, tiny.words),
    "Qwen3-MoE": Family(tiny.qwen3_moe, tiny.words),
    "GPT-2": Family(tiny.gpt2, tiny.words),
    "BERT": Family(bert, tiny.words),
    "T5": Family(tiny.t5, tiny.words),
    "ViT": Family(vit, pictures),
    "Whisper": Family(tiny.whisper, tiny.sound),
}  # fmt: skip
