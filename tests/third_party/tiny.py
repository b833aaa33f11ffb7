"""Models of transformers, small enough for a test, and batches for them. All return their loss."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from beside import ROWS
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import echelon

WORDS = 40
DECODER: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 8, "attention_dropout": 0.0, "pad_token_id": 0,
}  # fmt: skip
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def words(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(3, WORDS, (ROWS, 6), generator=g)
    return {"input_ids": ids, "labels": ids.clone()}


def sound(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {
        "input_features": torch.randn(ROWS, 8, 20, generator=g),
        "labels": torch.randint(3, WORDS, (ROWS, 6), generator=g),
    }


def in_stages(*layers: str) -> dict[str, Any]:
    """Marks of two stages: four layers in halves, or a list of layers for each."""
    named = (f"{layers[0]}.0-1", f"{layers[0]}.2-3") if len(layers) == 1 else layers
    first, second = named
    return {"": echelon.pipeline(micro_batches=2), first: echelon.stage(0), second: echelon.stage(1)}


def llama(**options: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, **options))


def llama_with_states() -> nn.Module:
    return llama(output_hidden_states=True)


def lora() -> nn.Module:
    return _adapted(llama(use_cache=False), ["q_proj", "v_proj"])


def lora_checkpointed() -> nn.Module:
    model = llama()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # version 6 will have another name for it
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return _adapted(model, ["q_proj", "v_proj"])


def lora_mamba() -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=WORDS, hidden_size=16, state_size=4, num_hidden_layers=2, use_cache=False, pad_token_id=0
    )
    return _adapted(transformers.MambaForCausalLM(config), ["in_proj"])


def _adapted(model: nn.Module, targets: list[str]) -> nn.Module:
    return with_adapter(model, LoraConfig(r=4, lora_dropout=0.0, target_modules=targets, init_lora_weights=False))


def with_adapter(model: nn.Module, config: LoraConfig) -> Any:
    """Return a model of peft. It uses names that version 6 of transformers will not have, and warns of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, config)


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER))


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=4, n_head=4, embd_pdrop=0.0, attn_pdrop=0.0,
            resid_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)
    )


def qwen3_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(**DECODER, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    return transformers.Qwen3MoeForCausalLM(config)


def bart(**options: Any) -> nn.Module:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**SEQ2SEQ, max_position_embeddings=32, **options)
    )


def mbart() -> nn.Module:
    return transformers.MBartForConditionalGeneration(transformers.MBartConfig(**SEQ2SEQ, max_position_embeddings=32))


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        **SEQ2SEQ, num_mel_bins=8, max_source_positions=10, max_target_positions=16, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        conv_dim=(16, 16), conv_stride=(2, 2), conv_kernel=(3, 3), num_feat_extract_layers=2, hidden_dropout=0.0,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, attention_dropout=0.0, feat_proj_dropout=0.0,
        activation_dropout=0.0, final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False, ctc_loss_reduction="mean",
        pad_token_id=0,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config)


def waves(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {
        "input_values": torch.randn(ROWS, 120, generator=g),
        "labels": torch.randint(3, WORDS, (ROWS, 6), generator=g),
    }
