"""Train a small convnet on real images: 1,797 handwritten digits that come with the package.

    echelon run --procs 2 examples/digits.py          two processes
    python examples/digits.py                         one process, the same script

Kill it and give the same command again: it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import echelon
from echelon.zoo.datasets.digits import stored_digits


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,500 images to train on, 297 to test on, in an order that is always the same."""
    pixels, classes = stored_digits()
    images, labels = torch.tensor(pixels)[:, None] / 255, torch.tensor(classes).long()
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def forget(directory: Path) -> None:
    """Remove what earlier runs left, so that this one starts from the beginning."""
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(directory / name, ignore_errors=True)
    (directory / "metrics.jsonl").unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--dir", type=Path, default=Path("runs/digits"), help="where checkpoint and metrics go")
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs in --dir")
    args = parser.parse_args()

    echelon.init(seed=1)
    if args.fresh and echelon.is_first_worker():
        forget(args.dir)
    echelon.barrier()
    train, test = digits()
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    engine = echelon.distribute(
        model,
        loss=F.cross_entropy,
        optimizer=optimizer,
        checkpoint=echelon.Checkpoint(dir=str(args.dir / "checkpoints"), every=50, keep=2),
        log=echelon.Log(dir=str(args.dir), tensorboard=True),
    )
    loader = engine.loader(train, batch_size=32)

    begin, seen = time.perf_counter(), 0
    for _ in loader.epochs(args.epochs):
        for images, labels in loader:
            engine.step(images, labels)
            seen += len(images) * echelon.world_size()
    seconds = time.perf_counter() - begin

    results = engine.evaluate(test, metrics=["accuracy"])
    saved = engine.save(wait=True)
    engine.close()
    if echelon.is_first_worker():
        print(f"accuracy on {len(test)} unseen images: {results['accuracy']:.1%}  (loss {results['loss']:.4f})")
        print(f"speed: {seen / seconds:,.0f} examples/s over {engine.steps} steps on {echelon.world_size()} processes")
        print(f"checkpoint: {saved}")
        print(f"metrics: {args.dir / 'metrics.jsonl'}; for TensorBoard, if installed: {args.dir / 'tensorboard'}")
        print(f"all of it as a page: echelon report {args.dir}")
        print(f"log: {os.environ.get('ECHELON_LOG_DIR', 'none without echelon run')}")


if __name__ == "__main__":
    main()
