"""Two versions of Echelon side by side on one GPU: milliseconds a step of gpu.py's works, in turn.

    python benchmarks/gpu/versions.py OUT --tree before=build/old --tree now=. [--works resnet50_64 ...] [--rounds 9]

Each version trains in a process of its own. All compile side by side; then each warms up alone, and the versions of a
work take turns, so that the GPU's clock and its other users are the same for all. Needs what gpu.py needs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORKS = ("resnet50_64", "bert_large_64", "gpt2_medium")
WARM_UP = 56  #: steps until a CUDA graph is kept, or not


def serve(work: str) -> None:
    """Build the step, then do what standard input's lines order: 'warm N' or 'turn N'."""
    import torch

    import echelon
    from benchmarks.gpu.gpu import CONTENDERS, FIRST
    from benchmarks.gpu.gpu_workloads import WORKLOADS

    echelon.init()
    torch.manual_seed(0)
    begin = time.perf_counter()
    step = CONTENDERS["echelon"](WORKLOADS[work])
    losses = [float(step()) for _ in range(FIRST)]  # type: ignore[arg-type]
    answer(start_s=time.perf_counter() - begin, losses=losses, package=str(Path(echelon.__file__).parent))
    for line in sys.stdin:
        steps = int(line.split()[1])
        torch.cuda.synchronize()
        begin, processor = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        wall, processor = time.perf_counter() - begin, time.process_time() - processor
        answer(ms=1e3 * wall / steps, processor_ms=1e3 * processor / steps)


def answer(**values: Any) -> None:
    print("ANSWER " + json.dumps(values), flush=True)


class Version:
    """The process of one tree that trains one work."""

    def __init__(self, name: str, tree: str, work: str, cache: Path) -> None:
        self.name, self.laps = name, list[dict[str, float]]()
        environment = os.environ | {
            "PYTHONPATH": str(Path(tree).resolve()),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / name),
        }
        words = [sys.executable, str(Path(__file__).resolve()), "serve", "--works", work]
        self._process = subprocess.Popen(
            words, env=environment, cwd=tree, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def wait(self) -> dict[str, Any]:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return dict(json.loads(line.removeprefix("ANSWER ")))
            print(f"{self.name}: {line.rstrip()}", flush=True)
        raise SystemExit(f"{self.name} ended with {self._process.wait()}")

    def order(self, words: str) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()
        return self.wait()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(work: str, versions: list[Version], rounds: int, steps: int) -> dict[str, Any]:
    for version in versions:
        version.order(f"warm {WARM_UP}")
    for turn in range(rounds):
        for version in versions[:: -1 if turn % 2 else 1]:
            version.laps.append(version.order(f"turn {steps}"))
    first = versions[0]
    row: dict[str, Any] = {"work": work, "rounds": rounds, "steps": steps}
    for version in versions:
        row[version.name] = {
            key: round(statistics.median(lap[key] for lap in version.laps), 3) for key in first.laps[0]
        }
        ratios = [now["ms"] / then["ms"] for now, then in zip(version.laps, first.laps, strict=True)]
        row[version.name]["against_first"] = round(statistics.median(ratios), 4)
        row[version.name]["spread"] = [round(min(ratios), 4), round(max(ratios), 4)]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", help="a file for the results; 'serve' is what this program starts itself with")
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--works", nargs="+", default=list(WORKS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--cache", type=Path, default=Path("build/inductor"))
    args = parser.parse_args()
    if args.out == "serve":
        return serve(args.works[0])
    trees = dict(each.split("=", 1) for each in args.tree)
    running = {
        work: [Version(name, tree, work, args.cache.resolve()) for name, tree in trees.items()] for work in args.works
    }
    rows = []
    try:
        for versions in running.values():
            for version in versions:
                print(json.dumps({"version": version.name, **version.wait()}), flush=True)
        for work, versions in running.items():
            rows.append(compare(work, versions, args.rounds, args.steps))
            print(json.dumps(rows[-1]), flush=True)
            Path(args.out).write_text(json.dumps(rows, indent=1) + "\n")
    finally:
        for versions in running.values():
            for version in versions:
                version.close()
    return None


if __name__ == "__main__":
    main()
