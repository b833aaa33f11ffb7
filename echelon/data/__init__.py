"""Data on its way to a rank: shares, order, uneven ends, padding and buckets, cache, prefetch, resume."""

from echelon.data.ctr import CtrFiles
from echelon.data.files import FileList
from echelon.data.loader import Loader
from echelon.data.padding import pad_collate

__all__ = ["CtrFiles", "FileList", "Loader", "pad_collate"]
