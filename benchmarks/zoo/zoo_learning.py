"""Models of the zoo on real data, through the real ``echelon train``: what each learns, and how long it takes.

    python benchmarks/zoo/zoo_learning.py [--only mnist,adult] [--out results.json]

Each row is one command. Its figure is that of the command's last line, on the part of the data that it did not train
on, beside a figure that says what is easy: guessing the most common answer, or knowing how often each token occurs.
Seconds are on whatever the machine had left: no benchmark of speed. tests/zoo/test_zoo_learning.py has smaller
runs of the same. The data is looked for in $ECHELON_TEST_DATA and ../shared/data.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import ROOT
from echelon.zoo.tasks import IGNORED
from echelon.zoo.train.resolve import resolve
from echelon.zoo.train.train_arguments import sort_words

DATA = Path(os.environ.get("ECHELON_TEST_DATA", ROOT.parent / "shared" / "data"))
SHAKESPEARE = "tinyshakespeare.txt"
MNIST = ("mnist-10k-images-idx3-ubyte.gz", "mnist-10k-labels-idx1-ubyte.gz")
ADULT = ("adult-train.csv.gz", "adult-test.csv.gz")


def here(*names: str) -> bool:
    """Return True if all of these files exist."""
    return all((DATA / name).is_file() for name in names)


# ---- running ----


def train(words: str, cwd: Path) -> dict[str, Any]:
    """The last line of ``echelon train WORDS``. $DATA stands for the folder of the data."""
    command = [sys.executable, "-m", "echelon", "train", *split_words(words)]
    done = subprocess.run(
        [*command, "--output_dir", str(cwd / "run"), "--fresh"],
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"echelon train {words}: exit status {done.returncode}\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def split_words(words: str) -> list[str]:
    return words.replace("$DATA", str(DATA)).split()


# ---- what is easy ----


def character_losses(text: str, test_part: float) -> tuple[float, float]:
    """Return losses on the test part, in nats a character: by frequencies of characters and pairs in the train part."""
    cut = len(text) - round(len(text) * test_part)
    seen, tested = text[:cut], text[cut:]
    singles, pairs = Counter(seen), Counter(pairwise(seen))
    kinds = len(set(text))
    single = [(singles[b] + 1) / (len(seen) + kinds) for b in tested[1:]]
    pair = [(pairs[a, b] + 1) / (singles[a] + kinds) for a, b in pairwise(tested)]
    return _mean_loss(single), _mean_loss(pair)


def _mean_loss(probabilities: list[float]) -> float:
    return -math.fsum(map(math.log, probabilities)) / len(probabilities)


def easy_masked(words: str) -> tuple[float, float]:
    """For masked words of the test part: the loss of knowing how often each word occurs and of a guess whether the
    second sentence follows, as the two are added up in training; and the accuracy of the most common word."""
    resolved = resolve(sort_words(split_words(words), {}))
    data = resolved.dataset.open(resolved.request)
    counts = torch.bincount(_masked_words(data.train), minlength=data.facts["vocab_size"]) + 1.0
    asked = _masked_words(data.test)
    loss = -(counts / counts.sum()).log()[asked].mean().item()
    return loss + math.log(2), (asked == counts.argmax()).float().mean().item()


def _masked_words(rows: Any, most: int = 10_000) -> Tensor:
    """Return the masked words of each row once, from the beginning."""
    indices = np.arange(min(len(rows), most))
    labels: Tensor = rows.batch(indices, indices.astype(np.uint64))[-1][0].flatten()
    return labels[labels != IGNORED]


# ---- rows ----


@dataclass(frozen=True)
class Row:
    """words:  of the command
    figure:   which of the last line
    bound:    the figure must be above it, or below it if it is a loss
    needs:    files of the data
    """

    words: str
    figure: str
    bound: float
    needs: tuple[str, ...] = ()

    def holds(self, value: float) -> bool:
        return value < self.bound if self.figure.endswith("loss") else value >= self.bound


_DIGITS = (  # an epoch is 24 steps, and the model's own decay is for epochs of more
    "--model_name lenet --dataset_name digits --image_size 8 --num_epochs 15 --stop_at_step 0 "
    "--learning_rate_decay_factor 0.85"
)
_MNIST = "--model_name lenet --dataset_name mnist --dataset_dir $DATA --num_epochs 4 --stop_at_step 0"
_TEXT = f"--model_name gpt_tiny --dataset_name text --dataset_dir $DATA --file_pattern {SHAKESPEARE}"
_MASKED = (
    f"--model_name bert_tiny --dataset_name masked_lm --dataset_dir $DATA --file_pattern {SHAKESPEARE} "
    "--vocab_size_to_train 160 --max_seq_length 16 --max_predictions_per_seq 2 "
    "--hidden_size 64 --intermediate_size 128 --dropout 0 --attention_dropout 0"
)
_ADULT = "--model_name wide_deep --dataset_name adult --dataset_dir $DATA --num_epochs 2"

ROWS: dict[str, Row] = {
    "digits, one process": Row(f"{_DIGITS} --batch_size 64", "accuracy", 0.97),
    "digits, 2 replicas": Row(f"{_DIGITS} --procs 2 --batch_size 32", "accuracy", 0.97),
    "digits, 2 stages": Row(f"{_DIGITS} --procs 2 --batch_size 64 --stages 2", "accuracy", 0.97),
    "mnist, 2 replicas": Row(
        f"{_MNIST} --procs 2 --batch_size 32 --learning_rate_decay_factor 0.5", "accuracy", 0.985, MNIST
    ),
    "text, gpt_tiny": Row(f"{_TEXT} --max_seq_length 32 --stop_at_step 500", "test_loss", 2.2, (SHAKESPEARE,)),
    "masked words, bert_tiny": Row(
        f"{_MASKED} --batch_size 128 --learning_rate 0.006 --stop_at_step 1500", "test_loss", 5.1, (SHAKESPEARE,)
    ),
    "adult, one process": Row(f"{_ADULT} --batch_size 256", "auc", 0.90, ADULT),
    "adult, 1 server, 2 workers, sync": Row(
        f"{_ADULT} --servers 1 --workers 2 --ps sync --batch_size 128", "auc", 0.90, ADULT
    ),
}


@dataclass(frozen=True)
class Result:
    name: str
    figure: str
    value: float
    easy: float
    bound: float
    steps: int
    seconds: float
    words: str


def measure(name: str, row: Row) -> Result:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as cwd:
        last = train(row.words, Path(cwd))
    seconds = round(time.monotonic() - begin, 1)
    return Result(name, row.figure, last[row.figure], _easy(row), row.bound, last["steps"], seconds, row.words)


def _easy(row: Row) -> float:
    """Return the figure without any useful learning."""
    if "gpt" in row.words:
        return round(character_losses((DATA / SHAKESPEARE).read_text(), 0.1)[1], 3)
    if "masked_lm" in row.words:
        return round(easy_masked(row.words)[0], 3)
    return 0.5 if row.figure == "auc" else 0.1


def show(results: list[Result]) -> None:
    print(f"{'':34} {'figure':>10} {'value':>8} {'easy':>8} {'bound':>8} {'steps':>6} {'seconds':>8}")
    for r in results:
        miss = "" if ROWS[r.name].holds(r.value) else "  misses"
        figures = f"{r.figure:>10} {r.value:8.4f} {r.easy:8.4f} {r.bound:8.3f} {r.steps:6} {r.seconds:8.1f}"
        print(f"{r.name:34} {figures}{miss}")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--only", default="", help="rows whose name contains one of these, separated by commas")
    ask.add_argument("--out", type=Path)
    asked = ask.parse_args()
    results = []
    for name, row in ROWS.items():
        if any(part in name for part in asked.only.split(",")) and here(*row.needs):
            results.append(measure(name, row))
            print(json.dumps(asdict(results[-1])), file=sys.stderr, flush=True)
    show(results)
    if asked.out:
        facts = {"torch": torch.__version__, "rows": [asdict(result) for result in results]}
        asked.out.write_text(json.dumps(facts, indent=1) + "\n")
    if not all(ROWS[result.name].holds(result.value) for result in results):
        sys.exit("not every row keeps its bound")


if __name__ == "__main__":
    main()
