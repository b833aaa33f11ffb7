"""The same training under six strategies: how well it learns, and how little travels.

    echelon run --procs 2 examples/strategies.py

Each trains the same perceptron on 1,797 handwritten digits, from the same weights and in the same order.
"""

from __future__ import annotations

import argparse
import re

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import echelon
from echelon import Dgc, Lars, LocalSgd, Strategy
from echelon.optim import Schedule
from echelon.zoo.datasets.digits import stored_digits

BATCH = 16
STRATEGIES = {
    "plain": Strategy(),
    "amp + recompute": Strategy(amp="bf16", recompute=True),
    "amp + recompute + lars": Strategy(amp="bf16", recompute=True, lars=Lars(coeff=0.1)),
    "fp16_allreduce": Strategy(fp16_allreduce=True),
    "dgc, 99 % kept back": Strategy(dgc=Dgc(sparsity=(0.75, 0.9375, 0.99), rampup_step=60)),
    "localsgd, k = 8": Strategy(localsgd=LocalSgd(k_steps=8)),
}


def digits() -> tuple[TensorDataset, TensorDataset]:
    pixels, classes = stored_digits()
    images, labels = torch.tensor(pixels).flatten(1) / 255, torch.tensor(classes).long()
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(2)]
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), *hidden, nn.Linear(256, 10))


def train(strategy: Strategy, epochs: int) -> float:
    """Accuracy on unseen images in the end."""
    seen, unseen = digits()
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    steps = epochs * len(seen) // (BATCH * echelon.world_size())
    engine = echelon.distribute(
        model,
        loss=F.cross_entropy,
        optimizer=optimizer,
        scheduler=Schedule(optimizer, decay="polynomial", decay_steps=steps),
        strategy=strategy,
        log=echelon.Log(console=False),
    )
    loader = engine.loader(seen, batch_size=BATCH)
    for _ in loader.epochs(epochs):
        for images, labels in loader:
            engine.step(images, labels)
    return engine.evaluate(unseen, metrics=["accuracy"])["accuracy"]


def traffic(strategy: Strategy) -> str:
    """Return the bytes that each rank sends in a step, as ``explain`` computes them."""
    text = strategy.explain(perceptron(), ranks=max(echelon.world_size(), 2))
    found = re.findall(r"(?:in all|gradients|weights) +([\d.,]+ k?M?B)", text.partition("Sent by")[2])
    return found[-1] if found else "?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    echelon.init(seed=1)
    for name, strategy in STRATEGIES.items():
        accuracy = train(strategy, args.epochs)
        if echelon.is_first_worker():
            print(f"{name:24} accuracy {accuracy:6.1%}   sent by each rank in a step: {traffic(strategy)}", flush=True)


if __name__ == "__main__":
    main()
