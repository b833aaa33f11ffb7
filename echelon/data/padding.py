"""``pad_collate``: pads sequences of different length to a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate


def pad_collate(samples: Sequence[Any], pad_value: Any = 0) -> Any:
    """Collate ``samples``; fields whose first dimension differs are padded to the longest.

    samples:   samples of a batch, each a field or a tuple or dict of fields; a field is a tensor, an array, a list of
               numbers, or anything that torch's ``default_collate`` accepts
    pad_value: one number, or one per field in the structure of the samples: ``{"tokens": 0, "labels": -100}`` or
               ``(0, -100)``

    >>> tokens, labels = echelon.data.pad_collate([(torch.arange(3), 0), (torch.arange(5), 1)])
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return {k: pad_collate([s[k] for s in samples], value_of(pad_value, k)) for k in first}
    if isinstance(first, tuple):
        columns = list(zip(*samples, strict=True))
        fields = [pad_collate(column, value_of(pad_value, at)) for at, column in enumerate(columns)]
        return type(first)(*fields) if hasattr(first, "_fields") else fields
    if is_sequence(first):
        return _padded([torch.as_tensor(sample) for sample in samples], pad_value)
    return default_collate(list(samples))


def value_of(pad_value: Any, field: Any) -> Any:
    if isinstance(pad_value, Mapping):
        return pad_value.get(field, 0)
    return pad_value[field] if isinstance(pad_value, tuple) else pad_value


def is_sequence(field: Any) -> bool:
    if isinstance(field, torch.Tensor | np.ndarray):
        return field.ndim > 0
    return isinstance(field, list) and all(isinstance(item, int | float) for item in field)


def _padded(fields: list[torch.Tensor], pad_value: Any) -> torch.Tensor:
    if any(field.shape[1:] != fields[0].shape[1:] for field in fields):
        shapes = " and ".join(str(shape) for shape in sorted({tuple(field.shape) for field in fields})[:2])
        raise ValueError(f"shapes {shapes} differ beyond the first dimension")
    if all(len(field) == len(fields[0]) for field in fields):
        return torch.stack(fields)
    return pad_sequence(fields, batch_first=True, padding_value=pad_value)
