"""What a run writes down beside its metrics, and reading it back: ``read(DIR) -> Run``."""

from echelon.observability.runlog.reader import Event, Run, read
from echelon.observability.runlog.run_metadata import Facts, Footprint

__all__ = ["Event", "Facts", "Footprint", "Run", "read"]
