"""Train a Llama of Hugging Face transformers in four layouts; all of them print the same losses.

    python examples/llama.py
    echelon run --procs 2 examples/llama.py --layout data            # or: tensor, pipeline, zero

It needs `pip install 'transformers>=5'` and downloads nothing: its text are the sources of torch.nn, a token per byte.
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import echelon

MARKS = {
    "tensor": {
        "model.layers.*.self_attn.[qkv]_proj": echelon.split(),  # columns: each rank has some of the heads
        "model.layers.*.self_attn.o_proj": echelon.split("row"),
        "model.layers.*.mlp.gate_proj": echelon.split(),
        "model.layers.*.mlp.up_proj": echelon.split(),
        "model.layers.*.mlp.down_proj": echelon.split("row"),
    },
    "pipeline": {"": echelon.pipeline(stages=2, micro_batches=4)},
}

parser = argparse.ArgumentParser()
parser.add_argument("--layout", choices=["data", "tensor", "pipeline", "zero"], default="data")
layout = parser.parse_args().layout

echelon.init(seed=0)
text = b"".join(path.read_bytes() for path in sorted(Path(torch.nn.__file__).parent.glob("modules/*.py")))
rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: 320 * 64].long().view(320, 64)

sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **sizes))  # or .from_pretrained(...)
echelon.annotate(model, MARKS.get(layout, {}))

engine = echelon.distribute(
    model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
    strategy=echelon.Strategy(shard=3 if layout == "zero" else None, clip=1.0),
    checkpoint=echelon.Checkpoint(dir="checkpoints", every=10),
)
loader = engine.loader(TensorDataset(rows, rows), global_batch=32)
for _ in loader.epochs(4):
    for tokens, labels in loader:
        engine.step(input_ids=tokens, labels=labels)  # the model returns its own loss
