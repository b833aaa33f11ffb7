"""Many classes: every process computes features of its own images, and has a part of the classes.

    echelon run --procs 2 examples/many_classes.py
    python examples/many_classes.py

The head has 5,000 classes, far more weights than the rest. It is split: each process holds some of the classes, the
features of all processes come to each, and neither weights nor logits are ever gathered, not even for the accuracy.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import echelon

CLASSES, SIZE, WIDTH, EACH = 5000, 32, 128, 8


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with echelon.replicate():  # whole on every process, with a batch of its own
            self.features = nn.Sequential(nn.Linear(SIZE, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
        with echelon.split():  # a part of the classes on every process
            self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def faces() -> tuple[TensorDataset, TensorDataset]:
    """Blurred pictures of 5,000 people: eight of each to train on, one to test on."""
    generator = torch.Generator().manual_seed(0)
    people = torch.randn(CLASSES, SIZE, generator=generator)
    labels = torch.arange(CLASSES).repeat(EACH + 1)
    pictures = people[labels] + 0.7 * torch.randn(len(labels), SIZE, generator=generator)
    cut = EACH * CLASSES
    return TensorDataset(pictures[:cut], labels[:cut]), TensorDataset(pictures[cut:], labels[cut:])


def main(epochs: int = 2, global_batch: int = 240) -> None:
    echelon.init(seed=0)
    model = Classifier()
    engine = echelon.distribute(
        model,
        loss=F.cross_entropy,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.005),
        log=echelon.Log(console=False),
    )
    seen, unseen = faces()
    loader = engine.loader(seen, global_batch=global_batch)
    for _ in loader.epochs(epochs):
        for pictures, labels in loader:
            engine.step(pictures, labels)
    found = engine.evaluate(unseen, batch_size=250, metrics=["accuracy", "top5"])
    if echelon.is_first_worker():
        print(
            f"each of {echelon.world_size()} processes: {global_batch // engine.plan.replicas} pictures a step, ",
            end="",
        )
        print(f"{len(model.head.weight):,} of {CLASSES:,} classes")
        print(f"of {len(unseen):,} unseen pictures {found['accuracy']:.1%} right, {found['top5']:.1%} among five")


if __name__ == "__main__":
    main()
