"""Tables of published runs, in any of the formats they come in: columns by name, in any order, some of them missing."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planner.planner_truth_models import Shape

GIB = 2.0**30
EMPTY = {"", "-", "na", "n/a", "none", "nan"}

#: Llama 3.1 by its name in a table: layers, hidden, heads, ffn, part of the heads that keys have.
LLAMA = {
    "1B": (16, 2048, 32, 8192, 0.25),
    "3B": (28, 3072, 24, 8192, 1 / 3),
    "7B": (32, 4096, 32, 11008, 1.0),
    "8B": (32, 4096, 32, 14336, 0.25),
    "13B": (40, 5120, 40, 13824, 1.0),
    "70B": (80, 8192, 64, 28672, 0.125),
    "405B": (126, 16384, 128, 53248, 0.0625),
}
LLAMA_VOCABULARY = 128256


@dataclass(frozen=True)
class Row:
    """One run. recompute: none, selective, full, or "" where the table does not say; seconds: of a step."""

    shape: Shape
    device: str
    gpus: int
    replicate: int
    stage: int
    split: int
    batch: int
    micro_batches: int
    chunks: int
    recompute: str
    seconds: float
    memory: float = 0.0  # bytes that were measured; 0: not known
    shard: int = 0
    compiled: bool = False
    float8: bool = False
    async_split: bool = False
    loss_compiled: bool = False
    name: str = ""

    @property
    def micro_batch(self) -> float:
        return self.batch / self.replicate / self.micro_batches

    @property
    def task(self) -> tuple[object, ...]:
        """Return the task of the run: runs of the same task are choices to be compared."""
        return self.shape, self.device, self.gpus, self.batch, self.float8, self.compiled, self.name


def read(path: Path) -> list[Row]:
    with path.open() as file:
        plain = [
            {key.strip(): (value or "").strip() for key, value in row.items() if key} for row in csv.DictReader(file)
        ]
    return [_megatron(row) if row.get("hidden") else _titan(row) for row in plain]


def _number(row: dict[str, str], *names: str, usual: float | None = None) -> float:
    for name in names:
        if row.get(name, "").lower() not in EMPTY:
            return float(row[name])
    if usual is None:
        raise SystemExit(f"a row has none of {', '.join(names)}: {row}")
    return usual


def _megatron(row: dict[str, str]) -> Row:
    shape = Shape(
        layers=int(_number(row, "layers")),
        hidden=int(_number(row, "hidden")),
        heads=int(_number(row, "heads", usual=_number(row, "hidden") / 128)),
        sequence=int(_number(row, "seq", "sequence", usual=2048)),
        vocabulary=int(_number(row, "vocab", "vocabulary", usual=51200)),
        ffn=int(_number(row, "ffn", usual=0)),
    )
    split, stage = int(_number(row, "t", "tp", usual=1)), int(_number(row, "p", "pp", usual=1))
    gpus = int(_number(row, "gpus", usual=split * stage * _number(row, "d", "dp", usual=1)))
    replicate = int(_number(row, "d", "dp", usual=gpus // (split * stage)))
    batch = int(_number(row, "global_batch", "batch"))
    micro = _number(row, "micro_batch", usual=1)
    recompute = row.get("recompute", "").lower()
    return Row(
        *(shape, row.get("device") or row.get("gpu") or "A100", gpus, replicate, stage, split, batch),
        micro_batches=max(1, round(batch / replicate / micro)),
        chunks=int(_number(row, "virtual_stages", "v", usual=1)),
        recompute={"0": "none", "false": "none", "no": "none", "1": "full", "true": "full"}.get(recompute, recompute),
        seconds=_gpt_seconds(row, shape, gpus, batch, recompute),
        memory=_number(row, "mem_GiB", usual=0) * GIB,
        name=row.get("model", "") if row.get("model") else "",
    )


def _gpt_seconds(row: dict[str, str], shape: Shape, gpus: int, batch: int, recompute: str) -> float:
    """From TFLOP/s by the formula they are published with: 72 B s l h^2 (...), 96 where everything is recomputed."""
    if row.get("step_ms"):
        return _number(row, "step_ms") / 1e3
    if row.get("step_s"):
        return _number(row, "step_s")
    if row.get("tps_per_gpu"):
        return batch * shape.sequence / gpus / _number(row, "tps_per_gpu")
    s, h = shape.sequence, shape.hidden
    times = 72 if recompute in ("none", "selective") else 96
    ends = shape.vocabulary / (16 * shape.layers * h)
    work = times * batch * s * shape.layers * h**2 * (1 + s / (6 * h) + ends)
    return work / gpus / (_number(row, "tflops_per_gpu") * 1e12)


def _titan(row: dict[str, str]) -> Row:
    name, _, device = row.get("model", "").partition("-")
    if name not in LLAMA:
        raise SystemExit(f"a row has neither layers, hidden and heads nor one of the models {', '.join(LLAMA)}: {row}")
    layers, hidden, heads, ffn, kv = LLAMA[name]
    sequence = int(_number(row, "seq"))
    shape = Shape(layers, hidden, heads, sequence, LLAMA_VOCABULARY, ffn, kv, llama=True, tied=False)
    split, stage = int(_number(row, "tp", usual=1)), int(_number(row, "pp", usual=1))
    gpus = int(_number(row, "gpus"))
    replicate = int(_number(row, "fsdp", usual=gpus // (split * stage)))
    local = int(_number(row, "local_batch"))
    speed = _number(row, "tps_per_gpu")
    interleaved = "interleaved" in row.get("schedule", "").lower()
    return Row(
        *(shape, row.get("device") or device or "H100", gpus, replicate, stage, split, local * replicate),
        micro_batches=min(local, stage),  # what its pipeline takes where nothing is said
        chunks=2 if interleaved else 1,
        recompute=_titan_recompute(row.get("ac", "")),
        seconds=local * replicate * sequence / gpus / speed,
        memory=_number(row, "mem_GiB", usual=0) * GIB,
        shard=1 if stage > 1 else 3,  # in a pipeline, parameters stay whole between the passes of a step
        compiled=_number(row, "compile", usual=0) > 0,
        float8=_number(row, "float8", usual=0) > 0,
        async_split=_number(row, "async_tp", usual=0) > 0,
        loss_compiled=row.get("source") == "trainy",  # runs of a later version, which compiles the loss, too
        name=name,
    )


def _titan_recompute(written: str) -> str:
    word = written.lower()
    return "selective" if "sel" in word or "sac" in word or not word else "none" if word == "none" else "full"
