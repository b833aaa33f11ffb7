"""Makes text.json: what transformers' BERT, GPT-2 and T5 answer with weights that a formula gives.

Run where torch, numpy and transformers are installed; the tests themselves need none but the first two.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

sys.modules["torchvision"] = None  # type: ignore[assignment]  # transformers imports it where it can, for images
import torch  # noqa: E402
import transformers  # noqa: E402


def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Norms near 1, the rest small; by name, so that the order of parameters does not matter."""
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    is_norm = any(part in name.lower() for part in ("norm", "ln_")) and name.endswith("weight")
    return torch.from_numpy(1 + 0.1 * values if is_norm else 0.1 * values)


def numbers(high: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.RandomState(high).randint(0, high, shape))


def answer(model: Any, *outputs: str, **inputs: torch.Tensor) -> dict[str, Any]:
    """Names and shapes of the weights, and what comes out."""
    tied = ("cls.predictions.decoder.", "lm_head.", "encoder.embed_tokens.", "decoder.embed_tokens.")
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items() if not name.startswith(tied)}
    model.double().load_state_dict({name: drawn(name, shape) for name, shape in shapes.items()}, strict=False)
    model.tie_weights()
    with torch.no_grad():
        found = model.eval()(**inputs)
    return {
        "shapes": shapes,
        "outputs": {name: [round(x, 9) for x in found[name].flatten().tolist()] for name in outputs},
    }


def bert() -> dict[str, Any]:
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    made = {**sizes, "vocab_size": 24, "max_position_embeddings": 12, "num_labels": 3}
    config = transformers.BertConfig(**made)
    tokens, segments = numbers(24, 2, 8), numbers(2, 2, 8)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    inputs = {"input_ids": tokens, "token_type_ids": segments, "attention_mask": mask}
    config_span = transformers.BertConfig(**{**made, "num_labels": 2})
    return {
        "config": {**made, "layer_norm_eps": config.layer_norm_eps},
        "pretraining": answer(
            transformers.BertForPreTraining(config), "prediction_logits", "seq_relationship_logits", **inputs
        ),
        "classifier": answer(transformers.BertForSequenceClassification(config), "logits", **inputs),
        "span": answer(transformers.BertForQuestionAnswering(config_span), "start_logits", "end_logits", **inputs),
    }


def gpt() -> dict[str, Any]:
    config = transformers.GPT2Config(
        vocab_size=24, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return answer(transformers.GPT2LMHeadModel(config), "logits", input_ids=numbers(24, 2, 8))


def t5() -> dict[str, Any]:
    config = transformers.T5Config(vocab_size=24, d_model=16, d_kv=6, num_heads=2, d_ff=20, num_layers=2)
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[0, 35:] = 0
    return answer(
        transformers.T5ForConditionalGeneration(config),
        "logits",
        input_ids=numbers(24, 1, 40),
        attention_mask=mask,
        decoder_input_ids=numbers(23, 1, 30),
    )


if __name__ == "__main__":
    made = {"bert": bert(), "gpt": gpt(), "t5": t5()}
    Path(__file__).with_name("text.json").write_text(json.dumps(made) + "\n")
