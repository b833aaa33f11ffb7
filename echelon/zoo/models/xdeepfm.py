"""xDeepFM (Lian et al. 2018, "xDeepFM: Combining Explicit and Implicit Feature Interactions")."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from echelon.base.errors import UsageError
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


class CompressedInteraction(nn.Module):
    """CIN: feature map h of a layer is the sum over i, j of W[h, i, j] * (map i of the layer below * field j).

    Products are entry by entry, so that interactions stay between whole vectors. The output has the sum over the
    entries of each map of each layer.
    """

    def __init__(self, fields: int, maps: Sequence[int]) -> None:
        super().__init__()
        below = [fields, *maps[:-1]]
        self.layers = nn.ModuleList(
            nn.Linear(before * fields, after, bias=False) for before, after in zip(below, maps, strict=True)
        )

    def forward(self, fields: Tensor) -> Tensor:
        maps, sums = fields, []
        for layer in self.layers:
            products = maps.unsqueeze(2) * fields.unsqueeze(1)  # [n, maps, fields, dim]
            maps = layer(products.flatten(1, 2).transpose(1, 2)).transpose(1, 2)
            sums.append(maps.sum(2))
        return torch.cat(sums, dim=1)


class XDeepFM(nn.Module):
    """A linear part, a compressed interaction network and a deep network on the same vectors.

    A number is a field too: it scales its own vector.
    """

    def __init__(
        self,
        first: SparseEmbedding,
        vectors: SparseEmbedding,
        fields: tuple[int, int],
        maps: Sequence[int],
        hidden: Sequence[int],
        dropout: float,
    ) -> None:
        super().__init__()
        slots, numbers = fields
        self.first, self.vectors = first, vectors
        self.number_weights = nn.Parameter(torch.zeros(numbers))
        self.number_vectors = nn.Parameter(torch.randn(numbers, vectors.dim) * 0.01)
        self.interaction = CompressedInteraction(slots + numbers, maps)
        inputs = (slots + numbers) * vectors.dim
        self.layers = network(inputs, hidden, dropout)
        self.head = nn.Linear(sum(maps) + (hidden[-1] if hidden else inputs), 1)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        fields = torch.cat([self.vectors(ids), numbers.unsqueeze(2) * self.number_vectors], dim=1)
        linear = self.first(ids).squeeze(1) + (numbers * self.number_weights).sum(1)
        known = torch.cat([self.interaction(fields), self.layers(fields.flatten(1))], dim=1)
        logits: Tensor = linear + self.head(known).squeeze(1)
        return logits


def _build(request: Request) -> nn.Module:
    need_columns(request, "slots")
    maps = sizes(request, "maps")
    if not maps:
        raise UsageError("--maps '': expected the feature maps of a layer or more, such as '32,32'")
    first = table(request, 1, initializer=0.0, combiner="sum")
    fields = request["slots"], request["numbers"]
    return XDeepFM(first, table(request), fields, maps, sizes(request, "hidden"), request["dropout"])


registry.add(
    click_model(
        "xdeepfm",
        _build,
        about="interactions between whole vectors, layer by layer, and a network (Lian et al. 2018)",
        settings=(
            *table_settings(dim=10, rate=0.05),
            Setting(name="maps", default="32,32", meaning="feature maps of each layer of the interaction network"),
            Setting(name="hidden", default="256,128", meaning="layers of the deep network"),
            Setting(name="dropout", default=0.0, meaning="after each of them"),
        ),
        defaults=click_defaults(),
        tiny={"hidden": "16,8", "embedding_dim": 4, "maps": "5,3"},
    )
)
