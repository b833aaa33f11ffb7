"""Workloads of gpu.py: ResNet-50, BERT-large and GPT-2-medium, each as a model, a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """``images``: convolutions, which an expert would lay out with their channels last."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    samples: int
    unit: str
    images: bool = False


class MaskedLanguageModel(nn.Module):
    """BERT-large with its output layer, as a function from token ids to logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
            hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, attn_implementation="sdpa",
        )  # fmt: skip
        self.bert = BertForMaskedLM(config)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.bert(ids).logits
        return logits


class CausalLanguageModel(nn.Module):
    """GPT-2-medium."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False, attn_implementation="sdpa")
        self.gpt = GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.gpt(ids).logits
        return logits


def resnet50() -> nn.Module:
    from torchvision.models import resnet50 as build

    return build()  # type: ignore[no-any-return]


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def next_token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def _images(count: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (
        torch.randn(count, 3, 224, 224, device="cuda"),
        torch.randint(1000, (count,), device="cuda"),
    )


def _tokens(count: int, length: int) -> Callable[[], tuple[Tensor, Tensor]]:
    def batch() -> tuple[Tensor, Tensor]:
        ids = torch.randint(30000, (count, length), device="cuda")
        return ids, ids.clone()

    return batch


def _sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **options)


def _adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, **options)


WORKLOADS = {
    "resnet50": Workload(resnet50, _images(256), F.cross_entropy, _sgd, 256, "images", images=True),
    "resnet50_64": Workload(resnet50, _images(64), F.cross_entropy, _sgd, 64, "images", images=True),
    "bert_large": Workload(MaskedLanguageModel, _tokens(256, 128), token_loss, _adamw, 256, "sequences"),
    "bert_large_64": Workload(MaskedLanguageModel, _tokens(64, 128), token_loss, _adamw, 64, "sequences"),
    "gpt2_medium": Workload(CausalLanguageModel, _tokens(16, 1024), next_token_loss, _adamw, 16, "sequences"),
}
