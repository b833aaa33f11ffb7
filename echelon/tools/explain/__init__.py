"""Text of ``echelon explain`` and ``strategy.explain()``: the order of a step, its traffic, and its memory."""
