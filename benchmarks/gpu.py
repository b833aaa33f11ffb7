"""Echelon beside a hand-written loop on one GPU: ResNet-50 and BERT-large, bf16, compiled.

    python benchmarks/gpu.py [--only resnet50|bert_large] [--rounds 8] [--steps 20] [--eager] [--out results.json]

Both contenders live in one process and take turns; the figure is the median over rounds of the ratio within a round.
Needs a GPU, torchvision and transformers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon

Step = Callable[[], object]


def resnet50() -> tuple[nn.Module, tuple[Tensor, ...], Any, int]:
    from torchvision.models import resnet50 as build

    model = build().to("cuda", memory_format=torch.channels_last)
    images = torch.randn(256, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    return model, (images, torch.randint(1000, (256,), device="cuda")), F.cross_entropy, 256


class MaskedLanguageModel(nn.Module):
    """BERT-large with its output layer, as a function from token ids to logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
            hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, attn_implementation="sdpa",
        )  # fmt: skip
        self.bert = BertForMaskedLM(config)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.bert(ids).logits
        return logits


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def bert_large() -> tuple[nn.Module, tuple[Tensor, ...], Any, int]:
    ids = torch.randint(30000, (64, 128), device="cuda")
    return MaskedLanguageModel().to("cuda"), (ids, ids.clone()), token_loss, 64


WORKLOADS = {"resnet50": resnet50, "bert_large": bert_large}


def optimizer_for(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "resnet50":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def hand_written(name: str, compiled: bool) -> tuple[Step, int]:
    torch.manual_seed(0)
    model, (inputs, targets), loss_function, batch = WORKLOADS[name]()
    optimizer = optimizer_for(model, name)
    if compiled:
        model.compile()

    def step() -> object:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_function(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batch


def ours(name: str, compiled: bool) -> tuple[Step, int]:
    torch.manual_seed(0)
    model, data, loss_function, batch = WORKLOADS[name]()
    if compiled:
        model.compile()
    engine = echelon.distribute(
        model,
        loss=loss_function,
        optimizer=optimizer_for(model, name),
        strategy=echelon.Strategy(amp="bf16"),
        log=echelon.Log(console=False, every=50),
    )
    return lambda: engine.step(*data), batch


def compare(name: str, compiled: bool, rounds: int, steps: int) -> dict[str, object]:
    begin = time.perf_counter()
    contenders = {"hand-written": hand_written(name, compiled), "echelon": ours(name, compiled)}
    for step, _ in contenders.values():
        for _ in range(10):
            step()
    torch.cuda.synchronize()
    warm = time.perf_counter() - begin
    speeds: dict[str, list[float]] = {key: [] for key in contenders}
    for turn in range(rounds):
        for key in sorted(contenders, reverse=bool(turn % 2)):
            step, batch = contenders[key]
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
            speeds[key].append(batch * steps / (time.perf_counter() - begin))
    ratios = [a / b for a, b in zip(speeds["echelon"], speeds["hand-written"], strict=True)]
    return {
        "workload": name,
        "compiled": compiled,
        "hand_written_per_s": round(statistics.median(speeds["hand-written"]), 1),
        "echelon_per_s": round(statistics.median(speeds["echelon"]), 1),
        "ratio": round(statistics.median(ratios), 4),
        "spread": [round(min(ratios), 4), round(max(ratios), 4)],
        "start_and_warm_up_s": round(warm, 1),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py needs a GPU; torch sees none here")
    echelon.init()
    names = [args.only] if args.only else list(WORKLOADS)
    results = [compare(name, not args.eager, args.rounds, args.steps) for name in names]
    for result in results:
        print(json.dumps(result), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
