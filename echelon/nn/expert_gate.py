"""The gate of a mixture of experts: which experts each token goes to, with what weight, and its place in their queues.

Top 1 is the gate of Switch Transformers (Fedus et al. 2021), top 2 that of GShard (Lepikhin et al. 2020). Nothing here
depends on how many tokens an expert got: all shapes are known beforehand, so a GPU is never waited for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenRouting:
    """experts: [top, tokens], the number of experts where a token goes nowhere; weights: [top, tokens];
    probabilities: [tokens, experts]."""

    experts: Tensor
    weights: Tensor
    probabilities: Tensor


@dataclass(frozen=True)
class ExpertQueues:
    """places: [top, tokens], among those of the same choice and expert; lengths: [top, experts]."""

    places: Tensor
    lengths: Tensor


def choose(logits: Tensor, top: int, random_second: bool = False) -> TokenRouting:
    """The ``top`` most probable experts of each token; of equal ones the first.

    The weight is the probability with one expert, and the two probabilities scaled to a sum of 1 with two.
    random_second: use the second one only with twice its weight as probability.
    """
    probabilities = logits.softmax(-1)
    first = probabilities.argmax(-1)
    best = probabilities.gather(1, first[:, None])[:, 0]
    if top == 1:
        return TokenRouting(first[None], best[None], probabilities)
    # Not topk: it does not say which of equal experts comes first, and padding makes all of them equal.
    second = probabilities.detach().scatter(1, first[:, None], -1.0).argmax(-1)
    other = probabilities.gather(1, second[:, None])[:, 0]
    weights = torch.stack([best, other]) / (best + other)
    if random_second:
        used = torch.rand_like(weights[1]) < 2 * weights[1]
        second = torch.where(used, second, logits.shape[1])
    return TokenRouting(torch.stack([first, second]), weights, probabilities)


def queue(experts: Tensor, count: int) -> ExpertQueues:
    """Let tokens stand in line for their experts, in their order; each choice has lines of its own."""
    top = experts.shape[0]
    lines = (experts + (count + 1) * torch.arange(top, device=experts.device)[:, None]).flatten()
    lengths = lines.new_zeros(top * (count + 1)).scatter_add_(0, lines, torch.ones_like(lines))
    order = lines.argsort(stable=True)
    begins = lengths.cumsum(0) - lengths
    rising = torch.arange(len(lines), device=lines.device) - begins[lines[order]]
    places = torch.empty_like(lines).scatter_(0, order, rising)
    return ExpertQueues(places.view_as(experts), lengths.view(top, count + 1)[:, :count])


def positions(experts: Tensor, queues: ExpertQueues, ahead: Tensor) -> Tensor:
    """Each token's position in its expert's capacity; ``ahead`` [top, experts] stand before the queue of a choice."""
    padded = torch.cat([ahead, ahead.new_zeros(len(ahead), 1)], 1)  # for tokens that go nowhere
    return queues.places + padded.gather(1, experts)


def capacity(factor: float, top: int, tokens: int, experts: int) -> int:
    """How many tokens an expert takes: ``factor`` times its even share."""
    return math.ceil(factor * top * tokens / experts)


def balance(fractions: Tensor, probabilities: Tensor) -> Tensor:
    """1 for an even load, above it for an uneven one. Both [experts]: the fraction of tokens whose first choice each
    is, which has no gradient, and the mean probability, which has."""
    return len(fractions) * (fractions * probabilities).sum()
