"""DeepFM (Guo et al. 2017, "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction")."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from echelon.nn import SparseEmbedding
from echelon.zoo import registry
from echelon.zoo.entry import Request, Setting
from echelon.zoo.models.click_entry import (
    click_defaults,
    click_model,
    need_columns,
    network,
    sizes,
    table,
    table_settings,
)


class DeepFM(nn.Module):
    """A factorization machine and a deep network on the same embedding vectors.

    A number is a field too: it scales its own vector.
    """

    def __init__(
        self,
        first: SparseEmbedding,
        second: SparseEmbedding,
        slots: int,
        numbers: int,
        hidden: Sequence[int],
        dropout: float,
    ) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.number_weights = nn.Parameter(torch.zeros(numbers))
        self.number_vectors = nn.Parameter(torch.randn(numbers, second.dim) * 0.01)
        inputs = (slots + numbers) * second.dim
        self.layers = network(inputs, hidden, dropout)
        self.head = nn.Linear(hidden[-1] if hidden else inputs, 1)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        fields = torch.cat([self.second(ids), numbers.unsqueeze(2) * self.number_vectors], dim=1)
        # the sum of the dot products of all pairs of fields, in linear time
        pairs = 0.5 * (fields.sum(1).square() - fields.square().sum(1)).sum(1)
        single = self.first(ids).squeeze(1) + (numbers * self.number_weights).sum(1)
        logits: Tensor = single + pairs + self.head(self.layers(fields.flatten(1))).squeeze(1)
        return logits


def _build(request: Request) -> nn.Module:
    need_columns(request, "slots")
    first = table(request, 1, initializer=0.0, combiner="sum")
    hidden, dropout = sizes(request, "hidden"), request["dropout"]
    return DeepFM(first, table(request), request["slots"], request["numbers"], hidden, dropout)


registry.add(
    click_model(
        "deepfm",
        _build,
        about="a factorization machine and a network on the same vectors (Guo et al. 2017)",
        settings=(
            *table_settings(dim=10, rate=0.05),
            Setting(name="hidden", default="400,400,400", meaning="layers of the deep part; the paper's by default"),
            Setting(name="dropout", default=0.5, meaning="after each of them; the paper's by default"),
        ),
        defaults=click_defaults(),
        tiny={"hidden": "16,8", "embedding_dim": 4},
    )
)
