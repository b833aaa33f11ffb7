"""Peak of host memory per rank while a model is read from sharded safetensors files, or built, under shard 3.

    python benchmarks/large_models/load_by_region.py --write MODEL_DIR --layers 22     # a Llama of 7.6 GB in fp32
    echelon run --procs 4 benchmarks/large_models/load_by_region.py --read MODEL_DIR
    echelon run --procs 4 benchmarks/large_models/load_by_region.py --build MODEL_DIR  # its config, initial weights

The first rank prints each rank's peak of memory (VmHWM) after the imports and after ``distribute()``, beside the bytes
of its own part and of the largest tensor. ``--plain`` loads the model whole first, as a script without the two would.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

FILE = 1 << 29  # bytes of a weight file


def config_of(layers: int) -> Any:
    import transformers

    return transformers.LlamaConfig(
        hidden_size=2560, intermediate_size=6912, num_hidden_layers=layers, num_attention_heads=20,
        num_key_value_heads=20, vocab_size=32000, tie_word_embeddings=False,
    )  # fmt: skip


def write(folder: Path, layers: int) -> None:
    """Write a model directory, file by file: it is never whole in memory."""
    import transformers
    from safetensors.torch import save_file

    config = config_of(layers)
    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in transformers.LlamaForCausalLM(config).state_dict().items()}
    config.save_pretrained(folder)
    values, files = torch.randn(max(map(math.prod, shapes.values()))) / 50, [dict[str, torch.Tensor]()]
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


def measure(folder: Path, how: str) -> None:
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
    sizes = [parameter.nbytes / 1e6 for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = echelon.distribute(model, optimizer, strategy=echelon.Strategy(shard=3, fast=False))
    seconds = time.perf_counter() - start
    own, above = sum(sizes) / engine.world.size, peak() - before
    for rank, line in enumerate(
        gather_json(f"{before:,.0f} MB after imports, {above:,.0f} MB more", engine.world.control)
    ):
        if engine.world.rank == 0:
            print(f"rank {rank}: {line}")
    if engine.world.rank == 0:
        print(
            f"{how}: {sum(sizes):,.0f} MB in {seconds:.0f} s; own part {own:,.0f}, largest tensor {max(sizes):,.0f} MB"
        )
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for how in ("write", "read", "build", "plain"):
        parser.add_argument(f"--{how}", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--layers", type=int, default=22)
    given = parser.parse_args()
    if given.write:
        write(given.write, given.layers)
    for how in ("read", "build", "plain"):
        if getattr(given, how):
            measure(getattr(given, how), how)


if __name__ == "__main__":
    main()
