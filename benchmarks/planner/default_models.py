"""Models that users bring, for planner_default.py: of torchvision, timm and transformers, and an LSTM of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A model with its loss, batches and optimizer. ``optimizer``: its name in the planner."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: str = "adamw"

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "momentum":
            return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=1e-4)


class Logits(nn.Module):
    """A language model of transformers, as a function from token ids to logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(ids).logits
        return logits


class Translation(Logits):
    """An encoder-decoder of transformers that decodes its own input."""

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits
        return logits


class Recurrent(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, words: int = 32000, width: int = 1024, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(ids))
        out: Tensor = self.head(hidden)
        return out


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _images(rows: int) -> Batch:
    return torch.randn(rows, 3, 224, 224), torch.randint(1000, (rows,))


def _words(length: int) -> Callable[[int], Batch]:
    def batch(rows: int) -> Batch:
        ids = torch.randint(30000, (rows, length))
        return ids, ids.clone()

    return batch


def _of_torchvision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        return getattr(torchvision.models, name)()  # type: ignore[no-any-return]

    return build


def _of_timm(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name)  # type: ignore[no-any-return]

    return build


def _of_transformers(model: str, config: str, wrapper: type[Logits] = Logits, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return wrapper(getattr(transformers, model)(getattr(transformers, config)(**sizes)))

    return build


def bert(sequence: int, **sizes: Any) -> Task:
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return Task(
        _of_transformers("BertForMaskedLM", "BertConfig", **large | sizes), _words(sequence), token_loss, "adamw"
    )


def gpt2(sequence: int, layers: int = 24, width: int = 1024) -> Task:
    sizes = {"n_embd": width, "n_layer": layers, "n_head": width // 64, "use_cache": False}
    return Task(_of_transformers("GPT2LMHeadModel", "GPT2Config", **sizes), _words(sequence), token_loss)


def llama(sequence: int, layers: int = 24, width: int = 1024) -> Task:
    sizes = {
        "hidden_size": width, "intermediate_size": 11 * width // 4, "num_hidden_layers": layers,
        "num_attention_heads": width // 64, "num_key_value_heads": width // 64, "use_cache": False,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return Task(_of_transformers("LlamaForCausalLM", "LlamaConfig", **sizes), _words(sequence), token_loss)


def t5(sequence: int) -> Task:
    sizes = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
    model = _of_transformers("T5ForConditionalGeneration", "T5Config", Translation, **sizes)
    return Task(model, _words(sequence), token_loss)


TASKS: dict[str, Task] = {
    "resnet50": Task(_of_torchvision("resnet50"), _images, F.cross_entropy, "momentum"),
    "convnext_tiny": Task(_of_torchvision("convnext_tiny"), _images, F.cross_entropy),
    "vit_base": Task(_of_timm("vit_base_patch16_224"), _images, F.cross_entropy),
    "bert_large_128": bert(128),
    "bert_large_512": bert(512),
    "gpt2_medium": gpt2(1024),
    "gpt2_small": gpt2(1024, 12, 768),
    "llama_350m": llama(1024),
    "llama_1b": llama(2048, 16, 2048),
    "t5_base": t5(512),
    "lstm": Task(Recurrent, _words(128), token_loss),
}


@dataclass(frozen=True)
class Setting:
    """One way to train a task on one device. ``seen``: True if the cost model was made while looking at it."""

    task: str
    rows: int
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    seen: bool = True

    @property
    def name(self) -> str:
        words = [self.task, str(self.rows), *(f"{key}={value}" for key, value in self.options.items())]
        words += [f"micro{self.micro_batches}"] if self.micro_batches > 1 else []
        return "-".join(words)


SETTINGS = [
    Setting("resnet50", 64),
    Setting("resnet50", 256),
    Setting("convnext_tiny", 128),
    Setting("vit_base", 128),
    Setting("bert_large_128", 64),
    Setting("bert_large_128", 64, {"recompute": True}),
    Setting("bert_large_512", 32, micro_batches=2),
    Setting("gpt2_medium", 16),
    Setting("gpt2_medium", 16, {"recompute": True}),
    Setting("llama_350m", 16),
    Setting("t5_base", 16),
    Setting("lstm", 64),
    Setting("resnet50", 128, seen=False),
    Setting("convnext_tiny", 64, seen=False),
    Setting("vit_base", 64, {"recompute": True}, seen=False),
    Setting("bert_large_128", 256, seen=False),
    Setting("bert_large_512", 16, seen=False),
    Setting("gpt2_small", 16, seen=False),
    Setting("gpt2_medium", 32, micro_batches=4, seen=False),
    Setting("llama_1b", 8, seen=False),
    Setting("llama_350m", 32, {"recompute": True}, seen=False),
    Setting("t5_base", 48, seen=False),
    Setting("lstm", 256, seen=False),
]
