"""Every strategy and combination trained on real MNIST images by two Gloo ranks: is the test accuracy plain training's?

    python benchmarks/data_parallel/convergence.py [--seeds 3] [--epochs 8] [--only dgc,localsgd] [--out results.json]

All rows see the same images in the same order from the same initial weights, for the same number of epochs; the rate
falls linearly to 0. One pair of processes for each seed trains all rows, one after another. The figure is the mean over
seeds of the accuracy on images that no row has trained on, beside that of plain SGD; the bar is 0.5 points, which is 10
of 2,000 images, where one seed's difference strays by about 0.2. Seconds are those of training and testing one seed,
on whatever the machine had left: no benchmark of speed.
The images are looked for in $ECHELON_TEST_DATA and ../shared/data: MNIST's test part as IDX files.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon
from benchmarks import ROOT
from echelon import AdaptiveLocalSgd, Dgc, Lamb, Lars, LocalSgd, LrScaling, Outer, Strategy
from echelon.planner.cost.strategy_traffic import ParameterSize, RankCounts, sent_bytes_per_step

RANKS, BATCH = 2, 64  # the batch is that of all ranks together
TRAIN = 8_000  # of 10,000 images; the rest tests
BAR = 0.5  # points

#: Excluded from decay and trust ratio: their norms say nothing about the size of a sensible step.
SMALL = ("bias", "batch_norm")
LARS = Lars(coeff=0.02, exclude_from_weight_decay=SMALL)
LAMB = Lamb(exclude_from_weight_decay=SMALL)
#: No ladder of sparsities, no dense steps first: 0.99 from the first step on.
DGC = Dgc(sparsity=(0.99,))
LOCAL = LocalSgd(k_steps=8)
#: Outer momentum multiplies the rate by lr / (1 - momentum), which is 7: at 0.05 training collapses to guessing, as
#: plain SGD does at 0.35.
OUTER_RATE = 0.007


@dataclass(frozen=True)
class Row:
    """A strategy, and the optimizer and rate it is given."""

    strategy: Strategy
    optimizer: str = "sgd"
    rate: float = 0.05


def sgd(**options: Any) -> Row:
    return Row(Strategy(**options))


def lars(**options: Any) -> Row:
    return Row(Strategy(lars=LARS, **options), rate=0.2)


def lamb(**options: Any) -> Row:
    return Row(Strategy(lamb=LAMB, **options), "adam", 0.01)


ROWS: dict[str, Row] = {
    "plain": sgd(),
    "plain Adam": Row(Strategy(), "adam", 0.004),
    "amp": sgd(amp="bf16"),
    "recompute": sgd(recompute=True),
    "lars": lars(),
    "lamb": lamb(),
    "dgc 0.99": sgd(dgc=DGC),
    "dgc 0.999": sgd(dgc=Dgc(sparsity=(0.999,))),
    "localsgd": sgd(localsgd=LOCAL),
    "localsgd outer": Row(Strategy(localsgd=LocalSgd(k_steps=8, outer=True)), rate=OUTER_RATE),
    "localsgd outer 0.5": sgd(localsgd=LocalSgd(k_steps=8, outer=Outer(lr=0.7, momentum=0.5))),
    "adaptive_localsgd": sgd(adaptive_localsgd=AdaptiveLocalSgd(init_k_steps=8)),
    "gradient_merge": sgd(gradient_merge=2),
    "fp16_allreduce": sgd(fp16_allreduce="fp16"),
    "fp16_allreduce bf16": sgd(fp16_allreduce="bf16"),
    "clip": sgd(clip=1.0),
    "lr_scaling": sgd(lr_scaling=LrScaling(warmup_steps=250)),
    "amp + recompute": sgd(amp="bf16", recompute=True),
    "dgc + recompute": sgd(dgc=DGC, recompute=True),
    "lars + recompute": lars(recompute=True),
    "lamb + recompute": lamb(recompute=True),
    "amp + localsgd": sgd(amp="bf16", localsgd=LOCAL),
    "amp + adaptive_localsgd": sgd(amp="bf16", adaptive_localsgd=True),
    "amp + lars": lars(amp="bf16"),
    "amp + lamb": lamb(amp="bf16"),
    "amp + recompute + lars": lars(amp="bf16", recompute=True),
    "amp + recompute + lamb": lamb(amp="bf16", recompute=True),
    "amp + dgc": sgd(amp="bf16", dgc=DGC),
    "recompute + localsgd": sgd(recompute=True, localsgd=LOCAL),
    "lars + localsgd": lars(localsgd=LOCAL),
    "gradient_merge + lars": lars(gradient_merge=2),
    "gradient_merge + lamb": lamb(gradient_merge=2),
    "gradient_merge + dgc": sgd(gradient_merge=2, dgc=DGC),
    "gradient_merge + localsgd": sgd(gradient_merge=2, localsgd=LOCAL),
    "fp16_allreduce + lars": lars(fp16_allreduce="fp16"),
    "fp16_allreduce + lamb": lamb(fp16_allreduce="fp16"),
    "fp16_allreduce + dgc": sgd(fp16_allreduce="fp16", dgc=DGC),
    "fp16_allreduce + localsgd": sgd(fp16_allreduce="fp16", localsgd=LOCAL),
}


def data_folder() -> Path | None:
    """Return the directory of the images, if they are here."""
    beside = ROOT.parent / "shared" / "data"
    folder = Path(os.environ.get("ECHELON_TEST_DATA", beside))
    return folder if (folder / "mnist-10k-images-idx3-ubyte.gz").is_file() else None


def read_images(folder: Path) -> tuple[Tensor, Tensor]:
    """All 10,000 images, of mean 0 and deviation 1, and their digits."""
    images = _read_idx(folder / "mnist-10k-images-idx3-ubyte.gz").astype(np.float32)
    digits = _read_idx(folder / "mnist-10k-labels-idx1-ubyte.gz").astype(np.int64)
    images = (images - images[:TRAIN].mean()) / images[:TRAIN].std()
    return torch.from_numpy(images)[:, None], torch.from_numpy(digits)


def _read_idx(path: Path) -> np.ndarray[Any, Any]:
    """IDX: two zeros, the type (8 is bytes), the number of dimensions, each as a big-endian word, the bytes."""
    raw = gzip.decompress(path.read_bytes())
    end = 4 + 4 * raw[3]
    return np.frombuffer(raw, np.uint8, offset=end).reshape(np.frombuffer(raw[4:end], ">u4").astype(int))


def make_net() -> nn.Sequential:
    """56,000 parameters, nine tenths of them in one matrix, which is above DGC's threshold."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def make_optimizer(row: Row, net: nn.Module) -> torch.optim.Optimizer:
    if row.optimizer == "adam":
        return torch.optim.Adam(net.parameters(), lr=row.rate)
    return torch.optim.SGD(net.parameters(), lr=row.rate, momentum=0.9, weight_decay=0.0005)


@dataclass(frozen=True)
class Digits:
    """A data set for training and testing, and the length of the training."""

    images: Tensor
    digits: Tensor
    train: int
    epochs: int

    def batches(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of one global order; the incomplete last batch is left out."""
        order = torch.randperm(self.train, generator=torch.Generator().manual_seed(1000 * seed + epoch))
        share = BATCH // echelon.world_size()
        for first in range(0, self.train - BATCH + 1, BATCH):
            begin = first + echelon.rank() * share
            mine = order[begin : begin + share]
            yield self.images[mine], self.digits[mine]

    def tested(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's part of the images that are never trained on: the last 2,000."""
        mine = slice(TRAIN + echelon.rank(), None, echelon.world_size())
        return [(self.images[mine], self.digits[mine])]


def train(row: Row, data: Digits, seed: int) -> list[float]:
    """The test accuracy after each epoch, in percent."""
    torch.manual_seed(seed)
    net = make_net()
    optimizer = make_optimizer(row, net)
    updates = data.epochs * (data.train // BATCH) // row.strategy.gradient_merge
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (updates + 1))
    engine = echelon.distribute(
        net, loss=F.cross_entropy, optimizer=optimizer, scheduler=falling, strategy=row.strategy,
        log=echelon.Log(console=False),
    )  # fmt: skip
    accuracies = []
    for epoch in range(data.epochs):
        for batch in data.batches(seed, epoch):
            engine.step(*batch)
        accuracies.append(100 * engine.evaluate(data.tested(), metrics=["accuracy"])["accuracy"])
    engine.close()
    return accuracies


def worker(names: list[str], epochs: int, seed: int) -> None:
    echelon.init()
    torch.set_num_threads(1)
    folder = data_folder()
    assert folder is not None
    data = Digits(*read_images(folder), TRAIN, epochs)
    for name in names:
        begin = time.perf_counter()
        accuracies = train(ROWS[name], data, seed)
        if echelon.is_first_worker():
            seconds = time.perf_counter() - begin
            print("RUN " + json.dumps({"name": name, "accuracies": accuracies, "seconds": seconds}), flush=True)


@dataclass(frozen=True)
class Result:
    """Result of one row, over all seeds: accuracies in percent, the difference to plain training in points."""

    name: str
    optimizer: str
    rate: float
    accuracy: float
    each_seed: list[float]
    epoch_before: float
    difference: float
    sent_mb: float
    seconds: float
    strategy: dict[str, Any]


def results(runs: dict[str, list[dict[str, Any]]]) -> list[Result]:
    plain = _accuracy(runs["plain"])
    return [_result(name, each, plain) for name, each in runs.items()]


def _result(name: str, runs: list[dict[str, Any]], plain: float) -> Result:
    row = ROWS[name]
    return Result(
        name=name,
        optimizer=row.optimizer,
        rate=row.rate,
        accuracy=round(_accuracy(runs), 3),
        each_seed=[round(run["accuracies"][-1], 2) for run in runs],
        epoch_before=round(_accuracy(runs, -2), 3),
        difference=round(_accuracy(runs) - plain, 3),
        sent_mb=round(megabytes(row.strategy), 4),
        seconds=round(statistics.mean(run["seconds"] for run in runs), 1),
        strategy=row.strategy.to_dict(),
    )


def _accuracy(runs: list[dict[str, Any]], epoch: int = -1) -> float:
    return statistics.fmean(run["accuracies"][max(epoch, -len(run["accuracies"]))] for run in runs)


def megabytes(strategy: Strategy) -> float:
    """Sent by each rank in a step, as ``Strategy.explain`` counts it."""
    sizes = [ParameterSize(parameter.numel()) for parameter in make_net().parameters()]
    return sum(amount for _, amount in sent_bytes_per_step(strategy, sizes, RankCounts(RANKS, RANKS))) / 1e6


def show(found: list[Result]) -> None:
    print(
        f"{'':26} {'rate':>6} {'accuracy':>9} {'epoch before':>13} {'difference':>11} {'MB a step':>10} {'seconds':>8}"
    )
    for r in found:
        figures = f"{r.rate:6g} {r.accuracy:9.2f} {r.epoch_before:13.2f} {r.difference:+11.2f}"
        print(f"{r.name:26} {figures} {r.sent_mb:10.3f} {r.seconds:8.1f}{'' if within(r) else '  misses'}")


def within(result: Result) -> bool:
    return abs(result.difference) <= BAR


def launch(names: list[str], epochs: int, seed: int) -> Iterator[dict[str, Any]]:
    """Return the result of each row, in one pair of processes."""
    with tempfile.TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "echelon", "run", "--procs", str(RANKS), "--log-dir", logs, __file__]
        command += ["--seed", str(seed), "--epochs", str(epochs), "--only", ",".join(names)]
        job = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
        assert job.stdout is not None
        for line in job.stdout:
            if line.startswith("RUN "):
                yield json.loads(line.removeprefix("RUN "))
        if job.wait():
            sys.exit(f"training failed with exit status {job.returncode}")


def collect(names: list[str], epochs: int, seeds: int) -> dict[str, list[dict[str, Any]]]:
    """The runs of each row, one for each seed."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(seeds):
        for run in launch(names, epochs, seed):
            runs[run["name"]].append(run)
            print(f"seed {seed}, {run['name']}: {run['accuracies'][-1]:.2f}", file=sys.stderr, flush=True)
    return runs


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="rows whose name contains one of these, separated by commas")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)  # this process is a rank, which trains with it
    args = parser.parse_args()
    if data_folder() is None:
        parser.error("no mnist-10k-images-idx3-ubyte.gz in ../shared/data; say with ECHELON_TEST_DATA where it is")
    return args


def main() -> None:
    args, begin = arguments(), time.monotonic()
    asked = args.only.split(",")
    if args.seed is not None:
        worker(asked, args.epochs, args.seed)
        return
    names = [name for name in ROWS if name == "plain" or any(part in name for part in asked)]
    found = results(collect(names, args.epochs, args.seeds))
    show(found)
    minutes = (time.monotonic() - begin) / 60
    print(f"{args.seeds} seeds, {args.epochs} epochs, torch {torch.__version__}, {minutes:.0f} minutes")
    if args.out:
        facts = {"epochs": args.epochs, "seeds": args.seeds, "ranks": RANKS, "batch": BATCH, "torch": torch.__version__}
        args.out.write_text(json.dumps({**facts, "rows": [asdict(result) for result in found]}, indent=1) + "\n")
    if not all(within(result) for result in found):
        sys.exit(f"not every row is within {BAR} points of plain training")


if __name__ == "__main__":
    main()
