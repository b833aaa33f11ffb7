"""``SshJob``: watches the hosts of a job over ssh until the last one has ended, and decides the exit code."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.base.console import say
from echelon.launcher.schedulers.host_list import HostListEntry
from echelon.launcher.schedulers.ssh_connection import SshConnection

#: ssh's own exit code if the connection could not be made, or broke.
SSH_FAILED = 255
#: Seconds after which launchers have certainly detected a lost host by themselves.
_NOTICE = 45.0
#: Seconds within which the other hosts end too if the whole job has failed.
_TOGETHER = 3.0


@dataclass(frozen=True)
class _HostExit:
    connection: SshConnection
    code: int
    at: float

    @property
    def line(self) -> str:
        """A message about the end of the host."""
        name, said = self.connection.name, self.connection.early[-1] if self.connection.early else "it printed nothing"
        if not self.connection.started:
            way = "cannot be reached by ssh" if self.code == SSH_FAILED else "could not start a launcher"
            return f"host {name} {way} (exit {self.code}): {said}"
        if self.connection.by_ssh and self.code == SSH_FAILED:
            return f"the ssh connection to host {name} broke"
        return f"the launcher on host {name} ended with exit code {self.code}"


class SshJob:
    """The hosts of a job, which needs at least ``least`` of them; if these are all, the loss of one ends the job."""

    def __init__(self, hosts: Sequence[HostListEntry], least: int, grace: float) -> None:
        self._elastic = least < len(hosts)
        self._least = least
        self._patience = grace + _NOTICE
        self._here: list[SshConnection] = []
        self._ends: list[_HostExit] = []
        self._unreported: list[_HostExit] = []
        self._came: queue.SimpleQueue[_HostExit] = queue.SimpleQueue()
        self._deadline = float("inf")
        #: the signal that this command received
        self._signal: signal.Signals | None = None

    def add(self, connection: SshConnection) -> None:
        self._here.append(connection)
        threading.Thread(target=self._wait_for, args=(connection,), daemon=True).start()
        if self._signal is not None:  # a signal arrived while hosts were still being started
            connection.hang_up()

    def hand_on(self, number: signal.Signals) -> None:
        """Forward a signal to every launcher; after a second one, close the connections."""
        for connection in self._here:
            if self._signal is not None:
                connection.hang_up()
            else:
                connection.forward_signal(number)
        self._signal = number
        self._deadline = min(self._deadline, time.monotonic() + self._patience)

    def run_until_end(self) -> int:
        """Wait until all hosts have ended; return the exit code of the job."""
        while len(self._ends) < len(self._here):
            try:
                end = self._came.get(timeout=0.5)
            except queue.Empty:
                self._report_late()
            else:
                self._ends.append(end)
                if end.code and self._signal is None:
                    self._handle_end(end)
            if time.monotonic() > self._deadline:
                self._hang_up()
        return self._code()

    def _wait_for(self, connection: SshConnection) -> None:
        code = connection.wait()
        self._came.put(_HostExit(connection, code, time.monotonic()))

    def _handle_end(self, end: _HostExit) -> None:
        left = len(self._here) - len(self._ends)
        if not end.connection.started:
            goes_on = self._elastic and left >= self._least
            say(end.line + ("; the job goes on without it" if goes_on else ""))
            if not goes_on:
                self._hang_up()
        elif self._elastic and left >= self._least:
            self._unreported.append(end)
        else:
            if end.connection.by_ssh and end.code == SSH_FAILED:
                say(end.line)
            self._deadline = min(self._deadline, end.at + self._patience)

    def _report_late(self) -> None:
        """Report hosts whose end the others have survived; if all end together, their own messages explain it."""
        ready = [end for end in self._unreported if time.monotonic() > end.at + _TOGETHER]
        for end in ready:
            self._unreported.remove(end)
            say(f"{end.line}; the job goes on without it")

    def _hang_up(self) -> None:
        for connection in self._here:
            connection.hang_up()
        self._deadline = float("inf")

    def _code(self) -> int:
        """Return the exit code of the first host; of an elastic job 0 if any host finished it."""
        codes = [end.code for end in self._ends]
        if not any(codes) or (self._elastic and 0 in codes):
            return 0
        unreached = any(not end.connection.started for end in self._ends)
        if unreached and self._signal is None and not self._elastic:
            return 1
        started = [end for end in self._ends if end.connection.started and end.code]
        otherwise = 1 if self._signal is None else 128 + self._signal
        last = started[-1].code if started else otherwise
        first_code = next((end.code for end in started if end.connection.first), last)
        return 1 if first_code == SSH_FAILED else first_code
