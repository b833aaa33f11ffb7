"""Sparse tables: rows for any int64 id, and the kernels around them."""

from echelon.parameter_server.table.batches import add_rows, dedupe, dedupe_by_server, expand, merge, partition
from echelon.parameter_server.table.bfloat16 import narrow, widen
from echelon.parameter_server.table.record_format import converted, records_of, weights_of
from echelon.parameter_server.table.table import BucketRows, Table

__all__ = [
    "BucketRows",
    "Table",
    "add_rows",
    "converted",
    "dedupe",
    "dedupe_by_server",
    "expand",
    "merge",
    "narrow",
    "partition",
    "records_of",
    "weights_of",
    "widen",
]
