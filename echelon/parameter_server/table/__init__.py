"""Sparse tables: rows for any int64 id, and the kernels around them."""

from echelon.parameter_server.table.batches import add_rows, dedupe, expand, merge, partition
from echelon.parameter_server.table.table import Rows, Table

__all__ = ["Rows", "Table", "add_rows", "dedupe", "expand", "merge", "partition"]
