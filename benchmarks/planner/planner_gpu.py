"""Step time and memory on one GPU as the planner foretells them beside measured ones, and its choices beside others.

    python benchmarks/planner/planner_gpu.py [--only settings|choices] [--bench FILE] [--steps 5] [--compile]
         [--out results.json]

settings: ResNet-50, BERT-large and a GPT with different batches, words, types, recomputation and micro-batches, each
          built, warmed up and trained in this process; seconds are the median of the steps, memory is what torch's
          allocator had at most in them
choices:  for two models under a limit of memory every number of micro-batches, with and without recomputation (and,
          with --compile, compilation), measured; those above the limit are out. The planner's choice is one of them

Figures of the device are those of ``echelon bench``, measured first unless --bench names them. Without a GPU tiny
models run on the CPU: to see that all runs, the figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import echelon
from benchmarks.planner.planner_gpu_models import RESNET, TINY, Workload, bert_large, gpt
from echelon.plan.draft import Draft
from echelon.planner.apply.save_plan import make_saved_plan
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.cost.predict import predict
from echelon.planner.plan_search.search import search
from echelon.planner.profiling.profile import Profile, profile

TIME_BOUND, MEMORY_BOUND, WANTED = 0.15, 0.07, 0.97
WARM_UP = 2
ON_GPU = torch.cuda.is_available()
GB = 1e9


@dataclass(frozen=True)
class Setting:
    work: Workload
    rows: int
    amp: Literal["bf16"] | None = "bf16"
    recompute: bool = False
    micro_batches: int = 1
    compile: bool = False

    @property
    def draft(self) -> Draft:
        again = (True,) if self.recompute else ()
        plain = Draft(batch=self.rows, micro_batches=self.micro_batches, amp=self.amp, recompute=again)
        return plain.replaced(compile=self.compile)

    def __str__(self) -> str:
        words = [f"batch {self.rows}", self.amp or "fp32", "recompute" if self.recompute else ""]
        words += [f"{self.micro_batches} micro-batches" if self.micro_batches > 1 else ""]
        return ", ".join(word for word in [*words, "compile" if self.compile else ""] if word)


@dataclass(frozen=True)
class Measured:
    seconds: float
    peak: float


def settings() -> list[Setting]:
    if not ON_GPU:
        return [Setting(TINY["resnet"], 8, None), Setting(TINY["bert"], 8), Setting(TINY["gpt"], 8, None, True, 2)]
    return [
        Setting(RESNET, 64, None),
        Setting(RESNET, 128),
        Setting(RESNET, 256),
        Setting(RESNET, 256, recompute=True),
        Setting(bert_large(128), 64, None),
        Setting(bert_large(128), 128),
        Setting(bert_large(512), 32),
        Setting(bert_large(512), 64, recompute=True),
        Setting(bert_large(512), 64, micro_batches=4),
        Setting(gpt(1024), 8, None),
        Setting(gpt(1024), 16),
        Setting(gpt(1024), 32, recompute=True),
        Setting(gpt(2048), 16, micro_batches=2),
    ]


def others() -> list[Setting]:
    """Settings that were not used when the cost model was made."""
    if not ON_GPU:
        return []
    return [
        Setting(RESNET, 192, micro_batches=2),
        Setting(RESNET, 96, None, recompute=True),
        Setting(bert_large(256), 96),
        Setting(bert_large(384), 48, recompute=True, micro_batches=2),
        Setting(gpt(512, 16, 1536), 48),
        Setting(gpt(1024, 12, 768), 32, recompute=True),
    ]


@dataclass(frozen=True)
class Question:
    """Return the choice for ``rows`` of a workload, in ``memory`` bytes."""

    work: Workload
    rows: int
    memory: float
    counts: tuple[int, ...]

    def answers(self, compiled: bool) -> list[Setting]:
        ways = itertools.product(self.counts, (False, True), (False, True) if compiled else (False,))
        return [Setting(self.work, self.rows, "bf16", again, count, fused) for count, again, fused in ways]


def questions() -> list[Question]:
    if not ON_GPU:
        return [Question(TINY["gpt"], 8, 1e9, (1, 2))]
    counts = (1, 2, 4, 8, 16)
    return [
        Question(bert_large(512), 128, 30 * GB, counts),
        Question(bert_large(512), 128, 10 * GB, counts),
        Question(gpt(1024), 32, 25 * GB, counts),
        Question(gpt(1024), 32, 12 * GB, counts),
    ]


# ---- measuring ----


def attempt(setting: Setting, found: Profile, steps: int) -> Measured | None:
    """Train a fresh model for some steps; None when it does not fit."""
    clean()
    torch.manual_seed(0)
    with torch.device("cuda" if ON_GPU else "cpu"):
        model = setting.work.model()
        batch = setting.work.batch(setting.rows)
    if setting.compile:
        for name in found.names:
            model.get_submodule(name).compile()
    saved = make_saved_plan(setting.draft, found, model=model)
    log = echelon.Log(console=False)
    stepping = setting.work.stepping(model)
    try:
        engine = echelon.distribute(model, loss=setting.work.loss, optimizer=stepping, plan=saved, log=log)
        with contextlib.closing(engine):
            return _timed(engine, batch, steps)
    except torch.cuda.OutOfMemoryError:
        return None


def _timed(engine: Any, batch: Any, steps: int) -> Measured:
    for _ in range(WARM_UP):
        engine.step(*batch)
    if ON_GPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step(*batch)
        if ON_GPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() if ON_GPU else 1.0
    return Measured(statistics.median(seconds), peak)


def clean() -> None:
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class Profiles:
    """Profiles of every workload, made once, without the device."""

    def __init__(self) -> None:
        self._found: dict[str, Profile] = {}

    def of(self, work: Workload) -> Profile:
        if work.name not in self._found:
            with torch.device("meta"):
                model, batch = work.model(), work.batch(8)
            self._found[work.name] = profile(
                model, batch, loss=work.loss, name=work.name, device="cuda" if ON_GPU else "cpu"
            )
        return self._found[work.name]


# ---- the two parts ----


def foretold(setting: Setting, found: Profile, cluster: Cluster) -> Measured:
    told = predict(found, cluster, setting.draft, optimizer=setting.work.optimizer)
    return Measured(told.seconds, told.fullest.total)


def part_settings(cluster: Cluster, profiles: Profiles, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    seen = settings()
    for setting in seen + others():
        told = foretold(setting, profiles.of(setting.work), cluster)
        measured = attempt(setting, profiles.of(setting.work), args.steps)
        row = {"model": setting.work.name, "setting": str(setting), "seen": setting in seen} | _figures(told, measured)
        _progress(row)
        yield row


def _figures(told: Measured, measured: Measured | None) -> dict[str, Any]:
    figures: dict[str, Any] = {"foretold_ms": round(1e3 * told.seconds, 2), "foretold_gb": round(told.peak / GB, 3)}
    if measured is None:
        return figures | {"measured_ms": None, "measured_gb": None}
    return figures | {
        "measured_ms": round(1e3 * measured.seconds, 2),
        "measured_gb": round(measured.peak / GB, 3),
        "time_off": round(told.seconds / measured.seconds - 1, 4),
        "memory_off": round(told.peak / measured.peak - 1, 4),
    }


def part_choices(cluster: Cluster, profiles: Profiles, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    kept: dict[tuple[str, str], Measured | None] = {}  # two limits share what was measured
    for question in questions():
        work, found = question.work, profiles.of(question.work)
        chosen = choose(question, found, cluster, args.compile)
        settings = question.answers(args.compile)
        if chosen is not None and chosen not in [setting.draft for setting in settings]:
            settings.append(_of_draft(work, chosen))
        for setting in settings:
            if (work.name, str(setting)) not in kept:
                kept[work.name, str(setting)] = attempt(setting, found, args.steps)
        measured = {setting: kept[work.name, str(setting)] for setting in settings}
        told = {setting: foretold(setting, found, cluster) for setting in settings}
        row = judged(question, measured, told, chosen)
        _progress({name: row[name] for name in ("model", "limit_gb", "chosen", "best", "of_the_best")})
        yield row


def choose(question: Question, found: Profile, cluster: Cluster, compiled: bool) -> Draft | None:
    """The planner's choice; compiled or not, where that is asked, by what it foretells of the best of both."""
    answers = [
        search(
            found,
            cluster,
            batch=question.rows,
            allow=("amp",),
            memory=question.memory,
            optimizer=question.work.optimizer,
            fixed={"amp": "bf16", "compile": fused},
        )
        for fused in ((False, True) if compiled else (False,))
    ]
    best = [answer.best[0] for answer in answers if answer.best]
    return min(best, key=lambda choice: choice.seconds).draft if best else None


def _of_draft(work: Workload, draft: Draft) -> Setting:
    again = any(draft.recompute)
    amp: Literal["bf16"] | None = "bf16" if draft.amp == "bf16" else None
    return Setting(work, draft.batch, amp, again, draft.micro_batches, draft.compile)


def judged(
    question: Question,
    measured: dict[Setting, Measured | None],
    told: dict[Setting, Measured],
    chosen: Draft | None,
) -> dict[str, Any]:
    fitting = {s: found for s, found in measured.items() if found is not None and found.peak <= question.memory}
    best = min(fitting, key=lambda setting: fitting[setting].seconds)
    mine = next((setting for setting in fitting if setting.draft == chosen), None)
    return {
        "model": question.work.name,
        "limit_gb": question.memory / GB,
        "chosen": str(mine) if mine else f"{chosen} (does not fit)",
        "best": str(best),
        "of_the_best": round(fitting[best].seconds / fitting[mine].seconds, 4) if mine else 0.0,
        "all": [{"setting": str(s)} | _figures(told[s], found) for s, found in measured.items()],
    }


# ---- what is told ----


def show_settings(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'model':26} {'setting':34} {'ms':>8} {'foretold':>9} {'off':>7} {'GB':>7} {'foretold':>9} {'off':>7}")
    done = [row for row in rows if row["measured_ms"] is not None]
    for r in done:
        print(
            f"{r['model']:26} {r['setting']:34} {r['measured_ms']:8.1f} {r['foretold_ms']:9.1f} {r['time_off']:+7.1%} "
            f"{r['measured_gb']:7.2f} {r['foretold_gb']:9.2f} {r['memory_off']:+7.1%}"
            + ("" if r["seen"] else "  not seen before")
        )
    for name, bound in (("time", TIME_BOUND), ("memory", MEMORY_BOUND)):
        errors = [abs(row[f"{name}_off"]) for row in done]
        within = sum(error <= bound for error in errors)
        print(f"{name}: {within} of {len(rows)} within {bound:.0%}, mean error {statistics.mean(errors):.1%}")


def show_choices(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(f"\n{row['model']} in {row['limit_gb']:.0f} GB")
        for each in row["all"]:
            time_now, memory_now = each["measured_ms"], each["measured_gb"]
            words = "out of memory" if time_now is None else f"{time_now:8.1f} ms {memory_now:7.2f} GB"
            mark = "<- chosen" if each["setting"] == row["chosen"] else ""
            told = f"{each['foretold_ms']:8.1f} ms {each['foretold_gb']:7.2f} GB"
            print(f"  {each['setting']:44} {words:24} foretold {told} {mark}")
        print(f"  the choice is {row['of_the_best']:.3f} of the best ({row['best']})")
    reached = sum(row["of_the_best"] >= WANTED for row in rows)
    print(f"{reached} of {len(rows)} choices at least {WANTED}")


def _progress(row: dict[str, Any]) -> None:
    print(json.dumps(row), file=sys.stderr, flush=True)


PARTS = {"settings": (part_settings, show_settings), "choices": (part_choices, show_choices)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, dest="part")
    parser.add_argument("--bench", type=Path, help="of 'echelon bench'; else it is measured first")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args, begin = arguments(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if args.bench is None:
            args.bench = Path(folder) / "bench.json"
            subprocess.run([sys.executable, "-m", "echelon", "bench", "--out", str(args.bench)], check=True)
        cluster = Cluster.parse("1xhere", bench=args.bench)
    echelon.init()
    if not ON_GPU:
        torch.set_num_threads(1)
    profiles = Profiles()
    told: dict[str, Any] = {"device": torch.cuda.get_device_name() if ON_GPU else "cpu", "torch": torch.__version__}
    for name in [args.part] if args.part else PARTS:
        part, show = PARTS[name]
        told[name] = []
        for row in part(cluster, profiles, args):
            told[name].append(row)
            if args.out:  # at every row: a run that is cut short leaves what it has
                args.out.write_text(json.dumps(told, indent=1) + "\n")
        show(told[name])
    print(json.dumps(told))
    print(f"{(time.monotonic() - begin) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
