"""A pipeline: a small transformer learns to write lines of a play, each process with some of its layers.

    echelon run --procs 2 examples/pipeline.py
    echelon run --procs 4 examples/pipeline.py                       four stages
    echelon run --procs 4 examples/pipeline.py --stages 2            two copies of two stages
    echelon run --procs 2 examples/pipeline.py --stages 4 --schedule interleaved
    python examples/pipeline.py --stages 2                           the same numbers on one process

The model says nothing about stages: it is cut where the arithmetic is halved. Weights of the two ends are tied.
"""

from __future__ import annotations

import argparse
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import echelon

WIDTH, LENGTH, DEPTH = 64, 32, 4
ALPHABET = "\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ,.!?:"
NAMES = ["ROMEO", "JULIET", "NURSE", "FRIAR"]
PHRASES = [
    ["good night", "sweet love", "my lord", "alas", "come hither", "speak again"],
    ["thou art", "I am", "the night is", "my heart is", "the stars are"],
    ["not gone", "fair as day", "full of grief", "too rash", "but a dream", "at rest"],
]


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(DEPTH)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(ALPHABET), bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, letters: Tensor) -> Tensor:
        length = letters.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=letters.device)
        h = self.embed(letters) + self.place[:length]
        for block in self.blocks:
            h = block(h, src_mask=mask, is_causal=True)
        return self.head(self.norm(h))


def play(lines: int) -> Tensor:
    chance = random.Random(0)
    text = "\n".join(
        f"{chance.choice(NAMES)}: {', '.join(chance.choice(part) for part in PHRASES)}{chance.choice('.!?')}"
        for _ in range(lines)
    )
    return torch.tensor([ALPHABET.index(letter) for letter in text])


def loss_of(scores: Tensor, letters: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), letters.flatten())


def write(weights: dict[str, Tensor], count: int = 100) -> str:
    """Return the text that a whole model, made from all stages' weights, writes after a line break."""
    model = Writer().eval()
    model.load_state_dict(weights)
    letters = [0]
    with torch.no_grad():
        for _ in range(count):
            scores = model(torch.tensor([letters[-LENGTH:]]))[0, -1]
            letters.append(int(torch.multinomial((scores / 0.5).softmax(0), 1)))
    return "".join(ALPHABET[letter] for letter in letters[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=0, help="0: as many as processes")
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, interleaved or zero-bubble")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--lines", type=int, default=500, help="length of the play")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    echelon.init(seed=0)
    model = Writer()
    stages = args.stages or echelon.world_size()
    if stages > 1:
        how = echelon.pipeline(micro_batches=args.micro_batches, schedule=args.schedule, stages=stages)
        echelon.annotate(model, {"": how})
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    engine = echelon.distribute(model, loss=loss_of, optimizer=optimizer, log=echelon.Log(console=False))
    text = play(args.lines)
    rows = text[: len(text) // LENGTH * LENGTH]
    wanted = torch.cat([rows[1:], text[:1]]).view(-1, LENGTH)
    loader = engine.loader(TensorDataset(rows.view(-1, LENGTH), wanted), global_batch=16)
    for _ in loader.epochs(args.epochs):
        for letters, following in loader:
            loss = engine.step(letters, following)
    weights = engine.whole_state()
    if echelon.is_first_worker():
        part = sum(p.numel() for p in engine.optimizers["main"].param_groups[0]["params"])
        print(f"{part:,} of {sum(p.numel() for p in Writer().parameters()):,} weights on process 0; loss {loss:.3f}")
        print(write(weights))


if __name__ == "__main__":
    main()
