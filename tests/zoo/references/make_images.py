"""Writes images.json: outputs of torchvision's and timm's models, whose weights follow recipe_images.py.

Run it from this folder where torchvision and timm are installed: python make_images.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from recipe_images import CLASSES, FC_SIZE, fill, summary
from torch import nn

# Detection operators are not needed; with these declared, a torchvision without its compiled part can be imported.
if not hasattr(torch.ops.torchvision, "nms"):
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm
from torchvision import models


def filled(model: nn.Module) -> nn.Module:
    model = model.double()
    fill(model)
    return model


def narrowed(model: Any) -> nn.Module:
    """With hidden layers of FC_SIZE in place of 4096."""
    for name, module in model.classifier.named_children():
        if isinstance(module, nn.Linear):
            sizes = [FC_SIZE if size == 4096 else size for size in (module.in_features, module.out_features)]
            setattr(model.classifier, name, nn.Linear(*sizes))
    return filled(model)


@torch.no_grad()
def queries_first(vit: Any) -> nn.Module:
    """The recipe fills query, key and value of each head together; timm has the queries of all heads first."""
    for block in filled(vit).blocks:
        for parameter in block.attn.qkv.parameters():
            by_head = parameter.unflatten(0, (block.attn.num_heads, 3, -1))
            parameter.copy_(by_head.transpose(0, 1).flatten(0, 2).clone())
    return vit


def vision(name: str) -> Any:
    return models.get_model(name, num_classes=CLASSES)


def timms(name: str, **options: Any) -> Any:
    return timm.create_model(name, num_classes=CLASSES, **options)


def main() -> None:
    found = {
        "alexnet": summary(narrowed(vision("alexnet")), 64),
        "vgg_11": summary(narrowed(vision("vgg11")), 32),
        "resnet_v1_18": summary(filled(vision("resnet18")), 64),
        "resnet_v1_18 in training": summary(filled(vision("resnet18")), 64, training=True),
        "resnet_v1_50": summary(filled(vision("resnet50")), 64),
        "resnet_v2_18": summary(filled(timms("resnetv2_18")), 64),
        "resnet_v2_50": summary(filled(timms("resnetv2_50")), 64),
        "mobilenet_v1": summary(filled(timms("mobilenetv1_100")), 64),
        "mobilenet_v2": summary(filled(vision("mobilenet_v2")), 64),
        "vit_tiny": summary(queries_first(timms("vit_tiny_patch16_224", img_size=32)), 32),
    }
    Path("images.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
