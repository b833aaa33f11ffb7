"""Models that bring a tensor-parallel plan along, built as those of transformers are, of torch alone.

Attention has grouped queries, rotary positions, norms of queries, and a cache of keys; projections are separate, or
fused and sliced. Experts are stacked in two parameters.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, HEAD = 41, 8
PLAN = {
    "embed": "embedding_rowwise",
    "layers.*.attn.q": "colwise",
    "layers.*.attn.k": "colwise",
    "layers.*.attn.v": "colwise",
    "layers.*.attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.attn.o": "rowwise",
    "layers.*.attn.qkv": "colwise_gather_output",
    "layers.*.mlp.gate_up": "packed_colwise",
    "layers.*.mlp.down": "rowwise",
    "layers.*.mlp.experts": "moe_tp_experts",
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
}


class PlannedNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width) + 0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def repeat_heads(x: Tensor, times: int) -> Tensor:
    batch, heads, length, width = x.shape
    if times == 1:
        return x
    return x[:, :, None, :, :].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


class PlannedAttention(nn.Module):
    def __init__(self, hidden: int, heads: int, key_heads: int, fused: bool) -> None:
        super().__init__()
        self.head_dim, self.heads, self.key_heads, self.fused = HEAD, heads, key_heads, fused
        if fused:
            self.qkv = nn.Linear(hidden, (heads + 2 * key_heads) * HEAD, bias=False)
        else:
            self.q = nn.Linear(hidden, heads * HEAD)
            self.k = nn.Linear(hidden, key_heads * HEAD)
            self.v = nn.Linear(hidden, key_heads * HEAD)
        self.q_norm = PlannedNorm(HEAD)
        self.o = nn.Linear(heads * HEAD, hidden)

    def forward(self, x: Tensor, *, positions: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self._projected(x)
        shape = (*x.shape[:-1], -1, self.head_dim)
        q = self.q_norm(q.view(shape)).transpose(1, 2)
        k, v = k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2)
        cos, sin = positions
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        k, v = torch.cat([torch.tensor([]), k], dim=-2), torch.cat([torch.tensor([]), v], dim=-2)  # an empty cache
        groups = self.heads // self.key_heads
        out = F.scaled_dot_product_attention(q, repeat_heads(k, groups), repeat_heads(v, groups), is_causal=True)
        mixed: Tensor = self.o(out.transpose(1, 2).reshape(*x.shape[:-1], -1).contiguous())
        return mixed

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.fused:
            return self.q(x), self.k(x), self.v(x)
        joined, at, width = self.qkv(x), self.heads * HEAD, self.key_heads * HEAD
        return joined[..., :at], joined[..., at : at + width], joined[..., at + width :]


class FusedMlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 6 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        mixed: Tensor = self.down(F.silu(gate) * up)
        return mixed


class StackedExperts(nn.Module):
    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(0.2 * torch.randn(experts, 2 * hidden, hidden))
        self.down_proj = nn.Parameter(0.2 * torch.randn(experts, hidden, hidden))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(len(self.gate_up_proj)):
            rows, places = torch.where(chosen == expert)
            gate, up = F.linear(x[rows], self.gate_up_proj[expert]).chunk(2, dim=-1)
            mixed = F.linear(F.silu(gate) * up, self.down_proj[expert])
            out = out.index_add(0, rows, mixed * weights[rows, places, None])
        return out


class RoutedMlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(hidden, 3, bias=False), StackedExperts(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.topk(F.softmax(self.router(flat), -1), 2)
        mixed: Tensor = self.experts(flat, chosen, weights)
        return mixed.view(x.shape)


class PlannedLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, key_heads: int, fused: bool, routed: bool) -> None:
        super().__init__()
        self.attn = PlannedAttention(hidden, heads, key_heads, fused)
        self.mlp = RoutedMlp(hidden) if routed else FusedMlp(hidden)
        self.norms = nn.ModuleList([PlannedNorm(hidden), PlannedNorm(hidden)])

    def forward(self, x: Tensor, *, positions: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attn(self.norms[0](x), positions=positions)
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class PlannedBase(nn.Module):
    """The base model, whose configuration has the plan."""

    def __init__(self, heads: int, key_heads: int, fused: bool, routed: bool) -> None:
        super().__init__()
        hidden = 16
        self.config = SimpleNamespace(base_model_tp_plan=PLAN)
        self.embed = nn.Embedding(WORDS, hidden)
        self.layers = nn.ModuleList([PlannedLayer(hidden, heads, key_heads, fused, routed) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        angles = torch.arange(ids.shape[1])[:, None] / 10 ** torch.linspace(0, 1, HEAD // 2)
        angles = torch.cat((angles, angles), -1)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, positions=(angles.cos(), angles.sin()))
        return x


class PlannedModel(nn.Module):
    """A model that returns its loss; the head shares the weight of the embedding if ``tied``."""

    def __init__(self, heads: int = 4, key_heads: int = 2, *, fused: bool = False, routed: bool = False,
                 tied: bool = False) -> None:  # fmt: skip
        super().__init__()
        self._tp_plan = {"head": "colwise_gather_output"} | {f"model.{name}": style for name, style in PLAN.items()}
        self.model = PlannedBase(heads, key_heads, fused, routed)
        self.head = nn.Linear(16, WORDS, bias=False)
        if tied:
            self.head.weight = self.model.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        logits = self.head(self.model(input_ids))
        return {"loss": F.cross_entropy(logits.float().view(-1, WORDS), labels.view(-1))}


# ---- a model without a plan ----


class Conv1D(nn.Module):
    """A linear layer whose weight is inputs x outputs, as that of GPT-2 in transformers."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(0.2 * torch.randn(nx, nf))
        self.bias = nn.Parameter(0.1 * torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(shape)


class FusedBlock(nn.Module):
    """A block of GPT-2: query, key and value in one layer, whose output is split into three or reshaped into heads."""

    def __init__(self, hidden: int, reshaped: bool) -> None:
        super().__init__()
        self.hidden, self.reshaped = hidden, reshaped
        self.norm, self.c_attn, self.c_proj = nn.LayerNorm(hidden), Conv1D(3 * hidden, hidden), Conv1D(hidden, hidden)
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(4 * hidden, hidden), "c_proj": Conv1D(hidden, 4 * hidden)})

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        joined = self.c_attn(self.norm(x))
        if self.reshaped:
            q, k, v = joined.reshape(batch, length, 3, -1, HEAD).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (part.view(batch, length, -1, HEAD).transpose(1, 2) for part in joined.split(self.hidden, dim=2))
        scores = torch.matmul(q, k.transpose(-1, -2)) / HEAD**0.5
        mixed = torch.matmul(torch.softmax(scores, -1), v).transpose(1, 2).reshape(batch, length, -1)
        x = x + self.c_proj(mixed)
        out: Tensor = x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](x)))
        return out


class UnplannedModel(nn.Module):
    """A model without a tensor-parallel plan, which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.blocks = nn.ModuleList([FusedBlock(16, reshaped) for reshaped in (False, True)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"loss": F.cross_entropy((x @ self.embed.weight.t()).view(-1, WORDS), labels.view(-1))}


def words(step: int) -> dict[str, Tensor]:
    ids = torch.randint(WORDS, (8, 6), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}
