"""Padded and masked text with the model's own loss, beside one process: labels of -100 differ wildly between ranks."""

from __future__ import annotations

import pytest
import tiny
import torch
import transformers
from beside import ROWS, Case, check
from torch import Tensor, nn

HALVES = tiny.in_stages("model.layers")
LAYERS = tiny.in_stages("bert.encoder.layer")


def padded(step: int) -> dict[str, Tensor]:
    """Rows of 2 to 6 words; the first ranks have the short ones."""
    g = torch.Generator().manual_seed(step)
    batch = tiny.words(step)
    lengths = torch.randint(2, 7, (ROWS,), generator=g).sort().values
    mask = torch.arange(6) < lengths[:, None]
    return {
        "input_ids": batch["input_ids"].where(mask, 0),
        "attention_mask": mask.long(),
        "labels": batch["labels"].where(mask, -100),
    }


def masked(step: int) -> dict[str, Tensor]:
    """Every row with words to be found, the later rows with more of them."""
    g = torch.Generator().manual_seed(step)
    ids = tiny.words(step)["input_ids"]
    asked = torch.rand(ROWS, 6, generator=g) < torch.linspace(0.2, 0.9, ROWS)[:, None]
    asked[:, 0] = True
    return {"input_ids": ids.where(~asked, 3), "labels": ids.where(asked, -100)}


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=tiny.WORDS, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def test_replicas_equal_one_process() -> None:
    cases = [
        Case(bert, masked),
        Case(tiny.llama, padded),
        Case(tiny.lora, padded),
        Case(tiny.gpt2, padded),
        Case(tiny.t5, padded),
        Case(tiny.llama, padded, {}, {"shard": 2}),
        Case(tiny.lora, padded, {}, {"shard": 3}),
        Case(bert, masked, {}, {"shard": 3, "recompute": True}),
        Case(tiny.llama, padded, {}, {"auto": True}),
    ]
    check(cases, ranks=2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_micro_batches_equal_one_process(ranks: int) -> None:
    cases = [Case(tiny.llama, padded, HALVES), Case(bert, masked, LAYERS)]
    check(cases, ranks=ranks)
