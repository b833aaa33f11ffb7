"""``echelon verify`` on LoRA of a Llama, with text that transformers' own collator pads."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from verifying import verified

import echelon
from echelon.tools.verify.verdict_text import conclusion

WORDS = 64


def collator(masked: bool) -> DataCollatorForLanguageModeling:
    known = {**{str(number): number for number in range(3, WORDS)}, "[PAD]": 0, "[UNK]": 1, "[MASK]": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(known, unk_token="[UNK]")),
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
    )
    return DataCollatorForLanguageModeling(tokenizer, mlm=masked)


def padded_lora(masked: bool = False) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), lora)
    made = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 24, (32,), generator=made).tolist()
    data = [{"input_ids": torch.randint(3, WORDS, (length,), generator=made).tolist()} for length in lengths]
    engine = echelon.distribute(
        model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), log=echelon.Log(console=False)
    )
    for batch in engine.loader(data, global_batch=8, collate=collator(masked)):
        engine.step(**batch)


def masked_lora() -> None:
    """Words are hidden at random when they are collated."""
    padded_lora(masked=True)


def test_padded_lora_is_the_same_as_one_process(tmp_path: Path) -> None:
    for body in (padded_lora, masked_lora):
        verdict = verified(body, tmp_path / body.__name__, 3)
        assert verdict.status == "same", conclusion(verdict)
        assert verdict.passes == 1
        assert len({row.loss for row in verdict.rows}) == 3
        assert all(row.loss > 1 and row.gradient and row.gradient.relative < 1e-5 for row in verdict.rows)
