"""``pack_collate``: concatenates sequences of different length into a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate

from echelon.data.padding import is_sequence, value_of
from echelon.nn.packed import MULTIPLE, pack


def pack_collate(samples: Sequence[Any], multiple: int = MULTIPLE, pad_value: Any = 0) -> Any:
    """Collate ``samples``; every field that is a sequence becomes an ``echelon.nn.Packed``.

    samples:   samples of a batch, each a field or a tuple or dict of fields. Sequences are tensors and arrays with a
               dimension, and lists of numbers; torch's ``default_collate`` collates other fields, such as labels
    multiple:  number of tokens to whose multiple the row is padded, default 128
    pad_value: value of the end of the row, which belongs to no sample: one number, or one per field, as in
               ``pad_collate``

    >>> tokens, labels = echelon.data.pack_collate([(torch.arange(3), 0), (torch.arange(5), 1)])
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return {k: pack_collate([s[k] for s in samples], multiple, value_of(pad_value, k)) for k in first}
    if isinstance(first, tuple):
        columns = list(zip(*samples, strict=True))
        fields = [pack_collate(column, multiple, value_of(pad_value, at)) for at, column in enumerate(columns)]
        return type(first)(*fields) if hasattr(first, "_fields") else fields
    if is_sequence(first):
        return pack(samples, multiple=multiple, fill=pad_value)
    return default_collate(list(samples))
