"""``DatasetFingerprint``: a small fingerprint of a data set, to detect that ranks were given different ones."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Subset

from echelon.data.checksums import columns_checksum
from echelon.data.hugging_face import checksum
from echelon.data.map_source import columns_of
from echelon.data.mixture import Mixture
from echelon.data.repeated import Repeated

#: Number of indices of a subset that the fingerprint covers.
INDICES = 1_000_000


class DatasetFingerprint(NamedTuple):
    """Size and checksums of a data set.

    contents:  checksum of some of the data; None if reading it would run user code
    order:     checksum of the first indices that a sampler has drawn; None without a sampler
    read:      checksum of the first samples that were read from a stream; None if it is not a stream
    """

    size: int
    contents: int | None
    order: int | None = None
    read: int | None = None


def dataset_fingerprint(dataset: Any, size: int) -> DatasetFingerprint:
    try:
        return DatasetFingerprint(size, _contents(dataset))
    except Exception:  # data that cannot be read like this may still be fine for training
        return DatasetFingerprint(size, None)


def _contents(dataset: Any) -> int | None:
    if columns := columns_of(dataset):
        return columns_checksum(columns)
    if type(dataset) is Repeated:
        return _contents(dataset.dataset)
    if type(dataset) is Mixture:
        contents = [_contents(part) for part in dataset.joined.parts]
        return zlib.crc32(repr((dataset.facts(), contents)).encode())
    if type(dataset) is Subset:  # made by random_split(), for example
        chosen = np.asarray(dataset.indices[:INDICES], dtype=np.int64).tobytes()
        return zlib.crc32(chosen, _contents(dataset.dataset) or 0)
    return checksum(dataset)
