"""Click logs in Criteo's format, CSV or Parquet as batches of ids, numbers and labels, without per-value objects."""

from echelon.data.ctr.ctr_files import CtrFiles

__all__ = ["CtrFiles"]
