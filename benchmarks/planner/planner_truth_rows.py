"""Tables of published runs, in any of the formats they come in: columns by name, in any order, some of them missing."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planner.planner_truth_models import Shape
from echelon.planner.cluster.device_catalog import find_kind, kind_named, normalize_device_name

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
BEFORE_FLASH = ("a100", "v100", "p100", "t4")  # of published runs on these, none has fused attention
#: Network of a host by a word in a table's name, where it is not the usual one of its devices.
NETWORKS = {"a100_multi_node": "4x200Gb", "vtrain": "4x200Gb"}
UNPADDED = 50257  # GPT-2's vocabulary, which Megatron-LM pads to 51,200 for splits


@dataclass(frozen=True)
class RunOptions:
    """Fields of ``System`` that a table gives; None where it does not."""

    sequence_split: bool | None = None
    overlap: float | None = None
    hides_split: float | None = None


@dataclass(frozen=True)
class Row:
    """One run.

    recompute: none, selective, full, or "" where the table does not say
    seconds:   of a step
    network:   of a host, as ``Cluster.parse`` takes it; "": the usual one of the device
    open_micro, open_chunks: True if the table does not say the micro-batch, or the stages of a rank
    """

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
    options: RunOptions = RunOptions()
    network: str = ""
    open_micro: bool = False
    open_chunks: bool = False

    @property
    def micro_batch(self) -> float:
        return self.batch / self.replicate / self.micro_batches

    @property
    def task(self) -> tuple[object, ...]:
        """Return the task of the run: runs of the same task are choices to be compared."""
        return self.shape, self.device, self.gpus, self.batch, self.float8, self.compiled, self.name


class UnknownFormat(SystemExit):
    """A table without the columns that a row needs; the message is one line for the user."""


#: Names of a column, by what it holds; the first is the one that messages name.
NAMES = {
    "layers": ("layers", "num_layers", "n_layers"),
    "hidden": ("hidden", "hidden_size", "h"),
    "heads": ("heads", "attention_heads", "num_heads", "n_heads"),
    "seq": ("seq", "sequence", "seq_length", "sequence_length"),
    "vocab": ("vocab", "vocabulary", "vocab_size"),
    "ffn": ("ffn", "ffn_hidden", "intermediate_size"),
    "t": ("t", "tp", "tensor_parallel"),
    "p": ("p", "pp", "pipeline_parallel"),
    "d": ("d", "dp", "data_parallel"),
    "gpus": ("gpus", "num_gpus", "n_gpus"),
    "global_batch": ("global_batch", "batch", "batch_size", "global_batch_size", "gbs"),
    "micro_batch": ("micro_batch", "micro_batch_size", "mbs"),
    "virtual_stages": ("virtual_stages", "v", "interleave", "vpp"),
    "device": ("device", "gpu", "gpu_type"),
    "flash": ("flash", "flash_attention"),
    "sequence_split": ("sequence_parallel", "sp"),
    "overlap": ("overlap", "overlap_grad_reduce"),
    "shard": ("distributed_optimizer", "dist_opt", "shard"),
    "tp_overlap": ("tp_overlap", "tp_comm_overlap"),
    "network": ("network", "network_gbps", "network_gb_s", "host_network_gbps"),
    "tflops": ("tflops_per_gpu", "tflops", "tflop_s_per_gpu"),
    "tps": ("tps_per_gpu", "tokens_per_s_per_gpu", "tps"),
    "mfu": ("mfu", "mfu_pct", "mfu_percent"),
}
#: Words of a column of a step's time, such as ``step_s``, ``iteration_time_ms``, ``s_per_iter`` and ``step_time``.
UNITS = {"s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "msec": 1e-3, "millis": 1e-3}
STEP, TIME = {"step", "iter", "iteration"}, {"time", "elapsed", "duration", "measured"}
OF_OTHERS = {"total", "training", "train", "forward", "backward"}
#: Words of a column of the time under one way to recompute, such as ``full_recompute_s`` and ``selective``.
WAYS = {"selective": "selective", "present": "selective", "no": "none", "none": "none", "without": "none"}
WAYS = {**WAYS, "full": "full"}
BESIDE = {"recompute", "recomputation", "activation", "checkpointing", "work", "sequence", "parallel", "per", "and"}
RECOMPUTE = {"0": "none", "false": "none", "no": "none", "1": "full", "true": "full"}

Cells = dict[str, str]


def read(path: Path) -> list[Row]:
    """Return the runs of a table. A row with seconds of several ways to recompute is a run for each."""
    with path.open() as file:
        plain = [
            {_plain(key): (value or "").strip() for key, value in row.items() if key} for row in csv.DictReader(file)
        ]
    device = _device_in(path.stem)
    network = next((network for word, network in NETWORKS.items() if word in path.stem.lower()), "")
    rows: list[Row] = []
    for cells in plain:
        if _has(cells, "hidden"):
            rows += (_megatron(one, device, network) for one in _ways(cells, path))
        else:
            rows.append(_titan(cells, path))
    return rows


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")


def _device_in(stem: str) -> str:
    """Return the device that a file is named for, or A100."""
    found = (find_kind(word) for word in re.split(r"[^A-Za-z0-9]+", stem) if not word.isdigit())
    return next((kind.device.name for kind in found if kind), "A100")


def _has(cells: Cells, what: str) -> bool:
    return any(cells.get(name, "").lower() not in EMPTY for name in NAMES[what])


def _text(cells: Cells, what: str, usual: str = "") -> str:
    return next((cells[name] for name in NAMES[what] if cells.get(name, "").lower() not in EMPTY), usual)


def _number(cells: Cells, what: str, usual: float) -> float:
    text = _text(cells, what)
    words = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}
    return words[text.lower()] if text.lower() in words else float(text.rstrip("%")) if text else usual


def _ways(cells: Cells, path: Path) -> list[Cells]:
    """Return the row once for every measurement in it, each with its ``recompute`` and seconds."""
    _require(cells, path)
    ways = {name: way for name, value in cells.items() if (way := _way(name)) and _is_time(value)}
    runs = [{**cells, "recompute": way, "step_s": str(_seconds(cells, [name]))} for name, way in ways.items()]
    return runs or [cells]


def _way(name: str) -> str | None:
    """Return the way to recompute whose time is in a column of this name, if any."""
    words = name.split("_")
    if not set(words) <= {*WAYS, *BESIDE, *UNITS, *STEP, *TIME}:
        return None
    return next((WAYS[word] for word in WAYS if word in words), None)


def _is_time(value: str) -> bool:
    """Return True for a number but 0 and 1, which are flags where a column has no unit."""
    try:
        return value.lower() not in EMPTY and float(value) not in (0.0, 1.0)
    except ValueError:
        return False


def _is_step_time(name: str) -> bool:
    """Return True if a column of this name has the time of a step."""
    first, *others = name.split("_")
    words = {first, *others}
    if words & OF_OTHERS or (others[-2:-1] == ["per"] and others[-1] in UNITS):
        return False
    if others and others[-1] in UNITS:
        return bool(words & (STEP | TIME))
    return name == "seconds" or bool(words & STEP and (first in UNITS or words & TIME))


def _seconds(cells: Cells, names: Iterable[str]) -> float:
    """Return the time in the first of these columns that has one, in seconds; 0: none has."""
    for name in names:
        if cells[name].lower() not in EMPTY:
            unit = next((UNITS[word] for word in reversed(name.split("_")) if word in UNITS), 1.0)
            return float(cells[name]) * unit
    return 0.0


def _require(cells: Cells, path: Path) -> None:
    lacking = [what for what in ("layers", "hidden", "global_batch") if not _has(cells, what)]
    if not _has(cells, "gpus") and not all(_has(cells, what) for what in "tpd"):
        lacking.append("gpus (or t, p and d)")
    timed = any(_has(cells, what) for what in ("tflops", "tps", "mfu")) or any(map(_is_step_time, cells))
    if not timed and not any(_way(name) and _is_time(value) for name, value in cells.items()):
        lacking.append("step_s (or step_ms, tflops_per_gpu, tps_per_gpu, mfu, full_recompute_s, selective_s)")
    if lacking:
        raise UnknownFormat(
            f"{path}: no known format: it lacks the columns {', '.join(lacking)}; it has {', '.join(cells)}"
        )


def _megatron(cells: Cells, device: str, network: str) -> Row:
    device = _text(cells, "device", device)
    old = normalize_device_name(device).startswith(BEFORE_FLASH)
    hidden = int(_number(cells, "hidden", 0))
    shape = Shape(
        layers=int(_number(cells, "layers", 0)),
        hidden=hidden,
        heads=int(_number(cells, "heads", hidden / 128)),
        sequence=int(_number(cells, "seq", 2048 if old else 4096)),
        vocabulary=int(_number(cells, "vocab", 51200 if old else 131072)),
        ffn=int(_number(cells, "ffn", 0)),
        flash=_number(cells, "flash", not old) > 0,
        unpadded=UNPADDED if old and not _has(cells, "vocab") else 0,
    )
    split, stage = int(_number(cells, "t", 1)), int(_number(cells, "p", 1))
    gpus = int(_number(cells, "gpus", split * stage * _number(cells, "d", 1)))
    replicate = int(_number(cells, "d", gpus // (split * stage)))
    batch = int(_number(cells, "global_batch", 1))
    micro = _number(cells, "micro_batch", 1)
    recompute = cells.get("recompute", "").lower()
    recompute = RECOMPUTE.get(recompute, recompute) or ("none" if shape.flash else "")
    return Row(
        *(shape, device, gpus, replicate, stage, split, batch),
        micro_batches=max(1, round(batch / replicate / micro)),
        chunks=int(_number(cells, "virtual_stages", 1)),
        recompute=recompute,
        seconds=_gpt_seconds(cells, shape, gpus, batch, recompute, device),
        memory=float(cells.get("mem_gib") or 0) * GIB,
        name=cells.get("model", ""),
        shard=int(_number(cells, "shard", shape.flash) > 0),
        options=_options(cells, recompute),
        network=_network(cells, network),
        open_micro=not _has(cells, "micro_batch"),
        open_chunks=not _has(cells, "virtual_stages") and shape.flash and stage > 1,
    )


def _network(cells: Cells, usual: str) -> str:
    """Return the network of a host, which a table gives as ``4x200Gb`` or as a number of Gb/s."""
    written = _text(cells, "network", usual)
    return f"{written}Gb" if written.replace(".", "", 1).isdigit() else written


def _options(cells: Cells, recompute: str) -> RunOptions:
    """Return what the row says of its system. Selective recompute and sequence parallelism came together."""
    split = (
        _number(cells, "sequence_split", 1) > 0 if _has(cells, "sequence_split") or recompute == "selective" else None
    )
    overlap = _number(cells, "overlap", 0) if _has(cells, "overlap") else None
    hides = None if not _has(cells, "tp_overlap") or _number(cells, "tp_overlap", 0) > 0 else 0.0
    return RunOptions(sequence_split=split, overlap=overlap, hides_split=hides)


def _gpt_seconds(cells: Cells, shape: Shape, gpus: int, batch: int, recompute: str, device: str) -> float:
    """Return a step's seconds; those of TFLOP/s by the formula they are published with (Narayanan et al. 2021)."""
    given = ["step_s"] if cells.get("step_s") else [name for name in cells if _is_step_time(name)]
    if seconds := _seconds(cells, given):
        return seconds
    if _has(cells, "tps"):
        return batch * shape.sequence / gpus / _number(cells, "tps", 0)
    s, h = shape.sequence, shape.hidden
    passes = 4 if recompute in ("", "full") and not shape.flash else 3
    ends = shape.vocabulary / (4 * passes * shape.layers * h)
    work = 24 * passes * batch * s * shape.layers * h**2 * (1 + s / (6 * h) + ends)
    if _has(cells, "tflops"):
        return work / gpus / (_number(cells, "tflops", 0) * 1e12)
    mfu = _number(cells, "mfu", 0)
    return 3 * work / passes / gpus / (mfu / (100 if mfu > 1 else 1) * kind_named(device).device.peak_of("bfloat16"))


def _titan(cells: Cells, path: Path) -> Row:
    name, _, device = cells.get("model", "").partition("-")
    if name not in LLAMA:
        lacking = "layers, hidden, heads" if not name else f"a known 'model' ({', '.join(LLAMA)}) in place of '{name}'"
        raise UnknownFormat(f"{path}: no known format: it lacks the columns {lacking}; it has {', '.join(cells)}")
    lacking = [column for column in ("gpus", "local_batch", "tps_per_gpu", "seq") if column not in cells]
    if lacking:
        raise UnknownFormat(
            f"{path}: no known format: it lacks the columns {', '.join(lacking)}; it has {', '.join(cells)}"
        )
    layers, hidden, heads, ffn, kv = LLAMA[name]
    sequence = int(cells["seq"])
    shape = Shape(layers, hidden, heads, sequence, LLAMA_VOCABULARY, ffn, kv, llama=True, tied=False)
    split, stage, gpus = int(_number(cells, "t", 1)), int(_number(cells, "p", 1)), int(cells["gpus"])
    replicate = int(cells.get("fsdp") or gpus // (split * stage))
    local = int(cells["local_batch"])
    interleaved = "interleaved" in cells.get("schedule", "").lower()
    return Row(
        *(shape, _text(cells, "device", device or "H100"), gpus, replicate, stage, split, local * replicate),
        micro_batches=min(local, stage),  # what its pipeline takes where nothing is said
        chunks=2 if interleaved else 1,
        recompute=_titan_recompute(cells.get("ac", "")),
        seconds=local * replicate * sequence / gpus / float(cells["tps_per_gpu"]),
        memory=float(cells.get("mem_gib") or 0) * GIB,
        shard=1 if stage > 1 else 3,  # in a pipeline, parameters stay whole between the passes of a step
        compiled=_flag(cells, "compile"),
        float8=_flag(cells, "float8"),
        async_split=_flag(cells, "async_tp"),
        loss_compiled=cells.get("source") == "trainy",  # runs of a later version, which compiles the loss, too
        name=name,
    )


def _flag(cells: Cells, name: str) -> bool:
    return cells.get(name, "").lower() not in EMPTY | {"0", "false", "no"}


def _titan_recompute(written: str) -> str:
    word = written.lower()
    return "selective" if "sel" in word or "sac" in word or not word else "none" if word == "none" else "full"
