"""Op split: modules whose weights are cut over the ranks of one axis, and the tensors that go between them."""

from echelon.parallel.split import choose, loss, shapes  # they register what can be done on parts
from echelon.parallel.split.apply import Applied, apply_split, why_not
from echelon.parallel.split.axis import SplitAxis
from echelon.parallel.split.spread import Spread, whole

__all__ = ["Applied", "SplitAxis", "Spread", "apply_split", "choose", "loss", "shapes", "whole", "why_not"]
