"""Experts: a layer of eight experts, of which each token uses one, spread over the processes.

    echelon run --procs 2 examples/experts.py
    python examples/experts.py

The task has eight kinds of tokens, each with a map of its own. A dense layer must share its width among them; with
experts, the layer has eight times the weights at about the same arithmetic for a token. Both train on the same batches.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon
from echelon.nn import MoE

KINDS, DIM, HIDDEN = 8, 16, 32


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM))


class Net(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.middle = middle
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.middle(x))  # a token that finds no room in its expert keeps its own value


def tokens(count: int) -> tuple[Tensor, Tensor]:
    """A token is near the centre of its kind; what is wanted is its kind's map of where it lies around that."""
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(KINDS, DIM, generator=generator)
    maps = torch.randn(KINDS, DIM, DIM, generator=generator) / DIM**0.5
    kind = torch.randint(KINDS, (count,), generator=generator)
    around = torch.randn(count, DIM, generator=generator)
    return centres[kind] + around, torch.einsum("nd,nde->ne", around, maps[kind])


def train(middle: nn.Module, epochs: int = 4) -> tuple[float, int]:
    """Loss on unseen tokens, and the weights of the middle layer that this process holds."""
    model = Net(middle)
    if isinstance(middle, MoE):
        echelon.annotate(model, {"middle": echelon.split()})  # each process has some of the experts
    engine = echelon.distribute(
        model,
        loss=F.mse_loss,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        log=echelon.Log(console=False),
    )
    x, y = tokens(12_000)
    loader = engine.loader((x[:10_000], y[:10_000]), global_batch=200)
    for _ in loader.epochs(epochs):
        for inputs, wanted in loader:
            engine.step(inputs, wanted)
    loss = engine.evaluate((x[10_000:], y[10_000:]), batch_size=500)["loss"]
    return loss, sum(p.numel() for p in middle.parameters())


def main() -> None:
    echelon.init(seed=0)
    for name, middle in (("dense", dense()), ("experts", MoE(DIM, KINDS, HIDDEN, capacity=1.5))):
        whole = sum(p.numel() for p in middle.parameters())
        loss, here = train(middle)
        if echelon.is_first_worker():
            print(f"{name:8} loss on unseen tokens {loss:.3f}   {whole:6,} weights, {here:6,} of them on each process")


if __name__ == "__main__":
    main()
