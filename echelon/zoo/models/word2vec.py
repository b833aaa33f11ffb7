"""word2vec (Mikolov et al. 2013, "Distributed Representations of Words and Phrases and their Compositionality")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echelon.nn import SparseEmbedding
from echelon.zoo import registry
from echelon.zoo.entry import Model, Request, Setting
from echelon.zoo.models.click_entry import ADVICE, table, table_settings


class SkipGram(nn.Module):
    """Skip-gram with negative samples: a word discriminates its neighbors from random words.

    There is no vocabulary: any id has a vector. The bias, which the paper does not have, models the fraction of words
    that are neighbors.
    """

    def __init__(self, words: SparseEmbedding, contexts: SparseEmbedding) -> None:
        super().__init__()
        self.words, self.contexts = words, contexts
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, words: Tensor, others: Tensor) -> Tensor:
        products = torch.bmm(self.contexts(others), self.words(words).unsqueeze(2)).squeeze(2)
        return products + self.bias


def _build(request: Request) -> nn.Module:
    dim = request["embedding_dim"]
    # Word vectors are initialized as in the program of the paper. Context vectors start at zero there too, so that all
    # initial scores are zero.
    return SkipGram(table(request, initializer=0.5 / dim), table(request, initializer=0.0))


registry.add(
    Model(
        name="word2vec",
        runner="word2vec",
        build=_build,
        tasks={"pretrain": ("word_pairs",), "finetune": ("word_pairs",)},
        about="vectors of words: skip-gram with negative samples (Mikolov et al. 2013)",
        settings=(
            *table_settings(dim=100, rate=0.1),
            Setting(name="negatives", default=5, meaning="words drawn at random beside each neighbour"),
        ),
        defaults={
            "batch_size": 512,
            "optimizer": "sgd",
            "learning_rate": 0.01,
            "learning_rate_decay_type": "fixed",
            "weight_decay": 0.0,
        },
        strategy={"ps": "async"},
        advice=ADVICE,
        tiny={"embedding_dim": 8},
    )
)
