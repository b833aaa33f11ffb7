"""DIN (Zhou et al. 2018, "Deep Interest Network for Click-Through Rate Prediction")."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from echelon.nn import SparseEmbedding
from echelon.zoo import registry
from echelon.zoo.entry import Request, Setting
from echelon.zoo.models.click_entry import click_defaults, click_model, need_columns, sizes, table, table_settings


class InterestPooling(nn.Module):
    """DIN's activation unit: the sum of the behaviours' vectors, each weighted by a network of it and the candidate.

    As in the paper the weights are no softmax: their sum tells how strong the interest is.
    """

    def __init__(self, dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.score = perceptron(4 * dim, hidden)

    def forward(self, candidate: Tensor, history: Tensor, is_there: Tensor) -> Tensor:
        wanted = candidate.unsqueeze(1).expand_as(history)
        pairs = torch.cat([history, wanted, history - wanted, history * wanted], dim=2)
        weights = self.score(pairs) * is_there.unsqueeze(2)
        pooled: Tensor = (weights * history).sum(1)
        return pooled


class DIN(nn.Module):
    """The candidate, the part of the history that it activates, context ids and numbers, through a network.

    Candidate and history share one table. Id 0 pads histories.
    """

    def __init__(
        self,
        items: SparseEmbedding,
        context: SparseEmbedding,
        slots: int,
        numbers: int,
        attention: Sequence[int],
        hidden: Sequence[int],
    ) -> None:
        super().__init__()
        self.items, self.context = items, context
        self.interest = InterestPooling(items.dim, attention)
        self.layers = perceptron(2 * items.dim + slots * context.dim + numbers, hidden)

    def forward(self, ids: Tensor, numbers: Tensor, candidate: Tensor, history: Tensor) -> Tensor:
        wanted = self.items(candidate)
        interest = self.interest(wanted, self.items(history), history != 0)
        known = torch.cat([wanted, interest, self.context(ids).flatten(1), numbers], dim=1)
        logits: Tensor = self.layers(known).squeeze(1)
        return logits


def perceptron(inputs: int, hidden: Sequence[int]) -> nn.Sequential:
    """Return linear layers with PReLU between them, as in the paper's base model, and one output."""
    widths = [inputs, *hidden, 1]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.PReLU()]
    return nn.Sequential(*layers[:-1])


def _build(request: Request) -> nn.Module:
    need_columns(request, "slots")
    items = table(request, name="items", padding_id=0)
    attention, hidden = sizes(request, "attention"), sizes(request, "hidden")
    return DIN(items, table(request), request["slots"], request["numbers"], attention, hidden)


registry.add(
    click_model(
        "din",
        _build,
        task="click_history",
        about="what in a user's history the candidate activates (Zhou et al. 2018, with PReLU)",
        settings=(
            *table_settings(dim=16, rate=0.05),
            Setting(name="attention", default="80,40", meaning="layers of the activation unit; the paper's by default"),
            Setting(name="hidden", default="200,80", meaning="layers of the network; the paper's by default"),
        ),
        defaults=click_defaults(),
        tiny={"hidden": "16,8", "embedding_dim": 4, "attention": "8"},
    )
)
