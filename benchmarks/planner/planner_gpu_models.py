"""Models of benchmarks/planner/planner_gpu.py: ResNet-50, BERT-large and a GPT, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.low_memory.recompute import VOCABULARY, Bert, masked
from benchmarks.support.workloads import Layer, token_loss

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """``optimizer`` as the planner calls it."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: Callable[[int], Batch]
    optimizer: str = "adam"

    def stepping(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "momentum":
            return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return torch.optim.Adam(model.parameters(), lr=1e-4)


# ---- ResNet-50 (He et al. 2015), the stride in the 3 x 3 convolution ----


class Bottleneck(nn.Module):
    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.reduce = _normed(inner, width, 1)
        self.middle = _normed(width, width, 3, stride)
        self.expand = _normed(width, outer, 1)
        self.skip = nn.Sequential() if stride == 1 and inner == outer else _normed(inner, outer, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.middle(F.relu(self.reduce(x))))
        return F.relu(self.expand(h) + self.skip(x))


def _normed(inner: int, outer: int, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inner, outer, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outer))


def resnet50(depths: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> nn.Module:
    blocks, inner = [], 64
    for place, depth in enumerate(depths):
        for at in range(depth):
            blocks.append(Bottleneck(inner, 64 * 2**place, 2 if place and not at else 1))
            inner = 256 * 2**place
    stem = nn.Sequential(_normed(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes))


def _images(pixels: int) -> Callable[[int], Batch]:
    return lambda rows: (torch.randn(rows, 3, pixels, pixels), torch.randint(1000, (rows,)))


# ---- transformers ----


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, sequence: int, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        out: Tensor = self.head(self.norm(self.layers(h)))
        return out


def _words(sequence: int, vocabulary: int, told: int) -> Callable[[int], Batch]:
    """``told``: of how many words the loss is."""

    def batch(rows: int) -> Batch:
        ids = torch.randint(vocabulary, (rows, sequence))
        return ids, ids[:, :told].contiguous()

    return batch


def bert_large(sequence: int) -> Workload:
    words = _words(sequence, VOCABULARY, masked(sequence))
    return Workload(f"BERT-large, {sequence} words", Bert, token_loss, words)


def gpt(sequence: int, layers: int = 24, width: int = 1024) -> Workload:
    def model() -> nn.Module:
        return Gpt(layers, width, width // 64, sequence, 50304)

    return Workload(f"GPT {layers}x{width}, {sequence} words", model, token_loss, _words(sequence, 50304, sequence))


RESNET = Workload("ResNet-50", resnet50, F.cross_entropy, _images(224), "momentum")

#: tiny ones, to see that everything runs without a GPU
TINY = {
    "resnet": Workload("tiny ResNet", lambda: resnet50((1, 1)), F.cross_entropy, _images(32), "momentum"),
    "bert": Workload("tiny BERT", lambda: Bert(2, 64, 2, 32), token_loss, _words(32, VOCABULARY, masked(32))),
    "gpt": Workload("tiny GPT", lambda: Gpt(2, 64, 2, 32, 512), token_loss, _words(32, 512, 32)),
}
