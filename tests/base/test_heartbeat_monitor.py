"""The time since each peer's last heartbeat, by a clock of the test."""

from __future__ import annotations

from echelon.base.heartbeat_monitor import HeartbeatMonitor


def test_silence_ends_with_a_new_heartbeat_only() -> None:
    now = 100.0
    monitor = HeartbeatMonitor(lambda: now)
    now = 103.0
    assert (monitor.has_heard("a"), monitor.silence("a")) == (False, 3.0)  # never heard: since the monitor began
    assert monitor.hear("a", 7)
    now = 105.0
    assert not monitor.hear("a", 7)  # the same counter, read again
    assert (monitor.has_heard("a"), monitor.silence("a")) == (True, 2.0)
    assert monitor.hear("a", 8)
    assert monitor.hear("b")
    assert monitor.hear("b")  # without a counter each heartbeat is new
    assert (monitor.silence("a"), monitor.silence("b")) == (0.0, 0.0)


def test_restart_gives_every_peer_the_full_time() -> None:
    now = 0.0
    monitor = HeartbeatMonitor(lambda: now)
    monitor.hear(0, 1)
    now = 60.0
    monitor.restart()
    assert (monitor.silence(0), monitor.silence(1)) == (0.0, 0.0)
    assert not monitor.hear(0, 1)
