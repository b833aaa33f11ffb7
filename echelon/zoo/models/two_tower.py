"""Two towers for retrieval with in-batch negatives (Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling").

The loss compares every user with the items of the whole global batch, whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.nn import Packed, SparseEmbedding
from echelon.zoo import registry
from echelon.zoo.entry import Request, Setting
from echelon.zoo.models.click_entry import click_defaults, click_model, network, sizes, table, table_settings

USER_COLUMNS, ITEM_COLUMNS = 2, 2  #: columns of ids, unless the data set says otherwise


class Tower(nn.Module):
    """A network from the vectors of some ids to one vector of length 1."""

    def __init__(self, inputs: int, hidden: Sequence[int], output: int) -> None:
        super().__init__()
        self.layers = network(inputs, hidden)
        self.head = nn.Linear(hidden[-1] if hidden else inputs, output)

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(self.head(self.layers(features)), dim=1)


class TwoTower(nn.Module):
    """Vectors of users, divided by the temperature, vectors of items, and the ids of the items.

    An item has columns of ids, of which the first names the item, and a bag of tags: ragged (``Packed``), or padded
    with 0.
    """

    def __init__(
        self,
        users: SparseEmbedding,
        items: SparseEmbedding,
        tags: SparseEmbedding,
        columns: tuple[int, int],
        hidden: Sequence[int],
        output: int,
        temperature: float,
    ) -> None:
        super().__init__()
        self.users, self.items, self.tags, self.temperature = users, items, tags, temperature
        self.user_tower = Tower(columns[0] * users.dim, hidden, output)
        self.item_tower = Tower(columns[1] * items.dim + tags.dim, hidden, output)

    def forward(self, users: Tensor, items: Tensor, tags: Tensor | Packed) -> tuple[Tensor, Tensor, Tensor]:
        wishes = self.user_tower(self.users(users).flatten(1)) / self.temperature
        offers = self.item_tower(torch.cat([self.items(items).flatten(1), self.tags(tags)], dim=1))
        return wishes, offers, items[:, 0]


def _build(request: Request) -> nn.Module:
    if not request["temperature"] > 0:
        raise UsageError(f"--temperature {request['temperature']}: must be above 0")
    tables = (table(request), table(request), table(request, combiner="mean", padding_id=0))
    columns = request["user_columns"], request["item_columns"]
    return TwoTower(*tables, columns, sizes(request, "hidden"), request["output_dim"], request["temperature"])


registry.add(
    click_model(
        "two_tower",
        _build,
        task="retrieve",
        columns=(
            Setting(name="user_columns", default=USER_COLUMNS, meaning="columns of ids of a user; the data set's own"),
            Setting(name="item_columns", default=ITEM_COLUMNS, meaning="columns of ids of an item; the data set's own"),
        ),
        about="a user's and an item's vectors, with the whole batch's items as negatives (Yi et al. 2019)",
        settings=(
            *table_settings(dim=16, rate=0.05),
            Setting(name="hidden", default="64", meaning="layers of a tower, before its output"),
            Setting(name="output_dim", default=32, meaning="numbers in the vector of a user or an item"),
            Setting(name="temperature", default=0.1, meaning="of the softmax over the items of a batch"),
        ),
        defaults=click_defaults(batch_size=256),
        tiny={"embedding_dim": 4, "hidden": "8", "output_dim": 6},
    )
)
