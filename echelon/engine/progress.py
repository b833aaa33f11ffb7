"""``RunProgress``: the number of updates that an engine has made and will make."""

from __future__ import annotations

from collections.abc import Callable

from echelon.distributed.activity import activity


class RunProgress:
    """The updates of one run, including those skipped because of an overflow.

    first: function that is called after the first update of this process
    """

    def __init__(self, first: Callable[[], None] = lambda: None) -> None:
        self._first: Callable[[], None] | None = first
        self.steps = 0  #: updates so far
        self.total: int | None = None  #: step that the loop ends with, if that is before its epochs end

    def advance(self) -> None:
        """Count an update."""
        self.steps += 1
        activity.end_step()
        if self._first is not None:
            first, self._first = self._first, None
            first()

    def resume_at(self, step: int) -> None:
        """Continue after ``step``, whose state was restored."""
        self.steps = step

    def end_at(self, total: int | None) -> None:
        """Set the step that the loop ends with."""
        self.total = total
