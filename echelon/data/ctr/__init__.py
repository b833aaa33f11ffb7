"""Click logs: Criteo's format, CSV and Parquet as batches of ids, numbers and labels, no Python object per value."""

from echelon.data.ctr.ctr_files import CtrFiles

__all__ = ["CtrFiles"]
