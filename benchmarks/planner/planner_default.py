"""Runs without a strategy on one GPU, foretold and measured, and ``auto`` beside them.

    python benchmarks/planner/planner_default.py settings OUT [--only WORD ...] [--steps 8]
    python benchmarks/planner/planner_default.py auto OUT [--only WORD ...]
    python benchmarks/planner/planner_default.py foretell OUT --bench FILE

settings: each setting of default_models.py trains in a process of its own: waves of processes compile side by side,
          then each measures alone: seconds of a step, peak memory, and its slowest kernels
auto:     for each task a run without a strategy and one with ``auto``, in turn; ratios of their speed
foretell: predictions beside the settings that were measured into OUT; needs no GPU
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import echelon
from benchmarks.planner.default_models import SETTINGS, TASKS, Setting
from echelon.distributed import world as worlds
from echelon.fastpath.inspect import machine_of
from echelon.plan.draft import Draft
from echelon.planner.apply.save_plan import make_saved_plan
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.cost.predict import predict
from echelon.planner.cost.system import ECHELON
from echelon.planner.default_run import capabilities_of, find_default_run
from echelon.planner.profiling.profile import Profile, profile

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
AT_ONCE = 6  #: processes of a wave
GRAPH_STEPS = 56  #: steps after which a graph is kept, or not
GB = 1e9


# ---- one process ----


def profile_of(setting: Setting) -> Profile:
    task = TASKS[setting.task]
    with torch.device("meta"):
        model = task.model()
        batch = task.batch(8)
    return profile(model, batch, loss=task.loss, name=setting.task, device="cuda")


def saved_plan(setting: Setting, found: Profile, usual: Any) -> Any:
    recompute = (True,) if setting.options.get("recompute") else ()
    draft = Draft(
        batch=setting.rows, micro_batches=setting.micro_batches, amp=usual.amp, recompute=recompute,
        compile=usual.compiled is not None,
    )  # fmt: skip
    return make_saved_plan(draft, found)


def measure(setting: Setting, folder: Path, steps: int) -> dict[str, Any]:
    """Train a setting; wait for the turn before measuring."""
    echelon.init(seed=0)
    task, found = TASKS[setting.task], profile_of(setting)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model, batch = task.model(), task.batch(setting.rows)
    optimizer = task.make_optimizer(model)
    usual = find_default_run(model, task.loss, {"": optimizer}, machine_of(worlds.current()))
    plan = make_saved_plan(saved_plan(setting, found, usual).draft, found, model=model)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        log = echelon.Log(lines=False)
        engine = echelon.distribute(model, loss=task.loss, optimizer=optimizer, plan=plan, log=log)
        weights = memory()
        begun = time.perf_counter()
        for _ in range(3):
            engine.step(*batch)
        wait()
        start_s = time.perf_counter() - begun
        turn(setting, folder)
        reset_peak()
        eager = timed(engine, batch, steps)
        peak = peak_memory()
        lap = statistics.median(eager)
        if lap < 0.25:
            for _ in range(GRAPH_STEPS):
                engine.step(*batch)
        seconds = [statistics.median(timed(engine, batch, steps)) for _ in range(3)]
        kernels = slowest_kernels(engine, batch)
    return {
        "setting": setting.name, "seen": setting.seen, "ms": 1e3 * statistics.median(seconds),
        "before_graphs_ms": 1e3 * lap,
        "spread": max(seconds) / min(seconds) - 1, "peak_gb": peak / GB, "graph_peak_gb": peak_memory() / GB,
        "held_gb": memory() / GB, "weights_gb": weights / GB, "start_s": start_s, "usual": str(usual),
        "kernels": kernels,
        "said": said.getvalue().splitlines()[-12:],
    }  # fmt: skip


def turn(setting: Setting, folder: Path) -> None:
    (folder / f"{setting.name}.ready").touch()
    while not (folder / f"{setting.name}.go").exists():
        time.sleep(0.05)


def timed(engine: Any, batch: Any, steps: int) -> list[float]:
    seconds = []
    for _ in range(steps):
        wait()
        begun = time.perf_counter()
        engine.step(*batch)
        wait()
        seconds.append(time.perf_counter() - begun)
    return seconds


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def memory() -> float:
    return torch.cuda.memory_allocated() if ON_GPU else 0.0


def peak_memory() -> float:
    return torch.cuda.max_memory_allocated() if ON_GPU else 0.0


def reset_peak() -> None:
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()


def slowest_kernels(engine: Any, batch: Any, most: int = 400) -> list[tuple[str, int, float]]:
    """Return names, counts and microseconds of the slowest kernels of one step."""
    if not ON_GPU:
        return []
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as tracing

    with tracing(activities=[ProfilerActivity.CUDA]) as trace:
        engine.step(*batch)
        wait()
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            sums[event.name][0] += 1
            sums[event.name][1] += event.device_time
    ordered = sorted(sums.items(), key=lambda item: -item[1][1])[:most]
    return [(name[:160], int(count), round(micros, 1)) for name, (count, micros) in ordered]


# ---- all settings ----


def run_settings(out: Path, words: list[str], steps: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    chosen = [each for each in SETTINGS if not words or any(word in each.name for word in words)]
    cache = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(out.parent / "inductor_cache"), "PYTHONUNBUFFERED": "1"}
    rows: list[dict[str, Any]] = []
    while chosen:
        wave, chosen = chosen[:AT_ONCE], chosen[AT_ONCE:]
        rows += run_wave(wave, out, cache, steps)
        (out / "settings.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{len(rows)} settings measured")


def run_wave(
    wave: Sequence[Setting], out: Path, environment: dict[str, str], steps: int, part: str = "one"
) -> list[dict[str, Any]]:
    running = {}
    turns = out.parent / "turns"
    shutil.rmtree(turns, ignore_errors=True)
    turns.mkdir(parents=True)
    for setting in wave:
        words = [sys.executable, __file__, part, str(turns), "--only", setting.name, "--steps", str(steps)]
        log = (turns / f"{setting.name}.log").open("w")
        running[setting.name] = subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)
    until = time.monotonic() + 240
    while time.monotonic() < until and not all(
        child.poll() is not None or (turns / f"{name}.ready").exists() for name, child in running.items()
    ):
        time.sleep(0.1)
    rows = []
    for name, child in running.items():
        if not (turns / f"{name}.ready").exists():
            child.kill()
            print(f"{name}: failed\n{(turns / f'{name}.log').read_text()[-1500:]}", flush=True)
            continue
        (turns / f"{name}.go").touch()
        try:
            child.wait(90)
        except subprocess.TimeoutExpired:
            child.kill()
        found = turns / f"{name}.json"
        if not found.exists():
            print(f"{name}: failed\n{(turns / f'{name}.log').read_text()[-1500:]}", flush=True)
            continue
        rows.append(json.loads(found.read_text()))
        brief = {key: value for key, value in rows[-1].items() if key not in ("said", "kernels")}
        print(json.dumps(brief), flush=True)
    return rows


def run_one(folder: Path, words: list[str], steps: int) -> None:
    setting = next(each for each in SETTINGS if each.name == words[0])
    row = measure(setting, folder, steps)
    (folder / f"{setting.name}.json").write_text(json.dumps(row))


# ---- auto beside a run without a strategy ----


def run_auto(out: Path, words: list[str], steps: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    cache = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(out.parent / "inductor_cache"), "PYTHONUNBUFFERED": "1"}
    rows: list[dict[str, Any]] = []
    for wave in AUTO_WAVES:
        chosen = [each for each in wave if not words or any(word in each.name for word in words)]
        rows += run_wave(chosen, out, cache, steps, part="pair")
        (out / "auto.json").write_text(json.dumps(rows, indent=1) + "\n")
    worst = min((row["auto_speed"] for row in rows if row["auto_speed"]), default=0.0)
    print(f"{len(rows)} tasks: auto is at least {worst:.3f} as fast as a run without a strategy")


def run_pair(folder: Path, words: list[str], steps: int) -> None:
    setting = next(each for wave in AUTO_WAVES for each in wave if each.name == words[0])
    echelon.init(seed=0)
    with torch.device(DEVICE):
        batch = TASKS[setting.task].batch(setting.rows)
    contenders = {"plain": echelon.Strategy(), "auto": echelon.Strategy(auto=True)}
    engines, said = {}, {}
    for name, strategy in contenders.items():
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            engines[name] = started(setting, strategy, batch)
        said[name] = [line for line in text.getvalue().splitlines() if "auto" in line or "fast" in line]
    turn(setting, folder)
    laps: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(4):
        for name, engine in engines.items():
            if engine is not None:
                engine.step(*batch)
                laps[name].append(statistics.median(timed(engine, batch, steps)))
    ms = {name: 1e3 * statistics.median(found) if found else None for name, found in laps.items()}
    speed = ms["plain"] / ms["auto"] if ms["plain"] and ms["auto"] else None
    row = {"setting": setting.name, "ms": ms["auto"], "plain_ms": ms["plain"], "auto_speed": speed, "said": said}
    (folder / f"{setting.name}.json").write_text(json.dumps(row))


def started(setting: Setting, strategy: echelon.Strategy, batch: Any) -> Any:
    """Return an engine after its first steps, in which graphs are captured; None if it runs out of memory."""
    task = TASKS[setting.task]
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = task.model()
    optimizer, log = task.make_optimizer(model), echelon.Log(lines=False)
    engine = echelon.distribute(model, loss=task.loss, optimizer=optimizer, strategy=strategy, log=log)
    if _begins(engine, batch):
        return engine
    engine.close()
    del engine, model, optimizer
    gc.collect()
    torch.cuda.empty_cache()
    return None


def _begins(engine: Any, batch: Any) -> bool:
    """Return False if the first steps run out of memory; the error is gone then, with all that it holds."""
    begun = time.perf_counter()
    try:
        for step in range(GRAPH_STEPS + 8):
            engine.step(*batch)
            if step > 4 and time.perf_counter() - begun > 25:
                break
        wait()
    except torch.cuda.OutOfMemoryError:
        return False
    return True


AUTO_WAVES = (
    (Setting("resnet50", 64), Setting("convnext_tiny", 128), Setting("lstm", 64), Setting("bert_large_128", 64)),
    (Setting("gpt2_medium", 16), Setting("llama_350m", 16), Setting("t5_base", 16)),
    (Setting("llama_1b", 48),),
)


# ---- predictions ----


def foretell(out: Path, bench: Path) -> None:
    """Print predictions beside OUT/settings.json, and write both to OUT/foretold.json."""
    measured = {row["setting"]: row for row in json.loads((out / "settings.json").read_text())}
    cluster, profiles, rows = Cluster.parse("1xH200", bench=bench), dict[str, Profile](), list[dict[str, Any]]()
    for setting in SETTINGS:
        if setting.name in measured:
            if setting.task not in profiles:
                profiles[setting.task] = profile_of(setting)
            rows.append(compared(setting, profiles[setting.task], cluster, measured[setting.name]))
            print("{setting:36} {ms:7.1f} ms {time_off:+6.1%}  {gb:6.2f} GB {memory_off:+6.1%}".format(**rows[-1]))
    for seen in (True, False):
        for name in ("time_off", "memory_off"):
            off = [abs(row[name]) for row in rows if row["seen"] is seen]
            if off:
                words = f"{'seen' if seen else 'not seen before'}: {name}: mean {statistics.mean(off):.1%}"
                print(f"{words}, at most {max(off):.1%}, {sum(each <= 0.1 for each in off)} of {len(off)} within 10 %")
    (out / "foretold.json").write_text(json.dumps(rows, indent=1) + "\n")


def compared(setting: Setting, found: Profile, cluster: Cluster, row: dict[str, Any]) -> dict[str, Any]:
    task = TASKS[setting.task]
    usual = find_default_run(found.model, task.loss, {}, capabilities_of(cluster))
    draft = saved_plan(setting, found, usual).draft
    told = predict(found, cluster, draft, optimizer=task.optimizer, system=usual.runtime(ECHELON))
    seconds, size = told.seconds, told.fullest.total
    return {
        "setting": setting.name, "seen": setting.seen, "ms": row["ms"], "foretold_ms": 1e3 * seconds,
        "time_off": 1e3 * seconds / row["ms"] - 1, "gb": row["peak_gb"], "foretold_gb": size / GB,
        "memory_off": size / GB / row["peak_gb"] - 1,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("settings", "one", "auto", "pair", "foretell"))
    parser.add_argument("--bench", type=Path, help="of 'echelon bench', for foretell")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    if args.part == "foretell":
        foretell(args.out, args.bench)
        return
    parts = {"settings": run_settings, "one": run_one, "auto": run_auto, "pair": run_pair}
    parts[args.part](args.out, args.only, args.steps)


if __name__ == "__main__":
    main()
