"""DLRM (Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems")."""

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


class DLRM(nn.Module):
    """DLRM: the bottom network maps the numbers to a vector; the top network gets it and the products of all pairs.

    The pairs are those of the vector of the numbers and the vectors of the ids. One table has the vectors of all slots,
    because ids of different columns differ.
    """

    pairs: Tensor

    def __init__(
        self, vectors: SparseEmbedding, slots: int, numbers: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        self.vectors = vectors
        self.bottom = network(numbers, [*bottom, vectors.dim])
        fields = slots + 1
        self.register_buffer("pairs", _pairs(fields), persistent=False)
        inputs = vectors.dim + fields * (fields - 1) // 2
        self.top = network(inputs, top)
        self.head = nn.Linear(top[-1] if top else inputs, 1)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        fields = torch.cat([dense.unsqueeze(1), self.vectors(ids).to(dense.dtype)], dim=1)
        products = torch.bmm(fields, fields.transpose(1, 2)).flatten(1)
        known = torch.cat([dense, products.index_select(1, self.pairs)], dim=1)
        logits: Tensor = self.head(self.top(known)).squeeze(1)
        return logits


def _pairs(fields: int) -> Tensor:
    """Return the indices of the products of different fields, each pair once."""
    first, second = torch.tril_indices(fields, fields, -1)
    places: Tensor = first * fields + second
    return places


def _build(request: Request) -> nn.Module:
    need_columns(request, "slots", "numbers")
    bottom, top = sizes(request, "bottom"), sizes(request, "top")
    return DLRM(table(request), request["slots"], request["numbers"], bottom, top)


registry.add(
    click_model(
        "dlrm",
        _build,
        about="products of all pairs of vectors between two networks (Naumov et al. 2019)",
        parameters=2_368_897,
        counted={"embedding_dim": 128, "bottom": "512,256", "top": "1024,1024,512,256"},
        published="the networks of MLPerf Training's DLRM (13-512-256-128, 479-1024-1024-512-256-1); tables grow",
        settings=(
            *table_settings(dim=16, rate=0.05),
            Setting(
                name="bottom", default="512,256,64", meaning="layers of the bottom network, before one of embedding_dim"
            ),
            Setting(name="top", default="512,256", meaning="layers of the top network, before its output"),
        ),
        defaults=click_defaults(),
        tiny={"bottom": "16", "top": "16,8", "embedding_dim": 4},
    )
)
