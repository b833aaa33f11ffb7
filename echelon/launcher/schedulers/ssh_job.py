"""The hosts of a job over ssh, watched until the last one has ended: who failed, whether to go on, the exit code."""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.launcher.schedulers.host_list import HostListEntry
from echelon.launcher.schedulers.ssh_connection import SshConnection

#: What ssh itself exits with when the connection could not be made, or broke.
SSH_FAILED = 255
#: Seconds until launchers know by themselves that a host is gone, and then some.
_NOTICE = 45.0
#: Seconds in which the other hosts end too when it is the whole job that has failed.
_TOGETHER = 3.0


@dataclass(frozen=True)
class _HostExit:
    connection: SshConnection
    code: int
    at: float

    @property
    def line(self) -> str:
        """What to tell of it."""
        name, said = self.connection.name, self.connection.early[-1] if self.connection.early else "nothing was said"
        if not self.connection.started:
            way = "cannot be reached by ssh" if self.code == SSH_FAILED else "could not start a launcher"
            return f"host {name} {way} (exit {self.code}): {said}"
        if self.connection.by_ssh and self.code == SSH_FAILED:
            return f"the ssh connection to host {name} broke"
        return f"the launcher on host {name} ended with exit code {self.code}"


class SshJob:
    """``least`` hosts must stay for the job to go on; with all of them the job stands and falls together."""

    def __init__(self, hosts: Sequence[HostListEntry], least: int, grace: float) -> None:
        self._elastic = least < len(hosts)
        self._least = least
        self._patience = grace + _NOTICE
        self._here: list[SshConnection] = []
        self._ends: list[_HostExit] = []
        self._untold: list[_HostExit] = []
        self._came: queue.SimpleQueue[_HostExit] = queue.SimpleQueue()
        self._deadline = float("inf")
        #: the signal that this command got
        self._asked: signal.Signals | None = None

    def add(self, connection: SshConnection) -> None:
        self._here.append(connection)
        threading.Thread(target=self._wait_for, args=(connection,), daemon=True).start()
        if self._asked is not None:  # a signal came while we were still starting
            connection.hang_up()

    def hand_on(self, number: signal.Signals) -> None:
        """A signal to this command is one to every launcher; the second one waits no longer."""
        for connection in self._here:
            if self._asked is not None:
                connection.hang_up()
            else:
                connection.tell(number)
        self._asked = number
        self._deadline = min(self._deadline, time.monotonic() + self._patience)

    def attend(self) -> int:
        """Until all hosts have ended; the exit code of the job."""
        while len(self._ends) < len(self._here):
            try:
                end = self._came.get(timeout=0.5)
            except queue.Empty:
                self._tell_late()
            else:
                self._ends.append(end)
                if end.code and self._asked is None:
                    self._judge(end)
            if time.monotonic() > self._deadline:
                self._hang_up()
        return self._code()

    def _wait_for(self, connection: SshConnection) -> None:
        code = connection.wait()
        self._came.put(_HostExit(connection, code, time.monotonic()))

    def _judge(self, end: _HostExit) -> None:
        left = len(self._here) - len(self._ends)
        if not end.connection.started:
            goes_on = self._elastic and left >= self._least
            _say(end.line + ("; the job goes on without it" if goes_on else ""))
            if not goes_on:
                self._hang_up()
        elif self._elastic and left >= self._least:
            self._untold.append(end)
        else:
            if end.connection.by_ssh and end.code == SSH_FAILED:
                _say(end.line)
            self._deadline = min(self._deadline, end.at + self._patience)

    def _tell_late(self) -> None:
        """A host whose end the others outlive is told; where all end together their own words tell why."""
        ready = [end for end in self._untold if time.monotonic() > end.at + _TOGETHER]
        for end in ready:
            self._untold.remove(end)
            _say(f"{end.line}; the job goes on without it")

    def _hang_up(self) -> None:
        for connection in self._here:
            connection.hang_up()
        self._deadline = float("inf")

    def _code(self) -> int:
        """The first host speaks for the job; for an elastic one, whoever saw it through to its end."""
        codes = [end.code for end in self._ends]
        if not any(codes) or (self._elastic and 0 in codes):
            return 0
        unreached = any(not end.connection.started for end in self._ends)
        if unreached and self._asked is None and not self._elastic:
            return 1
        started = [end for end in self._ends if end.connection.started and end.code]
        otherwise = 1 if self._asked is None else 128 + self._asked
        last = started[-1].code if started else otherwise
        told = next((end.code for end in started if end.connection.first), last)
        return 1 if told == SSH_FAILED else told


def _say(line: str) -> None:
    print(f"echelon: {line}", file=sys.stderr, flush=True)
