"""Fluid's NCCL2 example: trainers that know the endpoints of all of them, started by hand and without a launcher.

    E=127.0.0.1:6170,127.0.0.1:6171
    python examples/fluid_nccl2.py --trainer_id 0 --trainers $E --current_endpoint 127.0.0.1:6170 &
    python examples/fluid_nccl2.py --trainer_id 1 --trainers $E --current_endpoint 127.0.0.1:6171 ; wait

or, with what Paddle's launcher puts into the environment:

    export PADDLE_TRAINERS_NUM=2 PADDLE_TRAINER_ENDPOINTS=$E
    PADDLE_TRAINER_ID=0 PADDLE_CURRENT_ENDPOINT=127.0.0.1:6170 python examples/fluid_nccl2.py &
    PADDLE_TRAINER_ID=1 PADDLE_CURRENT_ENDPOINT=127.0.0.1:6171 python examples/fluid_nccl2.py ; wait

One process (``python examples/fluid_nccl2.py``) and ``echelon run --procs 2`` print the same losses and weights.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import echelon


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--trainer_id", type=int)
    ask.add_argument("--trainers")
    ask.add_argument("--current_endpoint")
    asked = ask.parse_args()
    echelon.init(trainer_id=asked.trainer_id, trainers=asked.trainers, current_endpoint=asked.current_endpoint)

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    engine = echelon.distribute(
        model,
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        log=echelon.Log(console=False),
    )
    random = torch.Generator().manual_seed(1)
    images = torch.randn(512, 16, generator=random)
    loader = engine.loader((images, images[:, :4].argmax(1)), global_batch=64)
    losses = " ".join(f"{float(engine.step(*batch)):.6f}" for batch in loader)
    weights = sum(p.double().abs().sum().item() for p in model.parameters())
    print(f"trainer {echelon.rank()} of {echelon.world_size()}: weights {weights:.6f}, losses {losses}")


if __name__ == "__main__":
    main()
