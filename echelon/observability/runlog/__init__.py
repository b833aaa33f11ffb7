"""The run log: files that a run writes besides its metrics, and ``read(DIR) -> Run`` to read them."""

from echelon.observability.runlog.run_metadata import Footprint, RunMetadata
from echelon.observability.runlog.run_reader import EventRecord, Run, read

__all__ = ["EventRecord", "Footprint", "Run", "RunMetadata", "read"]
