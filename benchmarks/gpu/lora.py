"""LoRA of a Llama-3-8B-shaped model on one GPU: Echelon beside a hand-written loop, tokens per second and peak memory.

    python benchmarks/gpu/lora.py [--batches 2 4] [--length 4096] [--rank 16] [--targets all|attention]
        [--peers hand compiled] [--recompute] [--rounds 2] [--steps 4] [--out results.json] [--tiny]

Weights are random, and made in bf16 on the GPU from a configuration of transformers: nothing is downloaded. Both
contenders share these frozen weights, take turns in one process, and have the same loss, which computes logits in
chunks. ``hand`` is a loop without Echelon, with adapters of peft if that is installed; ``compiled`` compiles its
blocks. Each batch size has a process of its own, so that no program is compiled for two shapes. ``--tiny`` runs on a
CPU.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import echelon

Step = Callable[[], Tensor]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = {"attention": ATTENTION, "all": (*ATTENTION, "gate_proj", "up_proj", "down_proj")}
CHUNK = 2048  #: tokens whose logits exist at a time: 1 GB in fp32
FIRST = 5  #: steps that compile and warm up


class FrozenHeadLoss(torch.autograd.Function):
    """Mean cross-entropy of a frozen output layer; its backward is computed with the loss, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        rows, wanted = hidden.flatten(0, -2), targets.flatten()
        total, grad = torch.zeros((), device=rows.device), torch.empty_like(rows)
        for begin in range(0, len(rows), CHUNK):
            part = slice(begin, begin + CHUNK)
            loss, slope = chunk_loss(rows[part] @ weight.T, wanted[part])
            total += loss
            grad[part] = slope @ weight
        ctx.save_for_backward(grad.view_as(hidden))
        ctx.count = len(rows)
        return total / len(rows)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * (scale / ctx.count).to(grad.dtype), None, None


def chunk_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss of some rows, and its gradient with respect to the logits."""
    dtype = logits.dtype
    logs = torch.log_softmax(logits.float(), -1)
    places = targets[:, None]
    loss = -logs.gather(1, places).sum()
    return loss, (logs.exp() - torch.zeros_like(logs).scatter_(1, places, 1.0)).to(dtype)


class NextToken(nn.Module):
    """A causal language model as a function from token ids to its loss."""

    def __init__(self, llama: Any) -> None:
        super().__init__()
        self.llama = llama

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.llama.model(input_ids=ids, use_cache=False).last_hidden_state
        loss: Tensor = FrozenHeadLoss.apply(hidden[:, :-1], self.llama.lm_head.weight, ids[:, 1:])  # type: ignore[no-untyped-call]
        return loss


class HandAdapter(nn.Module):
    """A linear layer with an adapter, as hand-written loops have it."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer, self.scale = layer, 2.0
        place = {"device": layer.weight.device, "dtype": torch.float32}
        self.a = nn.Linear(layer.in_features, rank, bias=False, **place)
        self.b = nn.Linear(rank, layer.out_features, bias=False, **place)
        nn.init.kaiming_uniform_(self.a.weight, a=math.sqrt(5))
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) + self.b(self.a(x)) * self.scale
        return result


def build(tiny: bool, device: str) -> NextToken:
    """Build the model with random bf16 weights on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
             "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192}  # fmt: skip
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 96, "vocab_size": 512, "max_position_embeddings": 128}  # fmt: skip
    config = LlamaConfig(**(small if tiny else sizes), attn_implementation="sdpa", use_cache=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():  # whether the library has initialized the weights depends on its version
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    rotary = model.model.rotary_emb
    rotary.inv_freq = 1.0 / 500_000.0 ** (torch.arange(0, 1, 1 / len(rotary.inv_freq), device=device).float())
    return NextToken(model.requires_grad_(False)).train()


def shared_copy(model: NextToken) -> NextToken:
    """Return a copy of the model that shares its weights."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def of_echelon(model: NextToken, ids: Tensor, options: argparse.Namespace) -> Step:
    lora = echelon.Lora(rank=options.rank, alpha=2.0 * options.rank, targets=TARGETS[options.targets])
    strategy = echelon.Strategy(lora=lora, recompute=options.recompute or None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = echelon.distribute(model, optimizer=optimizer, strategy=strategy)
    return lambda: engine.step(ids)


def by_hand(model: NextToken, ids: Tensor, options: argparse.Namespace, compiled: bool) -> Step:
    add_adapters(model, options)
    if options.recompute:
        model.llama.gradient_checkpointing_enable({"use_reentrant": False})
    if compiled:
        for layer in model.llama.model.layers:
            layer.compile()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=ids.is_cuda)

    def step() -> Tensor:
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.is_cuda):
            loss: Tensor = model(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def add_adapters(model: NextToken, options: argparse.Namespace) -> None:
    names = TARGETS[options.targets]
    if has_peft():
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=list(names))
        inject_adapter_in_model(config, model.llama)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
        return
    for _, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(module, name, HandAdapter(child, options.rank))


def has_peft() -> bool:
    return importlib.util.find_spec("peft") is not None


def contenders(options: argparse.Namespace, batch: int, device: str) -> dict[str, Step]:
    model = build(options.tiny, device)
    vocabulary = model.llama.config.vocab_size
    ids = torch.randint(vocabulary, (batch, options.length), device=device)
    peers = {name: shared_copy(model) for name in options.peers}
    made = {"echelon": of_echelon(model, ids, options)}
    return made | {name: by_hand(peer, ids, options, name == "compiled") for name, peer in peers.items()}


def measure(options: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Return the figures of one batch size."""
    device = "cpu" if options.tiny else "cuda"
    begun = time.perf_counter()
    made = contenders(options, batch, device)
    result: dict[str, Any] = {"batch": batch, "build_seconds": time.perf_counter() - begun}
    for name, step in made.items():
        begun = time.perf_counter()
        reset_peak(device)
        losses = [float(step()) for _ in range(FIRST)]
        result[name] = {
            "first_loss": losses[0], "start_seconds": time.perf_counter() - begun, "peak_gb": peak_gb(device)
        }  # fmt: skip
    rounds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(options.rounds):
        for name, step in made.items():
            rounds[name].append(seconds_per_step(step, options.steps, device))
    tokens = batch * options.length
    for name, seconds in rounds.items():
        result[name]["tokens_per_second"] = [tokens / each for each in seconds]
        result[name]["median_tokens_per_second"] = tokens / statistics.median(seconds)
    result["ratio_to"] = {
        name: statistics.median(other / own for own, other in zip(rounds["echelon"], rounds[name], strict=True))
        for name in options.peers
    }
    return result


def seconds_per_step(step: Step, steps: int, device: str) -> float:
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - begun) / steps


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gb(device: str) -> float:
    return torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0


def in_own_process(options: argparse.Namespace, batch: int) -> dict[str, Any]:
    command = [sys.executable, *sys.argv, "--one", str(batch)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(ended.stdout, file=sys.stderr)  # with the engine's lines on what it has chosen
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"batch"')]
    if lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    return {"batch": batch, "failed": f"exit status {ended.returncode}; the log above says why"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", choices=TARGETS, default="all")
    parser.add_argument("--peers", nargs="*", choices=("hand", "compiled"), default=["compiled"])
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which no other batch size begins")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.length = min(options.length, 64)
    if options.one is not None:
        print(json.dumps(measure(options, options.one)), flush=True)
        return
    begun, rows = time.perf_counter(), []
    for batch in options.batches:
        if time.perf_counter() - begun > options.limit:
            rows.append({"batch": batch, "failed": f"not begun: {options.limit:.0f} s had passed"})
        else:
            rows.append(in_own_process(options, batch))
    device = "cpu" if options.tiny else torch.cuda.get_device_name()
    asked = {key: value for key, value in vars(options).items() if key not in ("one", "out")}
    report = {"device": device, "torch": torch.__version__, "peft": has_peft(), "options": asked, "rows": rows}
    text = json.dumps(report, indent=2)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
