"""Peak of host memory per rank while a model is read from sharded safetensors files, or built, in a layout.

    python benchmarks/large_models/load_by_region.py --write MODEL_DIR --layers 22     # a Llama of 7.6 GB in fp32
    echelon run --procs 4 benchmarks/large_models/load_by_region.py --read MODEL_DIR
    echelon run --procs 4 benchmarks/large_models/load_by_region.py --build MODEL_DIR  # its config, initial weights
    echelon run --procs 4 benchmarks/large_models/load_by_region.py --build MODEL_DIR --layout "split 2"

The first rank prints each rank's peak of memory (VmHWM) after the imports and after ``distribute()``, beside the bytes
of its own part and of the largest tensor, and a line of JSON. ``--plain`` loads the model whole first, as a script
without the two would.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

LAYOUTS: dict[str, dict[str, int]] = {
    "shard 3": {"shard": 3},
    "split 2": {"split": 2},
    "stages 2": {"stages": 2},
    "split 2 x stages 2": {"split": 2, "stages": 2},
    "shard 3 x stages 2": {"shard": 3, "stages": 2},
}
FILE = 1 << 29  # bytes of a weight file


def config_of(layers: int) -> Any:
    import transformers

    return transformers.LlamaConfig(
        hidden_size=2560, intermediate_size=6912, num_hidden_layers=layers, num_attention_heads=20,
        num_key_value_heads=20, vocab_size=32000, tie_word_embeddings=False,
    )  # fmt: skip


def write(folder: Path, config: Any, dtype: torch.dtype = torch.float32) -> None:
    """Write a model directory, file by file: it is never whole in memory."""
    import transformers
    from safetensors.torch import save_file

    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in transformers.LlamaForCausalLM(config).state_dict().items()}
    config.dtype = dtype
    config.save_pretrained(folder)
    values = torch.randn(max(map(math.prod, shapes.values())), dtype=dtype).div_(50)
    files = [dict[str, torch.Tensor]()]
    for name, shape in shapes.items():
        if sum(value.nbytes for value in files[-1].values()) > FILE:
            files.append({})
        files[-1][name] = values[: math.prod(shape)].view(shape)
    weight_map = {}
    for number, tensors in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file({name: value.clone() for name, value in tensors.items()}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def peak() -> float:
    """Return the peak of this process's memory in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1e3


def measure(folder: Path, how: str, layout: str) -> None:
    import transformers

    import echelon
    from echelon.distributed.collectives import gather_json

    echelon.init(seed=0)
    assert transformers.LlamaForCausalLM  # imported before the first figure
    before, start = peak(), time.perf_counter()
    if how == "read":
        model = echelon.hf.from_pretrained(folder)
    elif how == "plain":
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
    else:
        with echelon.deferred():
            model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder))
    model.config.use_cache = False
    sizes = [parameter.nbytes / 1e6 for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = torch.zeros(2, 8, dtype=torch.long)
    strategy = echelon.Strategy(fast=False, **LAYOUTS[layout])
    engine = echelon.distribute(model, optimizer, sample={"input_ids": words, "labels": words}, strategy=strategy)
    seconds, own, above = time.perf_counter() - start, own_part(engine.model, optimizer), peak() - before
    # Replicas without shards have buckets of gradients from the beginning, as large as their weights.
    buckets = own if engine.plan.replicas > 1 and engine.plan.shard is None else 0
    figures = {"imports": before, "own": own, "gradients": buckets, "peak": above}
    found = gather_json({name: round(value) for name, value in figures.items()}, engine.world.control)
    if engine.world.rank == 0:
        for rank, figures in enumerate(found):
            bound = figures["own"] + figures["gradients"] + max(sizes)
            print(f"rank {rank}: {figures}; own part, gradients and the largest tensor {bound:,.0f} MB")
        about = {"how": how, "layout": layout, "model": round(sum(sizes)), "largest": round(max(sizes))}
        print(json.dumps({**about, "seconds": round(seconds, 1), "ranks": found}))
    engine.close()


def own_part(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Return the MB of parameters and shards that this rank holds."""
    held = [*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
    storages = {p.untyped_storage()._cdata: p.untyped_storage() for p in held if type(p.data) is torch.Tensor}
    addresses = {storage.data_ptr(): storage.nbytes() for storage in storages.values()}
    return sum(addresses.values()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for how in ("write", "read", "build", "plain"):
        parser.add_argument(f"--{how}", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--layout", choices=LAYOUTS, default="shard 3")
    given = parser.parse_args()
    if given.write:
        write(given.write, config_of(given.layers))
    for how in ("read", "build", "plain"):
        if getattr(given, how):
            measure(getattr(given, how), how, given.layout)


if __name__ == "__main__":
    main()
