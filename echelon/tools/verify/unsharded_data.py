"""Detection of ``torch.utils.data.DataLoader`` objects that give every replica the whole data set."""

from __future__ import annotations

import pickle
import zlib
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from echelon.data.seeding import preserve_global_rng, seed_all

#: Reason for "cannot tell" if all replicas read the whole data set.
ALL_OF_IT = (
    "each replica reads all of the data, in batches of its own, as torch's DataLoader knows nothing of the others: an "
    "epoch takes every sample once for each replica; take engine.loader(), or a sampler that goes by the rank"
)


def whole_data(loader: DataLoader[Any]) -> int | None:
    """Return a checksum of three samples of the data set; None if ``loader`` may read only a part of the set."""
    if type(loader.batch_sampler) is not BatchSampler or type(loader.sampler) not in (RandomSampler, SequentialSampler):
        return None
    try:
        size = len(loader.dataset)  # type: ignore[arg-type]
        with preserve_global_rng():
            return zlib.crc32(b"".join(_contents(loader.dataset, at) for at in {0, size // 2, size - 1}))
    except Exception:  # a data set that cannot be indexed like this can still be trained on
        return None


def _contents(dataset: Any, at: int) -> bytes:
    seed_all(at)
    return b"".join(_bytes(leaf) for leaf in tree_leaves(dataset[at]))


def _bytes(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):  # a pickled tensor contains the address of its storage
        leaf = leaf.detach().cpu().numpy()
    return bytes(leaf.tobytes()) if isinstance(leaf, np.ndarray) else pickle.dumps(leaf)
