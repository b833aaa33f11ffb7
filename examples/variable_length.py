"""Sentences of different length: the same model and data, with and without buckets.

    python examples/variable_length.py
    echelon run --procs 2 examples/variable_length.py

The task is to say whether a sentence holds more ones than twos. Batches of like length need far less padding,
so an epoch takes less time and learns about as much.
"""

import argparse
import time

import torch

import echelon

WORDS, WIDTH = 8, 64


class Majority(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.hidden = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        there = (tokens != 0).unsqueeze(-1)
        words = torch.tanh(self.hidden(self.embedding(tokens))) * there
        return self.head(words.sum(1) / there.sum(1))


def make_sentences(count: int) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(count, generator=generator).mul(0.8).add(3).exp().clamp(3, 300).int().tolist()
    sentences = [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]
    return [(words, int((words == 1).sum() > (words == 2).sum())) for words in sentences]


def train(sentences: list[tuple[torch.Tensor, int]], bucket_window: int, epochs: int) -> tuple[float, float, float]:
    """Loss of the last epoch, part of the batches that was padding, seconds."""
    torch.manual_seed(0)
    model = Majority()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    engine = echelon.distribute(model, loss=torch.nn.functional.cross_entropy, optimizer=optimizer)
    lengths = [len(words) for words, _ in sentences]
    loader = engine.loader(sentences, batch_size=32, lengths=lengths, bucket_window=bucket_window)
    started = time.perf_counter()
    for _ in loader.epochs(epochs):
        losses = [float(engine.step(tokens, labels)) for tokens, labels in loader]
    return sum(losses) / len(losses), loader.padding_waste, time.perf_counter() - started


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    echelon.init()
    data = make_sentences(8000)
    for name, window in (("as they come", 1), ("in buckets", 64)):
        loss, waste, seconds = train(data, window, args.epochs)
        if echelon.is_first_worker():
            print(f"{name:14}loss {loss:.3f}   padding {waste:5.1%}   {seconds:.1f} s")
