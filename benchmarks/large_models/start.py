"""Seconds from the command to the end of the first step, by part, of a model that is read from files on local disk.

    python benchmarks/large_models/start.py MODEL_DIR [--layers 2] [--procs 2] [--rounds 2] [--compile] [--out FILE]

A Llama of 1.3 GB in fp32 (``--layers 22``: 7.6 GB) is written to MODEL_DIR if it is not there. Each round is
``echelon run --procs N`` of this script's ``--train``: read by ``echelon.hf.from_pretrained``, shard 3, one step of 64
tokens a rank. The first part, "launch", is the command's until rank 0's process began; the others are those of run.json
(``echelon report`` shows them). Files are in the page cache: the first round follows their writing. With ``--compile``
rounds after the first find the programs of the first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from load_by_region import config_of, write

LENGTH = 64


def train(folder: Path, compiles: bool) -> None:
    import torch

    import echelon

    echelon.init(seed=0)
    model = echelon.hf.from_pretrained(folder)
    model.config.use_cache = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fast = echelon.Fast(compile=True) if compiles else False
    engine = echelon.distribute(model, optimizer, strategy=echelon.Strategy(shard=3, fast=fast))
    ids = torch.randint(model.config.vocab_size, (1, LENGTH))
    loss = float(engine.step(input_ids=ids, labels=ids))
    if engine.world.rank == 0:
        print(json.dumps({"first_step_ended": time.time(), "loss": loss}), flush=True)
    engine.close()


def measure(options: argparse.Namespace, logs: Path) -> dict[str, float]:
    """Run the command once, and return the seconds of each part."""
    how = ["--train", *(["--compile"] if options.compile else [])]
    launch = [sys.executable, "-m", "echelon", "run", "--procs", str(options.procs), "--log-dir", str(logs)]
    begun = time.time()
    ended = subprocess.run(
        [*launch, __file__, str(options.folder), *how], stdout=subprocess.PIPE, text=True, check=True, cwd=logs
    )
    line = next(line for line in ended.stdout.splitlines() if '"first_step_ended"' in line)
    total = json.loads(line[line.index("{") :])["first_step_ended"] - begun
    parts: dict[str, float] = json.loads((logs / "run.json").read_text())["start"]
    known = sum(seconds for part, seconds in parts.items() if part != "compile")
    rounded = {part: round(seconds, 2) for part, seconds in parts.items()}
    return {"total": round(total, 2), "launch": round(total - known, 2), **rounded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    if options.train:
        train(options.folder, options.compile)
        return
    if not (options.folder / "model.safetensors.index.json").exists():
        options.folder.mkdir(parents=True, exist_ok=True)
        write(options.folder, config_of(options.layers))
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as logs:
        for _ in range(options.rounds):
            rounds.append(measure(options, Path(logs)))
    size = sum(file.stat().st_size for file in options.folder.glob("*.safetensors"))
    found: dict[str, Any] = {"mb": round(size / 1e6), "procs": options.procs, "compile": options.compile}
    text = json.dumps({**found, "rounds": rounds}, indent=2)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
