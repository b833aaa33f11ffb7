"""The largest batch of BERT-large that fits on one GPU, and its speed: fp32, bf16, recomputed, and offloaded.

    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python benchmarks/low_memory/recompute.py
        [--sequence 128 512] [--only NAME ...] [--steps 3] [--out results.json]

Peak memory is a line in the batch size: three small batches give it, the line gives the largest batch, and that batch
is run to confirm it (smaller ones follow while it does not fit, larger ones while it does). Before that, a small model
is trained both ways on the GPU and the gradients compared. Needs a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import echelon

GIB = 2**30
VOCABULARY = 30522
STEP_FACTOR = 1.02  # how close to the limit the search goes

STRATEGIES = {
    "fp32": echelon.Strategy(),
    "bf16": echelon.Strategy(amp="bf16"),
    "bf16+recompute": echelon.Strategy(amp="bf16", recompute=True),
    "bf16+recompute+offload": echelon.Strategy(amp="bf16", recompute=echelon.Recompute(offload=True)),
}


class Bert(nn.Module):
    """Token ids to the logits of the first 15 % of the positions, as many as pretraining masks."""

    def __init__(self, layers: int = 24, width: int = 1024, heads: int = 16, longest: int = 512) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(longest, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        h = self.dropout(self.norm(self.tokens(ids) + self.positions(places)))
        for layer in self.layers:
            h = layer(h)
        return self.head(h[:, : masked(ids.shape[1])])


def masked(sequence: int) -> int:
    return round(0.15 * sequence)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Run:
    peak: int  # bytes
    samples_per_s: float


def attempt(strategy: echelon.Strategy, sequence: int, batch: int, steps: int) -> Run | None:
    """Train a fresh model for some steps; None when it does not fit."""
    clean()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Bert()
        ids = torch.randint(VOCABULARY, (batch, sequence))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    log = echelon.Log(console=False)
    engine = echelon.distribute(model, loss=token_loss, optimizer=optimizer, strategy=strategy, log=log)
    targets = ids[:, : masked(sequence)].contiguous()
    try:
        engine.step(ids, targets)  # Adam makes its state, the allocator its blocks
        engine.step(ids, targets)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            engine.step(ids, targets)
        torch.cuda.synchronize()
        return Run(torch.cuda.max_memory_allocated(), batch * steps / (time.perf_counter() - begin))
    except torch.cuda.OutOfMemoryError:
        return None
    finally:
        engine.close()


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    if hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()  # pinned memory of another batch size is of no use to the next
    torch.cuda.reset_peak_memory_stats()


def largest(name: str, sequence: int, steps: int) -> dict[str, object]:
    strategy = STRATEGIES[name]
    small = [max(1, 4096 * factor // sequence) for factor in (1, 2, 4)]
    peaks = [run.peak for batch in small if (run := attempt(strategy, sequence, batch, 1)) is not None]
    if len(peaks) < 3:
        raise SystemExit(f"{name}: batches of {small} samples do not fit")
    slope = (peaks[-1] - peaks[-2]) / (small[-1] - small[-2])
    fixed = peaks[-1] - slope * small[-1]
    clean()
    limit = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    wanted = int((limit - fixed) / slope)
    ceiling = host_ceiling(sequence) if "offload" in name else None
    batch, run = confirm(strategy, sequence, min(wanted, ceiling or wanted), steps, ceiling)
    return {
        "strategy": name,
        "sequence": sequence,
        "largest_batch": batch,
        "samples_per_s": round(run.samples_per_s, 1),
        "peak_gib": round(run.peak / GIB, 1),
        "fixed_gib": round(fixed / GIB, 2),
        "mib_per_sample": round(slope / 2**20, 2),
        "limited_by": "host memory" if ceiling and batch >= ceiling else "device memory",
    }


def confirm(strategy: echelon.Strategy, sequence: int, batch: int, steps: int, ceiling: int | None) -> tuple[int, Run]:
    """The largest batch near ``batch`` that runs, to within STEP_FACTOR."""
    found: tuple[int, Run] | None = None
    too_large = False
    for _ in range(12):
        run = attempt(strategy, sequence, batch, steps)
        if run is None:
            too_large, batch = True, int(batch / STEP_FACTOR)
        else:
            found, batch = (batch, run), int(batch * STEP_FACTOR) + 1
        if found and (too_large or (ceiling is not None and batch > ceiling)):
            return found
    if found is None:
        raise SystemExit(f"no batch near {batch} fits; the memory per sample is not what small batches say")
    return found


def host_ceiling(sequence: int) -> int:
    """The batch whose kept inputs fill six tenths of the host's free memory; pinned blocks are powers of two."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    block = 2 ** ((int(0.6 * free) // 24).bit_length() - 1)
    return block // (sequence * 1024 * 4)


# ---- the same numbers, on this GPU ----


def gradients(strategy: echelon.Strategy) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Bert(layers=6, width=256, heads=4)
        ids = torch.randint(VOCABULARY, (32, 128))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    log = echelon.Log(console=False)
    engine = echelon.distribute(model, loss=token_loss, optimizer=optimizer, strategy=strategy, log=log)
    torch.manual_seed(1)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels' backward adds in no fixed order
        for _ in range(3):
            engine.step(ids, ids[:, : masked(128)].contiguous())
    engine.close()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def compare() -> dict[str, float]:
    """The largest difference of a gradient from the one without recomputation, relative to that gradient's largest."""
    plain = gradients(STRATEGIES["bf16"])
    repeated = zip(gradients(STRATEGIES["bf16"]), plain, strict=True)
    differences = {"bf16, again": max(difference(a, b) for a, b in repeated)}
    for name in ("bf16+recompute", "bf16+recompute+offload"):
        pairs = zip(gradients(STRATEGIES[name]), plain, strict=True)
        differences[name] = max(difference(mine, theirs) for mine, theirs in pairs)
        assert differences[name] <= max(1e-3, differences["bf16, again"]), (
            f"{name} changes the gradients: {differences}"
        )
    return differences


def difference(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12))


# ---- showing it ----


def table(rows: list[dict[str, object]]) -> Iterator[str]:
    base = {row["sequence"]: row["largest_batch"] for row in rows if row["strategy"] == "fp32"}
    yield f"{'strategy':24}{'sequence':>9}{'largest batch':>15}{'times fp32':>12}{'samples/s':>11}{'peak GiB':>10}"
    for row in rows:
        first = base.get(row["sequence"])
        times = f"{int(str(row['largest_batch'])) / int(str(first)):.2f}" if first else "-"
        yield (
            f"{row['strategy']:24}{row['sequence']:>9}{row['largest_batch']:>15}{times:>12}"
            f"{row['samples_per_s']:>11}{row['peak_gib']:>10}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequence", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--only", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/low_memory/recompute.py needs a GPU; torch sees none here")
    echelon.init()
    result: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "gradient_differences": compare(),
    }
    print(json.dumps(result), flush=True)
    rows: list[dict[str, object]] = []
    for sequence in args.sequence:
        for name in args.only:
            rows.append(largest(name, sequence, args.steps))
            print(json.dumps(rows[-1]), flush=True)
            if args.out:  # at every row: a run that is cut short leaves what it has
                args.out.write_text(json.dumps(result | {"rows": rows}, indent=1))
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
