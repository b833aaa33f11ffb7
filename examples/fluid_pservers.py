"""Fluid's DistributeTranspiler example: 2 parameter servers and 4 trainers, each started by hand.

    python examples/fluid_pservers.py --role PSERVER --current_endpoint 127.0.0.1:6170 &
    python examples/fluid_pservers.py --role PSERVER --current_endpoint 127.0.0.1:6171 &
    for id in 0 1 2 3; do python examples/fluid_pservers.py --role TRAINER --trainer_id $id & done; wait
    python examples/fluid_pservers.py                       one process: the same losses and weights

The arguments are those of ``transpile``. Nothing is transpiled: a server stays in ``echelon.init()`` until the trainers
are done, and its script ends there.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon
from echelon.nn import SparseEmbedding

DICT_SIZE, EMBEDDING_WIDTH = 1000, 8


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # fluid.layers.embedding(is_distributed=True, is_sparse=True, size=[DICT_SIZE, EMBEDDING_WIDTH])
        self.embedding = SparseEmbedding(EMBEDDING_WIDTH, capacity=DICT_SIZE, optimizer="adagrad")
        self.fc = nn.Sequential(nn.Linear(3 * EMBEDDING_WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(self.embedding(ids).flatten(1)).squeeze(1)


def train_loop(sync_mode: bool) -> None:
    model = Clicks()
    engine = echelon.distribute(
        model,
        loss=F.binary_cross_entropy_with_logits,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=echelon.Strategy(ps=echelon.ParameterServer(sync_mode=sync_mode)),
        log=echelon.Log(console=False),
    )
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(-(2**62), 2**62, (300,), generator=random)[torch.randint(300, (512, 3), generator=random)]
    loader = engine.loader((ids, (ids[:, 0] > 0).float()), global_batch=64)
    losses = [float(engine.step(*batch)) for batch in loader]
    engine.synchronize()
    weights = sum(p.double().abs().sum().item() for p in model.parameters())
    shown = " ".join(f"{loss:.6f}" for loss in losses)
    print(f"trainer {echelon.rank()} of {echelon.world_size()}: weights {weights:.6f}, losses {shown}")
    engine.close()


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--role", choices=["PSERVER", "TRAINER"])
    ask.add_argument("--trainer_id", type=int, default=0)
    ask.add_argument("--pservers", default="127.0.0.1:6170,127.0.0.1:6171")
    ask.add_argument("--trainers", type=int, default=4)
    ask.add_argument("--current_endpoint")
    ask.add_argument("--sync_mode", type=int, default=1)
    asked = ask.parse_args()
    if asked.role is None:
        echelon.init()  # what the environment says, or one process
    else:
        echelon.init(
            role=asked.role,
            trainer_id=asked.trainer_id,
            pservers=asked.pservers,
            trainers=asked.trainers,
            current_endpoint=asked.current_endpoint,
        )
    train_loop(bool(asked.sync_mode))


if __name__ == "__main__":
    main()
