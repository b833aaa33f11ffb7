"""``MonotonicTime``: the time in a server's journal, which the host's clock cannot make jump."""

from __future__ import annotations

from collections.abc import Callable

from echelon.base.console import say

#: Part of the shortest expiry that the time between two processes of a server may count for.
_SHARE = 0.5
#: Seconds of difference between the time and the host's clock that are worth a line.
_NOTABLE = 60.0


class MonotonicTime:
    """Seconds since 1970 that advance with the monotonic clock, so that a jump of the host's clock expires no rows."""

    def __init__(self, wall: Callable[[], float], clock: Callable[[], float]) -> None:
        self._wall, self._clock = wall, clock
        self._begin(wall())

    def now(self) -> int:
        return int(self._base + self._clock() - self._since)

    def resume(self, last: int, expiry: float | None) -> None:
        """Go on from the last time of an earlier process; without rows that expire the host's clock is taken.

        The time never goes back, and advances by at most half of ``expiry``: what looks like two days without a
        process may be a clock that was wrong.
        """
        given = self._wall()
        base = given if not last or expiry is None else min(given, last + _SHARE * expiry)
        if last and expiry is not None and abs(given - max(base, last)) > _NOTABLE:
            say(
                f"ps: by the clock the last change was {given - last:.0f} s ago; {max(0.0, base - last):.0f} s of them "
                "count, so that a clock that jumped expires no rows"
            )
        self._begin(max(base, last))

    def _begin(self, base: float) -> None:
        self._base, self._since = base, self._clock()
