"""``HeartbeatMonitor``: the time since each peer's last heartbeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable


class HeartbeatMonitor:
    """The times of the last heartbeats of hosts, ranks or workers.

    A peer's silence begins with the monitor, until its first heartbeat. Times are not persistent: after a restart of
    this process every peer has the full time again.

    clock: function that returns the present time in seconds
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self._began = clock, clock()
        self._heard: dict[Hashable, tuple[object, float]] = {}

    def hear(self, peer: Hashable, beat: object = None) -> bool:
        """Record a heartbeat of the peer, and return True if it is a new one.

        beat: the counter that the peer has sent, if it may be read twice; None is new each time
        """
        is_new = beat is None or peer not in self._heard or self._heard[peer][0] != beat
        if is_new:
            self._heard[peer] = beat, self.clock()
        return is_new

    def has_heard(self, peer: Hashable) -> bool:
        return peer in self._heard

    def silence(self, peer: Hashable) -> float:
        """Return the seconds since the peer's last heartbeat."""
        return self.clock() - (self._heard[peer][1] if peer in self._heard else self._began)

    def restart(self) -> None:
        """Give every peer the full time again."""
        self._began = self.clock()
        self._heard = {peer: (beat, self._began) for peer, (beat, _) in self._heard.items()}
