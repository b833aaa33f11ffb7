"""Recomputation on models of transformers, with adapters of peft and sharding, beside one process."""

from __future__ import annotations

import tiny
from beside import Case, check


def test_lora_with_recompute_and_shards_equals_one_process() -> None:
    cases = [
        Case(tiny.lora, tiny.words, {}, {"shard": level, "recompute": recompute})
        for level in (1, 2, 3)
        for recompute in (False, True)
    ]
    cases += [Case(tiny.lora_checkpointed, tiny.words, {}, {"shard": level}) for level in (1, 3)]
    check([*cases, Case(tiny.lora_mamba, tiny.words, {}, {"shard": 3, "recompute": True})], ranks=2)


def test_decoders_with_caches_are_recomputed_as_they_are() -> None:
    """``use_cache`` is on in all of them."""
    makes = (tiny.llama, tiny.qwen3, tiny.gpt2, tiny.t5)
    cases = [Case(make, tiny.words, {}, {"recompute": True}) for make in makes]
    cases += [
        Case(tiny.whisper, tiny.sound, {}, {"recompute": True}),
        Case(tiny.llama, tiny.words, {}, {"recompute": True, "shard": 3}),
        Case(tiny.llama, tiny.words, tiny.in_stages("model.layers"), {"recompute": True}),
        Case(tiny.t5, tiny.words, tiny.in_stages("encoder.block", "decoder.block"), {"recompute": True}),
    ]
    check(cases, ranks=2)
