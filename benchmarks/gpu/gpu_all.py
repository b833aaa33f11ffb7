"""All of gpu.py's works, one after another: a table and one file of results.

    python benchmarks/gpu/gpu_all.py OUT [resnet50 bert_large:eager,compiled,echelon ...] [--starting ...] [--limit 300]

Compiling takes most of the time, and processors more than the GPU. So each contender first runs for some steps in a
process and a compiler's cache of its own, several of them side by side, which gives its start-up time with nothing
cached (longer than it would be alone, for all alike). Then all take turns in one process, with all caches put together.
Needs what gpu.py needs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Size:
    """``memory``: GB that a contender takes in its first steps. ``measuring``: gpu.py's options; a small step needs
    more of them until a graph is kept, a large one fewer until its time is known."""

    memory: int
    measuring: tuple[str, ...]


SMALL = ("--rounds", "5", "--steps", "15", "--warm-up", "44")
LARGE = ("--rounds", "3", "--steps", "8", "--warm-up", "16")
WORKS = {
    "resnet50_64": Size(4, SMALL),
    "resnet50": Size(12, LARGE),
    "bert_large_64": Size(16, SMALL),
    "bert_large": Size(46, LARGE),
    "gpt2_medium": Size(36, LARGE),
}
CONTENDERS = ("eager", "compiled", "graphs", "fabric", "accelerate", "echelon", "echelon_whole")
STARTING = ("--rounds", "1", "--steps", "1", "--warm-up", "0", "--no-roofline")
MEMORY = 134  #: GB
AT_ONCE = 8


class Run:
    """One run of gpu.py."""

    def __init__(self, work: str, name: str, out: Path, cache: Path, options: tuple[str, ...]) -> None:
        self.work, self.name, self._file = work, name, out / f"{name}.json"
        self._log = (out / f"{name}.log").open("w")
        words = [sys.executable, str(Path(__file__).with_name("gpu.py")), work, "--out", str(self._file), *options]
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
        self._process = subprocess.Popen(words, stdout=self._log, stderr=subprocess.STDOUT, env=environment)

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def result(self, until: float) -> dict[str, Any] | None:
        """None where it failed or took too long; its log says why."""
        try:
            code: int | str = self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            code = "time is up"
        self._log.close()
        if code != 0:
            print(f"{self.name}: failed ({code}), see {self._log.name}", flush=True)
        return json.loads(self._file.read_text()) if self._file.exists() else None


def start_all(jobs: list[tuple[str, str]], out: Path, limit: float) -> dict[tuple[str, str], float]:
    """Seconds until the first steps are made, by work and contender."""
    waiting = sorted(jobs, key=lambda job: -WORKS[job[0]].memory)
    running: list[tuple[tuple[str, str], Run]] = []
    found: dict[tuple[str, str], float] = {}
    until = time.monotonic() + limit
    while waiting or running:
        for job, run in [one for one in running if one[1].is_over() or time.monotonic() > until]:
            running.remove((job, run))
            result = run.result(until)
            if result and job[1] in result["contenders"]:
                found[job] = result["contenders"][job[1]]["start_s"]
        room = MEMORY - sum(WORKS[work].memory for (work, _), _ in running)
        fitting = next((job for job in waiting if WORKS[job[0]].memory <= room), None)
        if fitting and len(running) < AT_ONCE and time.monotonic() < until:
            waiting.remove(fitting)
            name = "-".join(fitting)
            options = ("--contenders", fitting[1], *STARTING)
            running.append((fitting, Run(fitting[0], name, out, out / "caches" / name, options)))
        elif not running:
            break
        time.sleep(0.1)
    return found


def put_together(caches: Path) -> Path:
    whole = caches / "all"
    for cache in [one for one in caches.iterdir() if one != whole] if caches.exists() else []:
        shutil.copytree(cache, whole, dirs_exist_ok=True)
    return whole


def rows(result: dict[str, Any]) -> list[str]:
    lines = []
    for name, figures in result["contenders"].items():
        against = "" if name == "echelon" else result["echelon_against"].get(name, "")
        cold = result["start_s_nothing_cached"].get(name, "")
        cells = (result["workload"], name, figures["per_s"], figures["ms"], figures["peak_gb"], cold, against)
        lines.append(f"| {' | '.join(map(str, (*cells, figures['of_roofline'])))} |")
    return lines


def asked(words: list[str]) -> dict[str, list[str]]:
    """Contenders by work; all of them where a work stands alone."""
    parts = {work: names for work, _, names in (word.partition(":") for word in words)}
    unknown = parts.keys() - WORKS.keys()
    if unknown:
        raise SystemExit(f"there is no work {sorted(unknown)[0]!r}; there are {', '.join(WORKS)}")
    return {work: names.split(",") if names else list(CONTENDERS) for work, names in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("works", nargs="*", default=list(WORKS))
    parser.add_argument("--starting", nargs="+", default=list(CONTENDERS[1:]), help="whose start-up is measured")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for starting all, and for each work")
    args = parser.parse_args()
    works = asked(args.works)
    shutil.rmtree(args.out / "first", ignore_errors=True)  # a run before this has left its caches there
    (args.out / "first").mkdir(parents=True)
    jobs = [(work, key) for work, contenders in works.items() for key in contenders if key in args.starting]
    starts = start_all(jobs, args.out / "first", args.limit)
    cache = put_together(args.out / "first" / "caches")
    results = []
    print("| work | contender | a second | ms | GB | start-up, s | Echelon is | of roofline |\n" + "|---" * 8 + "|")
    for work, contenders in works.items():
        options = ("--contenders", *contenders, *WORKS[work].measuring)
        result = Run(work, work, args.out, cache, options).result(time.monotonic() + args.limit)
        if result is not None:
            cold = {key: seconds for (of, key), seconds in starts.items() if of == work}
            results.append(result | {"start_s_nothing_cached": cold})
            print("\n".join(rows(results[-1])), flush=True)
            (args.out / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
