"""The gate of a mixture of experts: it assigns experts, weights and queue positions to tokens.

Top 1 is the gate of Switch Transformers (Fedus et al. 2021), top 2 that of GShard (Lepikhin et al. 2020). No shape
depends on the number of tokens that an expert receives, so the host never waits for the GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenRouting:
    """Experts and weights of each token.

    experts:        [top, tokens], index of the expert; the number of experts if the token has none
    weights:        [top, tokens]
    probabilities:  [tokens, experts]
    """

    experts: Tensor
    weights: Tensor
    probabilities: Tensor


@dataclass(frozen=True)
class ExpertQueues:
    """Positions of the tokens in the queues of their experts; each choice has its own queues.

    places:   [top, tokens], index among the tokens of the same choice and expert
    lengths:  [top, experts], tokens in each queue
    """

    places: Tensor
    lengths: Tensor


def choose(logits: Tensor, top: int, random_second: bool = False) -> TokenRouting:
    """Select the ``top`` most probable experts of each token; among equal experts the first one wins.

    With top=1 the weight is the probability; with top=2 the two probabilities are scaled to a sum of 1.

    random_second:  use the second expert only with a probability of twice its weight; default False
    """
    probabilities = logits.softmax(-1)
    first = probabilities.argmax(-1)
    best = probabilities.gather(1, first[:, None])[:, 0]
    if top == 1:
        return TokenRouting(first[None], best[None], probabilities)
    # topk does not specify the order of equal experts, and padding makes all of them equal.
    second = probabilities.detach().scatter(1, first[:, None], -1.0).argmax(-1)
    other = probabilities.gather(1, second[:, None])[:, 0]
    weights = torch.stack([best, other]) / (best + other)
    if random_second:
        used = torch.rand_like(weights[1]) < 2 * weights[1]
        second = torch.where(used, second, logits.shape[1])
    return TokenRouting(torch.stack([first, second]), weights, probabilities)


def queue(experts: Tensor, count: int) -> ExpertQueues:
    """Assign each token a position in the queue of its expert, in token order; each choice has its own queues."""
    top = experts.shape[0]
    lines = (experts + (count + 1) * torch.arange(top, device=experts.device)[:, None]).flatten()
    lengths = lines.new_zeros(top * (count + 1)).scatter_add_(0, lines, torch.ones_like(lines))
    order = lines.argsort(stable=True)
    begins = lengths.cumsum(0) - lengths
    rising = torch.arange(len(lines), device=lines.device) - begins[lines[order]]
    places = torch.empty_like(lines).scatter_(0, order, rising)
    return ExpertQueues(places.view_as(experts), lengths.view(top, count + 1)[:, :count])


def positions(experts: Tensor, queues: ExpertQueues, ahead: Tensor) -> Tensor:
    """Return each token's position in its expert's capacity.

    ahead:  [top, experts], tokens before the queue of each choice
    """
    padded = torch.cat([ahead, ahead.new_zeros(len(ahead), 1)], 1)  # for tokens without an expert
    return queues.places + padded.gather(1, experts)


def capacity(factor: float, top: int, tokens: int, experts: int) -> int:
    """Return the number of tokens that an expert takes: ``factor`` times its even share, rounded up."""
    return math.ceil(factor * top * tokens / experts)


def balance(fractions: Tensor, probabilities: Tensor) -> Tensor:
    """Return the load-balancing loss: 1 for an even load, more for an uneven one.

    fractions:      [experts], fraction of tokens whose first choice is each expert; has no gradient
    probabilities:  [experts], mean probability of each expert; has a gradient
    """
    return len(fractions) * (fractions * probabilities).sum()
