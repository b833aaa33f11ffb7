"""MMoE (Ma et al. 2018, "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts")."""

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

LABELS = 2  #: clicks and conversions


class MMoE(nn.Module):
    """Experts that all tasks share; each task has a gate, a softmax over experts, and a tower for its logit."""

    def __init__(
        self, vectors: SparseEmbedding, inputs: int, experts: int, expert: Sequence[int], tower: Sequence[int]
    ) -> None:
        super().__init__()
        self.vectors = vectors
        self.experts = nn.ModuleList(network(inputs, expert) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(inputs, experts, bias=False) for _ in range(LABELS))
        towers = (network(expert[-1], tower) for _ in range(LABELS))
        last = tower[-1] if tower else expert[-1]
        self.towers = nn.ModuleList(nn.Sequential(*layers, nn.Linear(last, 1)) for layers in towers)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        features = torch.cat([self.vectors(ids).flatten(1), numbers], dim=1)
        opinions = torch.stack([expert(features) for expert in self.experts], dim=1)
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            mixed = torch.bmm(gate(features).softmax(1).unsqueeze(1), opinions).squeeze(1)
            logits.append(tower(mixed))
        return torch.cat(logits, dim=1)


def _build(request: Request) -> nn.Module:
    need_columns(request, "slots")
    expert, count = sizes(request, "expert"), request["experts"]
    if not expert or count < 1:
        raise UsageError(f"--experts {count} --expert '{request['expert']}': expected one expert of one layer at least")
    vectors = table(request)
    inputs = request["slots"] * vectors.dim + request["numbers"]
    return MMoE(vectors, inputs, count, expert, sizes(request, "tower"))


registry.add(
    click_model(
        "mmoe",
        _build,
        task="click_and_conversion",
        about="shared experts, and a gate and a tower for each of two labels (Ma et al. 2018)",
        settings=(
            *table_settings(dim=16, rate=0.05),
            Setting(name="experts", default=8, meaning="networks that the labels share"),
            Setting(name="expert", default="128,64", meaning="layers of an expert"),
            Setting(name="tower", default="32", meaning="layers of a label's tower, before its output"),
        ),
        defaults=click_defaults(),
        tiny={"embedding_dim": 4, "experts": 3, "expert": "16,8", "tower": "4"},
    )
)
