"""What a data set looks like from afar: enough to tell that two ranks were given different ones."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Subset

from echelon.data.checksums import columns_checksum
from echelon.data.hugging_face import checksum
from echelon.data.map_source import columns_of
from echelon.data.repeated import Repeated

#: Entries of a list of indices that are looked at.
INDICES = 1_000_000


class DatasetFingerprint(NamedTuple):
    """``contents``: a checksum of some of them; None where to read them is not for us, who would run somebody's code
    ``order``:    a checksum of the first indices that a sampler has drawn; None without one
    ``read``:     a checksum of the first samples that were read of a stream; None where it is none
    """

    size: int
    contents: int | None
    order: int | None = None
    read: int | None = None


def dataset_fingerprint(dataset: Any, size: int) -> DatasetFingerprint:
    try:
        return DatasetFingerprint(size, _contents(dataset))
    except Exception:  # tensors and indices of a kind that cannot be read like this: training may do well with them
        return DatasetFingerprint(size, None)


def _contents(dataset: Any) -> int | None:
    if columns := columns_of(dataset):
        return columns_checksum(columns)
    if type(dataset) is Repeated:
        return _contents(dataset.dataset)
    if type(dataset) is Subset:  # as random_split() makes them
        chosen = np.asarray(dataset.indices[:INDICES], dtype=np.int64).tobytes()
        return zlib.crc32(chosen, _contents(dataset.dataset) or 0)
    return checksum(dataset)
