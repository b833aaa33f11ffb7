"""CLIP of transformers with a loss over the global batch: one process's numbers on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from harness import run
from torch import Tensor
from zoo import QUIET

import echelon
from echelon import Strategy
from echelon.nn import gather_batch


def _clip() -> transformers.CLIPModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = transformers.CLIPTextConfig(vocab_size=40, max_position_embeddings=12, eos_token_id=39, **sizes)
    vision = transformers.CLIPVisionConfig(image_size=8, patch_size=4, **sizes)
    both = {"text_config": text.to_dict(), "vision_config": vision.to_dict()}
    return transformers.CLIPModel(transformers.CLIPConfig(projection_dim=8, **both))


def contrastive_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """Compute the loss as transformers does, on the rows of all replicas."""
    image, text = gather_batch(output.image_embeds, output.text_embeds)
    logits = batch["scale"][0] * text @ image.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def _batch(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    words = torch.randint(38, (7, 6), generator=g)
    words[:, -1] = 39
    return {
        "input_ids": words,
        "pixel_values": torch.randn(7, 3, 8, 8, generator=g),
        "scale": torch.full((7,), 10.0),
    }


def train_plainly() -> tuple[list[float], dict[str, Tensor]]:
    model = _clip()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    losses = []
    for step in range(4):
        batch = _batch(step)
        output = model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"])
        labels = torch.arange(7)
        logits = 10.0 * output.text_embeds @ output.image_embeds.T
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, dict(model.state_dict())


def train(options: list[dict[str, Any]]) -> list[tuple[list[float], dict[str, Tensor]]]:
    echelon.init()
    return [_train(each) for each in options]


def _train(options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    model = _clip()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    strategy = Strategy(fast=False, **options)
    engine = echelon.distribute(model, loss=contrastive_loss, optimizer=optimizer, strategy=strategy, log=QUIET)
    shares = {1: (7,), 2: (4, 3), 3: (3, 2, 2)}[echelon.world_size()]
    begin = sum(shares[: echelon.rank()])
    rows = slice(begin, begin + shares[echelon.rank()])
    losses = [float(engine.step({name: part[rows] for name, part in _batch(step).items()})) for step in range(4)]
    return losses, engine.whole_state()


def test_clip_over_the_global_batch_equals_one_process() -> None:
    losses, weights = train_plainly()
    for ranks, options in ((1, [{}]), (2, [{}, {"shard": 1}, {"shard": 3}]), (3, [{}])):
        for results in run(train, options, ranks=ranks):
            for found_losses, found in results:
                torch.testing.assert_close(found_losses, losses, rtol=0, atol=1e-5)
                torch.testing.assert_close(found, weights, rtol=0, atol=5e-5)
