"""All of gpu.py's works, one after another: a table and one file of results.

    python benchmarks/gpu_all.py OUT [--works resnet50 bert_large ...] [--contenders ...] [--limit 300]

Compiling takes most of the time, and processors more than the GPU. So works are first run for a step each, some of them
side by side, which fills the compiler's cache, and then measured alone. Start-up times with nothing cached are those of
the first run; they are longer than they would be alone, for all contenders alike. Needs what gpu.py needs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

#: Side by side, as far as the memory of one GPU goes.
WAVES = (("resnet50", "resnet50_64", "bert_large_64"), ("bert_large", "gpt2_medium"))
CONTENDERS = ("eager", "compiled", "graphs", "fabric", "accelerate", "echelon", "echelon_whole", "echelon_graphs")
ONE_STEP = ("--rounds", "1", "--steps", "1", "--warm-up", "1")


class Run:
    """One run of gpu.py."""

    def __init__(self, work: str, out: Path, *options: str) -> None:
        self.work, self._file = work, out / f"{work}.json"
        self._log = (out / f"{work}.log").open("w")
        words = [sys.executable, str(Path(__file__).with_name("gpu.py")), work, "--out", str(self._file), *options]
        self._process = subprocess.Popen(words, stdout=self._log, stderr=subprocess.STDOUT)

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
            print(f"{self.work}: failed ({code}), see {self._log.name}", flush=True)
        return json.loads(self._file.read_text()) if self._file.exists() else None


def prepare(works: list[str], out: Path, limit: float, options: list[str]) -> dict[str, Any]:
    """Fills the cache; by work what was found of start-up."""
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for wave in WAVES:
        runs = [Run(work, out, *options, *ONE_STEP) for work in wave if work in works]
        until = time.monotonic() + limit
        found |= {run.work: run.result(until) for run in runs}
    return found


def rows(result: dict[str, Any], first: dict[str, Any] | None) -> list[str]:
    lines = []
    for name, figures in result["contenders"].items():
        cold = first["contenders"].get(name, {}).get("start_s", "") if first else ""
        against = "" if name == "echelon" else result["echelon_against"].get(name, "")
        cells = (result["workload"], name, figures["per_s"], figures["ms"], figures["peak_gb"], cold, against)
        lines.append(f"| {' | '.join(map(str, (*cells, figures['of_roofline'])))} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = [work for wave in WAVES for work in wave]
    parser.add_argument("out", type=Path)
    parser.add_argument("--works", nargs="+", choices=every, default=every)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each wave, and for each work")
    args = parser.parse_args()
    options = ["--contenders", *args.contenders]
    first = prepare(args.works, args.out / "first", args.limit, options)
    results, lines = (
        [],
        ["| work | contender | a second | ms | GB | start-up, s | Echelon is | of roofline |", "|---" * 8 + "|"],
    )
    for work in args.works:
        result = Run(work, args.out, *options).result(time.monotonic() + args.limit)
        if result is not None:
            cold = first.get(work)
            starts = {name: one["start_s"] for name, one in cold["contenders"].items()} if cold else {}
            results.append(result | {"start_s_nothing_cached": starts})
            lines += rows(result, cold)
    (args.out / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
