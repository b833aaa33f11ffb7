"""Makes inception.json: logits of torchvision's and timm's inceptions for weights and images that a formula gives.

Run where torch, torchvision and timm are installed: python tests/zoo/references/make_inception.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

CLASSES = 10
SIZES = {"inception_v1": 64, "inception_v3": 75, "inception_v4": 75, "inception_resnet_v2": 75}


TABLE = numpy.random.RandomState(0).random_sample(100_003) * 2 - 1  # a prime, so that no two rows of weights are alike


def noise(seed: int, *shape: int) -> Tensor:
    """Between -1 and 1. From a table: to draw 55 million numbers takes longer than the network itself."""
    return torch.from_numpy(numpy.resize(numpy.roll(TABLE, 97 * seed), shape))


def fill(entries: Iterable[tuple[str, Tensor]]) -> None:
    """Weights by their place in the order of the layers, such that activations keep their size."""
    kept = [(name, tensor) for name, tensor in entries if not name.endswith("num_batches_tracked")]
    for seed, (name, tensor) in enumerate(kept):
        values = noise(seed, *tensor.shape)
        if tensor.dim() > 1:
            values *= (6 / tensor[0].numel()) ** 0.5
        else:
            centre = 1.0 if name.endswith(("running_var", "weight")) else 0.0
            values = centre + 0.2 * values
        tensor.copy_(values)


def images(size: int) -> Tensor:
    """A faint and a strong one."""
    return noise(1000, 2, 3, size, size) * torch.tensor([1.0, 4.0]).view(2, 1, 1, 1)


def maps(channels: int) -> Tensor:
    """Return the size of the auxiliary classifier's input for a large image."""
    return noise(1001, 2, channels, 17, 17)


def _theirs() -> dict[str, nn.Module]:
    if not hasattr(torch.ops.torchvision, "nms"):  # a torchvision without its compiled part wants these declared
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import timm
    import torchvision.models as vision

    return {
        "inception_v1": vision.googlenet(num_classes=CLASSES, aux_logits=False, init_weights=False),
        "inception_v3": vision.inception_v3(num_classes=CLASSES, init_weights=False),
        "inception_v4": timm.create_model("inception_v4", num_classes=CLASSES),
        "inception_resnet_v2": timm.create_model("inception_resnet_v2", num_classes=CLASSES),
    }


def _auxiliary_before_head(model: nn.Module) -> list[tuple[str, Tensor]]:
    entries = list(model.state_dict().items())
    order = {"AuxLogits": 1, "fc": 2}
    return sorted(entries, key=lambda entry: order.get(entry[0].split(".")[0], 0))


@torch.no_grad()
def main() -> None:
    found: dict[str, Any] = {}
    for name, model in _theirs().items():
        model.double().eval()
        fill(_auxiliary_before_head(model) if name == "inception_v3" else model.state_dict().items())
        found[name] = model(images(SIZES[name])).tolist()
        if name == "inception_v3":
            found["inception_v3 auxiliary"] = model.AuxLogits(maps(768)).tolist()
    text = json.dumps(found, indent=1)
    Path(__file__).with_name("inception.json").write_text(text + "\n")
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
