"""A model of 30 billion parameters on one GPU: read from sharded files and trained with adapters, step by step.

    python benchmarks/large_models/thirty_billion.py MODEL_DIR [--layers 55] [--length 2048] [--out results.json]
        [--train adapters|low_memory] [--keep] [--tiny]

Weights are random: a Llama of that size is written to MODEL_DIR in bf16 first, file by file, 60 GB of free disk, and
removed at the end. Then it is read by ``echelon.hf.from_pretrained`` and distributed: each tensor goes from its file to
the GPU, so that host memory holds one tensor at a time. The printed JSON has the seconds of each part, the peak of host
memory beyond the imports beside the bound (own part that lies on the host, plus the largest tensor), the peak of device
memory, and tokens per second. ``--tiny`` runs everything on a CPU with a small model; there the part lies on the host.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from load_by_region import peak, write

FIRST = 3  #: steps that compile and warm up


def config_of(layers: int, tiny: bool) -> Any:
    import transformers

    large = {"hidden_size": 6656, "intermediate_size": 17920, "num_attention_heads": 52, "vocab_size": 32000}
    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 512}
    sizes = small if tiny else large
    return transformers.LlamaConfig(
        **sizes, num_key_value_heads=sizes["num_attention_heads"], num_hidden_layers=layers, tie_word_embeddings=False,
        max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip


def strategy_of(train: str) -> Any:
    import echelon

    if train == "low_memory":
        return echelon.Strategy(low_memory=True, recompute=True)
    return echelon.Strategy(lora=echelon.Lora(rank=16), recompute=True)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    import transformers

    import echelon

    echelon.init(seed=0)
    assert transformers.LlamaForCausalLM  # imported before the first figure
    imports, begun, seconds = peak(), time.perf_counter(), dict[str, float]()

    def part(name: str) -> None:
        nonlocal begun
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds[name], begun = round(time.perf_counter() - begun, 2), time.perf_counter()

    model = echelon.hf.from_pretrained(folder)
    sizes = [parameter.nbytes / 1e6 for parameter in model.parameters()]
    count = sum(parameter.numel() for parameter in model.parameters())
    part("build")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    engine = echelon.distribute(model, optimizer, strategy=strategy_of(options.train))
    part("read and distribute")
    host, device = peak() - imports, engine.world.device
    ids = torch.randint(model.config.vocab_size, (1, options.length))
    losses = [float(engine.step(input_ids=ids, labels=ids))]
    part("first step")
    losses += [float(engine.step(input_ids=ids, labels=ids)) for _ in range(FIRST - 1)]
    part("warm up")
    losses += [float(engine.step(input_ids=ids, labels=ids)) for _ in range(options.steps)]
    part("steps")
    on_host = sum(sizes) if device.type == "cpu" else 0.0
    engine.close()
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "train": options.train,
        "parameters": count,
        "model_mb": round(sum(sizes)),
        "seconds": seconds,
        "host_mb": {"imports": round(imports), "peak_until_distributed": round(host), "peak": round(peak() - imports)},
        "host_bound_mb": round(on_host + max(sizes)),
        "device_peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if device.type == "cuda" else 0.0,
        "tokens_per_second": round(options.steps * options.length / seconds["steps"], 1),
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--layers", type=int, default=55)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--train", choices=("adapters", "low_memory"), default="adapters")
    parser.add_argument("--keep", action="store_true", help="keep MODEL_DIR, and use it again")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.layers, options.length = min(options.layers, 4), min(options.length, 64)
    begun, made = time.perf_counter(), not (options.folder / "config.json").exists()
    if made:
        options.folder.mkdir(parents=True, exist_ok=True)
        write(options.folder, config_of(options.layers, options.tiny), torch.bfloat16)
    written = time.perf_counter() - begun
    try:
        found = {"write_seconds": round(written, 2), **measure(options.folder, options)}
    finally:
        if made and not options.keep:
            shutil.rmtree(options.folder)
    text = json.dumps(found, indent=2)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
