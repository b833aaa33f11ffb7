"""AUC of Wide & Deep on UCI Adult in every mode, beside one process.

    ADULT=DIR python benchmarks/parameter_server/adult_auc.py [--epochs 6] [--out results.json]

Runs examples/wide_deep.py; DIR holds adult-train.csv.gz and adult-test.csv.gz. 2 workers and 2 servers share the global
batch that one process has alone.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import ROOT

EXAMPLE = ROOT / "examples" / "wide_deep.py"
MODES = ("sync", "async", "bounded", "geo", "hybrid")


def auc(mode: str | None, epochs: int, seed: int) -> float:
    words = [str(EXAMPLE), "--epochs", str(epochs), "--seed", str(seed), *(["--mode", mode] if mode else [])]
    with tempfile.TemporaryDirectory() as log:
        run = ["-m", "echelon", "run", "--servers", "2", "--workers", "2", "--log-dir", log] if mode else []
        said = subprocess.run([sys.executable, *run, *words], check=True, capture_output=True, text=True).stdout
    found = re.search(r"AUC ([\d.]+)", said)
    assert found, said
    return float(found[1])


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--epochs", type=int, default=6)
    ask.add_argument("--seeds", type=int, default=3)
    ask.add_argument("--out", type=Path)
    asked = ask.parse_args()
    found: dict[str, list[float]] = {}
    for mode in (None, *MODES):
        name = mode or "one process"
        found[name] = [auc(mode, asked.epochs, seed) for seed in range(asked.seeds)]
        apart = [round(mine - alone, 4) for mine, alone in zip(found[name], found["one process"], strict=True)]
        print(f"{name:12} AUC {found[name]}, from one process {apart}", flush=True)
    if asked.out:
        asked.out.write_text(json.dumps({"epochs": asked.epochs, "auc": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
