"""BERT-large pretraining on sequences of different length, on one GPU: Echelon's packed rows beside padded loops.

    python benchmarks/gpu/packing_gpu.py [--rows 128 512] [--lengths documents speeches]
           [--rounds 3] [--out results.json]

    hand-written         transformers' BertForMaskedLM, rows padded to their full length, logits of all tokens;
                         compiled, bf16, fused AdamW: what one writes by hand
    hand-written, asked  the zoo's model, padded in the same way, with logits of the masked words only; compiled
    echelon, packed      the zoo's model through echelon.distribute, rows packed; what the fast path does by itself
                         (compiled blocks, bf16, a fused optimizer) asked for by hand
    echelon, by default  the same with nothing asked for

15 % of the words are masked, and dropout is 0.1 everywhere. Lengths are log-normal, cut at the row: "documents" has the
median 220 tokens and the deviation 1 of the logarithm, by which half of rows of 512 is padding, as Krell et al. (2021)
found of Wikipedia; "speeches" 22 and 0.95, as those of Shakespeare's plays. Batches lie on the GPU, the same samples
for all; contenders take turns, and figures are medians over rounds. Needs a GPU and transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import echelon
from echelon.data.seeding import chain_each
from echelon.data.transfer import each_tensor
from echelon.zoo import registry
from echelon.zoo.datasets.tokens.masking import MaskedRows
from echelon.zoo.datasets.tokens.packing import PackedRows
from echelon.zoo.datasets.tokens.token_rows import SpecialTokens, TokenRows
from echelon.zoo.entry import Request
from echelon.zoo.tasks import IGNORED, TASKS

VOCABULARY = 30522
BATCHES = 8  #: different ones
LENGTHS = {"documents": (math.log(220), 1.0), "speeches": (math.log(22), 0.95)}
LOSS = TASKS["masked_lm"].loss
Step = Callable[[Any], object]


class Workload(NamedTuple):
    """Padded and packed batches of the same samples, on the GPU."""

    padded: list[Any]
    packed: list[Any]
    sequences: int
    tokens: int
    used: float


def workload(row: int, batch: int, lengths: str, multiple: int) -> Workload:
    draw, count = np.random.RandomState(0), BATCHES * batch
    middle, deviation = LENGTHS[lengths]
    sizes = np.clip(np.exp(draw.normal(middle, deviation, count)).astype(np.int64), 8, row)
    first = np.maximum(1, ((sizes - 3) * draw.rand(count)).astype(np.int64))
    text = draw.randint(5, VOCABULARY, 10 * row + count).astype(np.int32)
    begins = draw.randint(0, 9 * row, (2, count))
    spans = np.stack([begins[0], first, begins[1], sizes - 3 - first], 1)
    rows = MaskedRows(
        TokenRows(text, spans, row, SpecialTokens(0, 2, 3, 4)),
        draw.randint(0, 2, count),
        most=round(0.15 * row) + 1,
        others=np.arange(5, VOCABULARY),
    )
    made = [
        [
            each_tensor(source.batch(np.arange(at, at + batch), _seeds(at, batch)), lambda tensor: tensor.cuda())
            for at in range(0, count, batch)
        ]
        for source in (rows, PackedRows(rows, multiple))
    ]
    used = int(rows.rows.used().sum())
    return Workload(made[0], made[1], count, used, used / (count * row))


def _seeds(at: int, batch: int) -> Any:
    return chain_each(0, np.arange(at, at + batch))


# ---- contenders ----


def hand_written(row: int, how: str) -> Step:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = BertForMaskedLM(config).cuda()
    compile_parts([*model.bert.encoder.layer, model.cls] if how == "layers" else [model])

    def loss(batch: Any) -> Tensor:
        tokens, segments, mask, positions, (labels, _) = batch
        every = torch.full_like(tokens, IGNORED)
        every.scatter_(1, positions, labels)  # what is no masked word points at [CLS], which stays ignored
        out: Tensor = model(input_ids=tokens, attention_mask=mask, token_type_ids=segments, labels=every).loss
        return out

    return by_hand(model, loss)


def hand_written_asked(row: int, how: str) -> Step:
    model = zoo_model(row)
    compile_parts([*model.layers, model.guess] if how == "layers" else [model])  # type: ignore[list-item, misc]
    return by_hand(model, lambda batch: LOSS(model(*batch[:-1]), batch[-1]))


def compile_parts(parts: Sequence[nn.Module]) -> None:
    for part in parts:
        part.compile()


def by_hand(model: nn.Module, loss_of: Callable[[Any], Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: Any) -> object:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def packed(row: int, how: str) -> Step:
    model = zoo_model(row)
    compile_parts(model.layers)  # type: ignore[arg-type]
    engine = echelon.distribute(
        model,
        loss=LOSS,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        strategy=echelon.Strategy(amp="bf16"),
        log=echelon.Log(console=False, every=50),
    )
    return lambda batch: engine.step(*batch)


def zoo_model(row: int, **sizes: int) -> nn.Module:
    torch.manual_seed(0)
    entry = registry.model("bert_large")
    values = {setting.name: setting.default for setting in entry.settings} | {"max_seq_length": row} | sizes
    return entry.build(Request(values, "masked_lm")).cuda()


def by_default(row: int, how: str) -> Step:
    model = zoo_model(row)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = echelon.distribute(model, loss=LOSS, optimizer=optimizer, log=echelon.Log(console=False, every=50))
    return lambda batch: engine.step(*batch)


CONTENDERS: dict[str, tuple[Callable[[int, str], Step], str]] = {
    "hand-written": (hand_written, "padded"),
    "hand-written, asked": (hand_written_asked, "padded"),
    "echelon, packed": (packed, "packed"),
    "echelon, by default": (by_default, "packed"),
}
BARS, OURS = ("hand-written", "hand-written, asked"), ("echelon, packed", "echelon, by default")


# ---- measuring ----


def compare(row: int, batch: int, lengths: str, args: argparse.Namespace) -> dict[str, Any]:
    data = workload(row, batch, lengths, args.multiple)
    steps, started = {}, {}
    for name in args.contenders:
        make, form = CONTENDERS[name]
        begin = time.perf_counter()
        step, batches = make(row, args.compile), cycle(getattr(data, form))
        seconds(step, batches, BATCHES)
        steps[name], started[name] = (step, batches), round(time.perf_counter() - begin, 1)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(args.rounds):
        for name in sorted(steps, reverse=bool(turn % 2)):
            found[name].append(seconds(*steps[name], BATCHES))
    middle = {name: statistics.median(times) for name, times in found.items()}
    return {
        "row": row,
        "batch": batch,
        "compile": args.compile,
        "lengths": lengths,
        "used": round(data.used, 3),
        "sequences_per_s": {name: round(data.sequences / value, 1) for name, value in middle.items()},
        "real_tokens_per_s": {name: round(data.tokens / value) for name, value in middle.items()},
        "times": {
            f"{ours} / {bar}": _ratio(found, ours, bar) for ours in OURS for bar in BARS if {ours, bar} <= set(found)
        },
        "start_s": started,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def seconds(step: Step, batches: Iterator[Any], count: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        step(next(batches))
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _ratio(found: dict[str, list[float]], ours: str, bar: str) -> float:
    """Return the speed as a multiple of ``bar`` within a round; the median."""
    return round(statistics.median(b / a for a, b in zip(found[ours], found[bar], strict=True)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--tokens", type=int, default=32768, help="of a padded batch")
    parser.add_argument("--lengths", choices=list(LENGTHS), nargs="+", default=["documents"])
    parser.add_argument("--contenders", choices=list(CONTENDERS), nargs="+", default=list(CONTENDERS))
    parser.add_argument("--compile", choices=["whole", "layers"], default="whole", help="of what is written by hand")
    parser.add_argument("--multiple", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu/packing_gpu.py needs a GPU; torch sees none here")
    echelon.init()
    results = []
    for row in args.rows:
        for lengths in args.lengths:
            torch._dynamo.reset()
            results.append(compare(row, args.tokens // row, lengths, args))
            print(json.dumps(results[-1]), flush=True)
            torch.cuda.empty_cache()
            if args.out:
                args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
