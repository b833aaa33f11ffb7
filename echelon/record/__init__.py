"""What a run writes down beside its metrics, and reading it back: ``read(DIR) -> Run``."""

from echelon.record.facts import Facts, Footprint
from echelon.record.read import Event, Run, read

__all__ = ["Event", "Facts", "Footprint", "Run", "read"]
