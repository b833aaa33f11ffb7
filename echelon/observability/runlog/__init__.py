"""What a run writes down beside its metrics, and reading it back: ``read(DIR) -> Run``."""

from echelon.observability.runlog.run_metadata import Footprint, RunMetadata
from echelon.observability.runlog.run_reader import EventRecord, Run, read

__all__ = ["EventRecord", "Footprint", "Run", "RunMetadata", "read"]
