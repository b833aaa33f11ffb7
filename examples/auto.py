"""Auto: find a plan for this transformer with the first batch, and say why.

    echelon run --procs 2 examples/auto.py
    python examples/auto.py
    echelon plan examples/auto.py --cluster 2x8xA100        # what it would be elsewhere, without going there

The model learns to turn words of eight letters round. However it is spread, the numbers are those of one process.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import echelon

LETTERS, LENGTH, WIDTH = 12, 8, 64


class Turner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.letters(words) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x).transpose(1, 2)  # letters before places, as cross_entropy wants them


def words(count: int, seed: int) -> TensorDataset:
    made = torch.randint(LETTERS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(made, made.flip(1))


def main(epochs: int = 2) -> None:
    echelon.init(seed=0)
    model = Turner()
    engine = echelon.distribute(
        model,
        loss=F.cross_entropy,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.002),
        strategy=echelon.Strategy(auto=True),  # and nothing else
        log=echelon.Log(every=50),
    )
    loader = engine.loader(words(6400, seed=1), batch_size=32)  # the plan is found here
    for _ in loader.epochs(epochs):
        for given, turned in loader:
            engine.step(given, turned)
    found = engine.evaluate(words(500, seed=2), batch_size=50)
    if echelon.is_first_worker():
        print(f"the plan: {engine.plan.describe().splitlines()[0]}")
        print(f"loss on 500 unseen words after {engine.steps} steps: {found['loss']:.4f}")


if __name__ == "__main__":
    main()
