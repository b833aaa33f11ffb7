"""Area under the curve with tables in 16 and 8 bits, beside float32: Wide & Deep on UCI Adult, DCN-v2 on the click log.

    ADULT=DIR python -m benchmarks.parameter_server.narrow_auc [adult] [click_log] [--seeds 5] [--first 0]
           [--out results.json]

One process each. DIR holds adult-train.csv.gz and adult-test.csv.gz. The click log's figure is that of 40,000 rows that
the model has not seen; both data sets are the same for every seed. With --out, seeds that the file has are not run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import ROOT

DTYPES = ("float32", "bf16", "int8")
CLICK_LOG = (
    "--model_name dcn_v2 --dataset_name click_log --hidden 64,32 --embedding_learning_rate 0.1 --batch_size 256"
    " --learning_rate 0.005 --num_sample_per_epoch 200000 --num_epochs 1 --stop_at_step 0"
)


def adult(dtype: str, seed: int) -> float:
    example = str(ROOT / "examples" / "wide_deep.py")
    return found([example, "--epochs", "3", "--seed", str(seed), "--dtype", dtype], r"AUC ([\d.]+)")


def click_log(dtype: str, seed: int) -> float:
    with tempfile.TemporaryDirectory() as out:
        words = [*CLICK_LOG.split(), "--seed", str(seed), "--embedding_dtype", dtype, "--output_dir", out]
        return found(["-m", "echelon", "train", *words], r'"auc": ([\d.]+)')


def found(words: list[str], pattern: str) -> float:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    said = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True, env=environment).stdout
    match = re.search(pattern, said)
    assert match, said
    return float(match[1])


RUNS = {"adult": adult, "click_log": click_log}


def summary(figures: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return the mean of each format, and its difference from float32: mean, and standard error over seeds."""
    seeds = sorted(set.intersection(*(set(figures[dtype]) for dtype in DTYPES)))
    made: dict[str, Any] = {}
    for dtype in DTYPES:
        apart = [figures[dtype][seed] - figures["float32"][seed] for seed in seeds]
        error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else None
        mean = statistics.mean(figures[dtype][seed] for seed in seeds)
        made[dtype] = {"mean": mean, "from float32": statistics.mean(apart), "standard error": error}
    return made


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("runs", nargs="*", choices=[[], *RUNS], metavar="run")
    ask.add_argument("--seeds", type=int, default=5)
    ask.add_argument("--first", type=int, default=0)
    ask.add_argument("--out", type=Path)
    asked = ask.parse_args()
    kept: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out and asked.out.exists() else {}
    for run in asked.runs or RUNS:
        figures = kept.setdefault(run, {}).setdefault("auc", {dtype: {} for dtype in DTYPES})
        for seed in range(asked.first, asked.first + asked.seeds):
            for dtype in DTYPES:
                if str(seed) not in figures[dtype]:
                    figures[dtype][str(seed)] = RUNS[run](dtype, seed)
            kept[run]["summary"] = summary(figures)
            print(run, seed, kept[run]["summary"], flush=True)
            if asked.out:
                asked.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
