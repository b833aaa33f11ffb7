"""word2vec: skip-gram with negative samples, two sparse tables, no vocabulary.

    echelon run --servers 1 --workers 2 examples/word2vec.py --mode async
    python examples/word2vec.py

A word's id is a hash of its letters, so that a new word needs no registration. The text is made up: words that go
together belong to one of a few topics, and after training a word's nearest neighbours are of its own topic.
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon
from echelon.nn import SparseEmbedding
from echelon.parameter_server.protocol.hashing import stable_hash
from echelon.strategy.sparse_update_rules import Adagrad

TOPICS, WORDS, NEGATIVES = 6, 30, 5
VOCABULARY = [f"topic{topic}-word{word}" for topic in range(TOPICS) for word in range(WORDS)]


class SkipGram(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.word = SparseEmbedding(dim, optimizer=Adagrad(lr=0.1))
        self.context = SparseEmbedding(dim, optimizer=Adagrad(lr=0.1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, words: Tensor, others: Tensor) -> Tensor:
        return torch.einsum("nd,nkd->nk", self.word(words), self.context(others)) + self.bias


def pairs(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Words, each with one of its own topic and some of any; labels say which is which."""
    random = np.random.default_rng(seed)
    ids = np.array([stable_hash(word) for word in VOCABULARY])
    topic = random.integers(0, TOPICS, count)
    word = topic * WORDS + random.integers(0, WORDS, count)
    near = topic * WORDS + random.integers(0, WORDS, count)
    far = random.integers(0, len(VOCABULARY), (count, NEGATIVES))
    others = np.concatenate([near[:, None], far], axis=1)
    labels = np.zeros((count, 1 + NEGATIVES), np.float32)
    labels[:, 0] = 1
    return torch.from_numpy(ids[word]), torch.from_numpy(ids[others]), torch.from_numpy(labels)


def own_topic(model: SkipGram) -> float:
    """Return the fraction of words whose nearest neighbour has their own topic."""
    ids = torch.tensor([stable_hash(word) for word in VOCABULARY])
    with torch.no_grad():
        rows = F.normalize(model.word(ids), dim=1)
    nearest = (rows @ rows.T).fill_diagonal_(-1).argmax(1)
    return (nearest // WORDS == torch.arange(len(ids)) // WORDS).float().mean().item()


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--mode", default="async", choices=["sync", "async", "bounded", "geo", "hybrid"])
    asked = ask.parse_args()
    echelon.init(seed=0)
    model = SkipGram()
    engine = echelon.distribute(
        model,
        loss=F.binary_cross_entropy_with_logits,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=echelon.Strategy(ps=asked.mode),
        log=echelon.Log(console=False),
    )
    loader = engine.loader(pairs(40_000, seed=1), global_batch=256)
    for _ in loader.epochs(3):
        for words, others, labels in loader:
            engine.step(words, others, labels)
    engine.synchronize()
    if echelon.is_first_worker():
        print(f"{asked.mode}: {own_topic(model):.0%} of all words have a nearest neighbour of their own topic")
    engine.close()


if __name__ == "__main__":
    main()
