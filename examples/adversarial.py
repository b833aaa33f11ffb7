"""A loop of one's own: a generator and a judge, two optimizers, one engine.

    echelon run --procs 2 examples/adversarial.py
    python examples/adversarial.py

The generator learns to make points on a ring of radius 2. ``backward`` gathers gradients on each rank, ``update``
reduces those of one optimizer and steps it.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def ring(count: int) -> Tensor:
    angle = torch.rand(count) * 2 * math.pi
    return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2)


def main(batch: int = 128) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    steps = parser.parse_args().steps

    echelon.init(seed=0)
    nets = nn.ModuleDict({"generator": network(4, 2), "judge": network(2, 1)})
    optimizers = {name: torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.9)) for name, net in nets.items()}
    engine = echelon.distribute(nets, optimizer=optimizers, log=echelon.Log(console=False))
    for _ in range(steps):
        real, fake = ring(batch), nets["generator"](torch.randn(batch, 4))
        engine.backward(F.softplus(-nets["judge"](real)).mean())
        engine.backward(F.softplus(nets["judge"](fake.detach())).mean())
        engine.update("judge")
        engine.backward(F.softplus(-nets["judge"](fake)).mean())
        engine.update("generator")
    with torch.no_grad():
        radius = nets["generator"](torch.randn(4096, 4)).norm(dim=1)
    if echelon.is_first_worker():
        print(f"{engine.steps} updates on {echelon.world_size()} processes; mean radius {radius.mean():.2f} (wanted 2)")


if __name__ == "__main__":
    main()
