"""DCN-v2 (Wang et al. 2021, "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Ranking")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

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


class CrossLayer(nn.Module):
    """One cross of the features ``x0`` with those of the layer below: x0 * (W x + b) + x.

    rank: rank of W = U V, the low-rank form; 0 (default) is a full matrix
    """

    def __init__(self, width: int, rank: int = 0) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False) if rank else nn.Identity()
        self.up = nn.Linear(rank or width, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        crossed: Tensor = x0 * self.up(self.down(x)) + x
        return crossed


class DCNv2(nn.Module):
    """Cross layers and a deep network on the vectors of ids and the numbers.

    The network gets the crosses ("stacked"), or the features, beside the crosses ("parallel").
    """

    def __init__(
        self,
        vectors: SparseEmbedding,
        inputs: int,
        crosses: Sequence[CrossLayer],
        hidden: Sequence[int],
        dropout: float,
        structure: str,
    ) -> None:
        super().__init__()
        self.vectors, self.structure = vectors, structure
        self.crosses = nn.ModuleList(crosses)
        self.layers = network(inputs, hidden, dropout)
        deep = hidden[-1] if hidden else inputs
        self.head = nn.Linear(deep if structure == "stacked" else deep + inputs, 1)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        features = torch.cat([self.vectors(ids).flatten(1), numbers], dim=1)
        crossed = features
        for cross in self.crosses:
            crossed = cross(features, crossed)
        if self.structure == "stacked":
            known = self.layers(crossed)
        else:
            known = torch.cat([crossed, self.layers(features)], dim=1)
        logits: Tensor = self.head(known).squeeze(1)
        return logits


def _build(request: Request) -> nn.Module:
    need_columns(request, "slots")
    layers, rank = request["cross_layers"], request["cross_rank"]
    if layers < 1 or rank < 0:
        raise UsageError(
            f"--cross_layers {layers} --cross_rank {rank}: expected a layer or more, and a rank of 0 (full) or more"
        )
    vectors = table(request)
    inputs = request["slots"] * vectors.dim + request["numbers"]
    crosses = [CrossLayer(inputs, rank) for _ in range(layers)]
    hidden = sizes(request, "hidden")
    return DCNv2(vectors, inputs, crosses, hidden, request["dropout"], request["structure"])


registry.add(
    click_model(
        "dcn_v2",
        _build,
        about="cross layers, full or of low rank, with a deep network (Wang et al. 2021)",
        settings=(
            *table_settings(dim=16, rate=0.05),
            Setting(name="cross_layers", default=3, meaning="layers that cross the features"),
            Setting(name="cross_rank", default=0, meaning="rank of their matrices; 0: full matrices"),
            Setting(
                name="structure",
                default="stacked",
                meaning="the deep network after the crosses, or beside them",
                kind=Literal["stacked", "parallel"],
            ),
            Setting(name="hidden", default="256,128", meaning="layers of the deep network"),
            Setting(name="dropout", default=0.0, meaning="after each of them"),
        ),
        defaults=click_defaults(),
        tiny={"hidden": "16,8", "embedding_dim": 4, "cross_layers": 2},
    )
)
