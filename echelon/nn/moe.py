"""MoE: a layer of many feed-forward experts, of which each token uses one or two.

``MoE`` is an ordinary module in one process. ``split_moe`` puts its experts on different ranks, with equal results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.nn.expert_gate import TokenRouting, balance, capacity, choose, positions, queue

#: Maps the rows of each expert [experts, rows, dim] and w1, b1, w2, b2 to the experts' outputs, of the same shape.
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def feed_forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Apply two linear layers with a GELU between them, for all experts at once."""
    return torch.baddbmm(b2[:, None], F.gelu(torch.baddbmm(b1[:, None], x, w1)), w2)


class MoE(nn.Module):
    """A mixture of feed-forward layers (experts) over the last dimension of the input.

    dim:           width of the input and of the output
    experts:       number of experts
    hidden:        hidden width of an expert; default 4 * dim
    top:           experts per token: 1 or 2; default 1
    capacity:      tokens that an expert takes, as a multiple of its even share; default 1.25. Later tokens are dropped,
                   which means that their output is zero (put a residual connection around the layer). First choices
                   of all tokens come before second choices, and earlier tokens before later ones
    auxiliary:     weight of the load-balancing loss; default 0.01
    noise:         in training, the gate's input is multiplied by random numbers between 1 - noise and 1 + noise;
                   default 0
    random_second: in training with top=2, use the second expert only with a probability of twice its weight
    expert:        function that the experts compute in place of ``feed_forward``, for all experts at once

    After each forward pass in training ``auxiliary_loss`` is the term to add to the loss (the engine adds it), and
    ``dropped`` is the fraction of this process's assignments that exceeded the capacity.

    >>> moe = echelon.nn.MoE(64, experts=8, top=2)
    >>> y = moe(torch.rand(2, 16, 64))
    """

    def __init__(
        self,
        dim: int,
        experts: int,
        hidden: int | None = None,
        *,
        top: int = 1,
        capacity: float = 1.25,
        auxiliary: float = 0.01,
        noise: float = 0.0,
        random_second: bool = False,
        expert: Experts | None = None,
    ) -> None:
        super().__init__()
        _check(dim, experts, top, capacity, auxiliary, noise)
        self.dim, self.experts, self.hidden = dim, experts, 4 * dim if hidden is None else hidden
        self.top, self.capacity, self.auxiliary = top, capacity, auxiliary
        self.noise, self.random_second = noise, random_second
        self.expert = expert or feed_forward
        self.gate = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(experts, dim, self.hidden))
        self.b1 = nn.Parameter(torch.empty(experts, self.hidden))
        self.w2 = nn.Parameter(torch.empty(experts, self.hidden, dim))
        self.b2 = nn.Parameter(torch.empty(experts, dim))
        self.auxiliary_loss: Tensor | None = None
        self.dropped: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize each expert like two ``nn.Linear`` layers."""
        for weight, bias in ((self.w1, self.b1), (self.w2, self.b2)):
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)
        self.gate.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``x`` [..., dim]; the result has the same shape."""
        if x.shape[-1] != self.dim:
            raise UsageError(
                f"MoE(dim={self.dim}) got an input of shape {tuple(x.shape)}; make its last size {self.dim}"
            )
        mixed, auxiliary = self._mix(x.reshape(-1, self.dim))
        wanted = self.training and self.auxiliary > 0
        self.auxiliary_loss = self.auxiliary * auxiliary if wanted else None
        return mixed.view(x.shape)

    def _mix(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of each token and the load-balancing loss before its weight."""
        choice = self._choose(tokens, self.gate.weight)
        queues = queue(choice.experts, self.experts)
        room = capacity(self.capacity, self.top, len(tokens), self.experts)
        at = positions(choice.experts, queues, ahead=queues.lengths.cumsum(0) - queues.lengths)
        kept = (choice.experts < self.experts) & (at < room)
        # A token beyond the capacity is written to one extra slot, and its output is read from any slot with weight 0.
        slots = torch.where(kept, choice.experts * room + at, self.experts * room).flatten()
        buffer = tokens.new_zeros(self.experts * room + 1, self.dim)
        buffer.index_copy_(0, slots, tokens.repeat(self.top, 1))
        rows = self._compute(buffer[:-1].view(self.experts, room, self.dim)).flatten(0, 1)
        fractions = queues.lengths[0] / max(len(tokens), 1)
        uneven = balance(fractions, choice.probabilities.sum(0) / max(len(tokens), 1))
        return self._weigh(rows.index_select(0, slots.clamp(max=len(rows) - 1)), kept, choice), uneven

    def _compute(self, rows: Tensor) -> Tensor:
        """Apply every expert to its rows, [experts, rows, dim]."""
        return self.expert(rows, self.w1, self.b1, self.w2, self.b2)

    def _weigh(self, rows: Tensor, kept: Tensor, choice: TokenRouting) -> Tensor:
        """Combine the experts' outputs, [top * tokens, dim], into each token's output."""
        with torch.no_grad():
            self.dropped = ((choice.experts < self.experts) & ~kept).sum() / max(kept.numel(), 1)
        weights = torch.where(kept, choice.weights, 0.0).to(rows.dtype)
        return (rows.view(*kept.shape, self.dim) * weights[..., None]).sum(0)

    def _choose(self, tokens: Tensor, weight: Tensor) -> TokenRouting:
        # The gate computes in float32 even under 16-bit precision: rounding would route tokens to other experts.
        with torch.autocast(tokens.device.type, enabled=False):
            seen = tokens.float() if tokens.dtype in (torch.float16, torch.bfloat16) else tokens
            if self.training and self.noise > 0:
                seen = seen * torch.empty_like(seen).uniform_(1 - self.noise, 1 + self.noise)
            return choose(F.linear(seen, weight.to(seen.dtype)), self.top, self.training and self.random_second)

    def __getstate__(self) -> dict[str, Any]:
        # auxiliary_loss belongs to the autograd graph of the last forward pass, which cannot be copied.
        return {**self.__dict__, "auxiliary_loss": None}

    def extra_repr(self) -> str:
        return f"dim={self.dim}, experts={self.experts}, hidden={self.hidden}, top={self.top}, capacity={self.capacity}"


def take_auxiliary_loss(model: nn.Module) -> Tensor | None:
    """Return the sum of the auxiliary losses of the last forward pass and clear them; None if there are none.

    model: module with ``MoE`` layers

    >>> auxiliary = echelon.nn.take_auxiliary_loss(model)
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    losses = [layer.auxiliary_loss for layer in layers if layer.auxiliary_loss is not None]
    for layer in layers:
        layer.auxiliary_loss = None
    return torch.stack(losses).sum() if losses else None


def _check(dim: int, experts: int, top: int, capacity: float, auxiliary: float, noise: float) -> None:
    for holds, given, wanted in (
        (dim >= 1, f"dim={dim}", "1 or more"),
        (experts >= 1, f"experts={experts}", "1 or more"),
        (top in (1, 2), f"top={top}", "1 or 2"),
        (top <= experts, f"top={top}, experts={experts}", "no more than there are experts"),
        (capacity > 0, f"capacity={capacity}", "a factor above 0"),
        (auxiliary >= 0, f"auxiliary={auxiliary}", "0 or more"),
        (0 <= noise < 1, f"noise={noise}", "0 up to but below 1"),
    ):
        if not holds:
            raise UsageError(f"MoE({given}): expected {wanted}")
