"""Data loading: download, sharding over ranks, order, uneven ends, padding and buckets, cache, prefetch, resume."""

from typing import TYPE_CHECKING

from echelon.base.late_import import late_import
from echelon.data.ctr import CtrFiles
from echelon.data.file_list import FileList
from echelon.data.loader import Loader
from echelon.data.loader_options import LoaderOptions
from echelon.data.mixture import Mixture
from echelon.data.offset_stream import OffsetStream
from echelon.data.padding import pad_collate
from echelon.data.partition_stream import PartitionStream
from echelon.data.ragged_columns import RaggedColumns
from echelon.data.repeated import Repeated, RepeatedStream

if TYPE_CHECKING:
    from echelon.data.download import Downloader
    from echelon.data.packing import pack_collate
    from echelon.data.tokens import TokenFiles, TokenizeOptions, tokenize_corpus

__all__ = [
    "CtrFiles",
    "Downloader",
    "FileList",
    "Loader",
    "LoaderOptions",
    "Mixture",
    "OffsetStream",
    "PartitionStream",
    "RaggedColumns",
    "Repeated",
    "RepeatedStream",
    "TokenFiles",
    "TokenizeOptions",
    "pack_collate",
    "pad_collate",
    "tokenize_corpus",
]

#: Imported on first use: most jobs have their data already, and sequences of one length.
__getattr__ = late_import(
    __name__,
    {
        "Downloader": "echelon.data.download",
        "TokenFiles": "echelon.data.tokens",
        "TokenizeOptions": "echelon.data.tokens",
        "pack_collate": "echelon.data.packing",
        "tokenize_corpus": "echelon.data.tokens",
    },
)
