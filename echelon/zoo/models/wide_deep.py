"""Wide & Deep (Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems")."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.nn import SparseEmbedding
from echelon.strategy.sparse_update_rules import Ftrl
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


class WideDeep(nn.Module):
    """Wide & Deep: a wide part that memorizes and a deep part that generalizes.

    The wide part has one weight per id, trained with FTRL; the deep part is a network on embedding vectors of the ids.
    """

    def __init__(
        self,
        wide: SparseEmbedding,
        deep: SparseEmbedding,
        slots: int,
        numbers: int,
        hidden: Sequence[int],
        dropout: float,
    ) -> None:
        super().__init__()
        self.wide, self.deep = wide, deep
        inputs = slots * deep.dim + numbers
        self.layers = network(inputs, hidden, dropout)
        self.head = nn.Linear(hidden[-1] if hidden else inputs, 1)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        deep = self.head(self.layers(torch.cat([self.deep(ids).flatten(1), numbers], dim=1)))
        logits: Tensor = (deep + self.wide(ids)).squeeze(1)
        return logits


def _build(request: Request) -> nn.Module:
    need_columns(request, "slots")
    rate = request["wide_learning_rate"]
    if not rate > 0:
        raise UsageError(f"--wide_learning_rate {rate}: must be above 0")
    wide = SparseEmbedding(1, optimizer=Ftrl(lr=float(rate)), initializer=0.0, combiner="sum")
    hidden, dropout = sizes(request, "hidden"), request["dropout"]
    return WideDeep(wide, table(request), request["slots"], request["numbers"], hidden, dropout)


registry.add(
    click_model(
        "wide_deep",
        _build,
        about="a weight for every id beside a network on their vectors (Cheng et al. 2016)",
        settings=(
            *table_settings(dim=16, rate=0.05),
            Setting(name="wide_learning_rate", default=0.05, meaning="of FTRL, which trains the wide part"),
            Setting(name="hidden", default="256,128", meaning="layers of the deep part"),
            Setting(name="dropout", default=0.1, meaning="after each of them"),
        ),
        defaults=click_defaults(),
        tiny={"hidden": "16,8", "embedding_dim": 4},
    )
)
