"""``open_rendezvous``: opens the store of the rendezvous, in memory for one host, at --master for several."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from echelon.base import network
from echelon.base.auth_proxy import local_store_endpoint, serve_store
from echelon.base.environment import AGENT_STORE, LOOPBACK
from echelon.base.errors import EchelonError, PeerLost, UsageError
from echelon.base.job_secret import find_token
from echelon.base.wait_notice import Say, WaitNotice, say_wait
from echelon.launcher.job import Job
from echelon.launcher.rendezvous.handler import STORE_TIMEOUT, LauncherRendezvous
from echelon.launcher.rendezvous.messages import RendezvousConfig
from echelon.launcher.rendezvous.participant import RendezvousParticipant, RendezvousStore
from echelon.launcher.rendezvous.store_client import POLL, StoreClient

#: Seconds between two looks at the other endpoints by a launcher that lacks hosts, and for each.
ELSEWHERE = 2.0
#: Sockets by port; they stay open until the process ends.
_signs: dict[int, socket.socket] = {}


def own_address(job: Job) -> str:
    """Return the address at which the job's other hosts reach this one; loopback if there are none."""
    if job.master is None or job.one_host:
        return LOOPBACK
    if job.options.nic is not None and (address := network.address_of(job.options.nic)):
        return address
    own = next((address for address, _ in job.masters if network.is_local(address)), None)
    return own if own is not None else network.address_towards(*job.master)


class WorkersStore:
    """The store for the workers of a job with parameter servers, if they join torch.distributed.

    On one host the launcher serves a new one for every attempt; at --master worker 0 serves it.
    """

    def __init__(self, job: Job) -> None:
        self._master = None if job.one_host else job.master
        self._elsewhere = not job.one_host
        self._store: TCPStore | None = None

    def open(self) -> dict[str, str]:
        """Return the store's variables for workers; none if there are several hosts and no --master."""
        if self._elsewhere:
            return {"MASTER_ADDR": self._master[0], "MASTER_PORT": str(self._master[1])} if self._master else {}
        listener = network.listen(LOOPBACK, 0)
        port = int(listener.getsockname()[1])
        self._store = TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), AGENT_STORE: "True"}


def open_rendezvous(
    job: Job, address: str, extras: Callable[[], Mapping[str, str]], say: Callable[[str], None]
) -> LauncherRendezvous:
    config = RendezvousConfig(
        least=job.fewest,
        most=job.nnodes,
        elastic=job.elastic is not None,
        procs=job.procs,
        max_restarts=job.max_restarts,
        join_timeout=job.options.join_timeout,
        last_call=job.options.last_call,
        host_timeout=job.options.host_timeout,
        grace=job.options.grace,
    )
    meet = HomeStore() if job.nnodes == 1 else MasterEndpoints(job)
    name = socket.gethostname()
    participant = RendezvousParticipant(
        meet, config, name=name, address=address, node_rank=job.options.node_rank, extras=extras, say=say
    )
    return LauncherRendezvous(participant, config)


class HomeStore:
    """The store of a job on one host, in memory."""

    def __call__(self) -> RendezvousStore:
        return RendezvousStore(HashStore(), "this host", serves=True)

    def has_moved(self) -> bool:
        return False


class MasterEndpoints:
    """The endpoints of --master: the first call opens the one that has the job, each further call the next one."""

    def __init__(self, job: Job) -> None:
        self._job, self._places = job, job.masters
        self._token = find_token()
        self._at = -1
        self._moved_to: int | None = None
        self._polled_at = 0.0

    def __call__(self) -> RendezvousStore:
        if self._moved_to is not None:
            self._at, self._moved_to = self._moved_to, None
        else:
            self._at = self._next() if self._at >= 0 else self._first()
        place = self._places[self._at]
        store, serves = self._open_store(*place)
        return RendezvousStore(store, network.endpoint(*place), serves, len(self._places) - 1)

    def _first(self) -> int:
        """Return the first endpoint, or a later one that answers: hosts serve those only after the job has moved."""
        first, deadline = self._places[0], time.monotonic() + self._job.options.join_timeout
        if len(self._places) == 1:
            return 0
        ours, notice = network.is_local(first[0]), self._notice()
        while True:
            for at in reversed(range(len(self._places))):
                if self._answers(at):
                    return at
            if ours and self._job.options.node_rank in (None, 0):
                return 0
            if time.monotonic() > deadline:
                raise self._unreachable(first)
            notice.poll(self._silent(*first))
            time.sleep(POLL)

    def _next(self) -> int:
        """Return the next endpoint that is local, or that answers within the host timeout."""
        for step in range(1, len(self._places)):
            at = (self._at + step) % len(self._places)
            deadline = time.monotonic() + self._job.options.host_timeout
            while time.monotonic() < deadline:
                if network.is_local(self._places[at][0]) or self._answers(at):
                    return at
                time.sleep(POLL)
        raise PeerLost("no address of --master answers any more; look at the consoles of the other hosts")

    def has_moved(self) -> bool:
        """Return True if a launcher serves the job at another endpoint: a cut link may have left this host alone.

        Of two launchers that lack hosts the one at the later endpoint stays. So a launcher goes to a later one that
        answers, and to an earlier one only if a round is running there.
        """
        if time.monotonic() - self._polled_at < ELSEWHERE:
            return False
        others = (at for at in reversed(range(len(self._places))) if at != self._at and self._answers(at))
        self._moved_to = next((at for at in others if self._has_job(at)), None)
        self._polled_at = time.monotonic()
        return self._moved_to is not None

    def _has_job(self, at: int) -> bool:
        """Return True if the launcher at this endpoint answers and is at a later one, or has a running round."""
        where = network.endpoint(*self._places[at])
        with contextlib.suppress(EchelonError):  # a store that is lost, or another program's
            store = self._connect(*self._places[at], time.monotonic() + ELSEWHERE)
            client = StoreClient(store, where, ELSEWHERE)
            try:
                number = client.find("round")
                is_running = number is not None and client.check(f"round-{number.decode()}/members")
                return at > self._at or (is_running and not client.check("moved"))
            finally:
                client.close()
        return False

    def _answers(self, at: int) -> bool:
        address, port = self._places[at]
        return network.answers(address, port, timeout=1.0)

    def _open_store(self, address: str, port: int) -> tuple[Store, bool]:
        """Return the store, and True if this process serves it: host 0, or without --node-rank a host there."""
        local, node_rank = network.is_local(address), self._job.options.node_rank
        where = f"--master {address}:{port}"
        if node_rank == 0 and not local and len(self._places) == 1:
            raise UsageError(f"--node-rank 0 must be the host of --master, but {address} is no address of this host")
        may_serve = local and (node_rank in (None, 0) or len(self._places) > 1)
        must_serve = node_rank == 0 and len(self._places) == 1
        if may_serve and (_hang_out_sign(port) or must_serve):
            return self._serve(address, port, where), True
        return self._reach(address, port), False

    def _serve(self, address: str, port: int, where: str) -> Store:
        try:
            store, _ = serve_store(address, port, self._token, STORE_TIMEOUT)
        except OSError as error:
            _take_in_sign(port)
            if error.errno != errno.EADDRINUSE:
                raise UsageError(f"{where}: cannot listen there: {error.strerror}") from None
            raise UsageError(
                f"{where}: the port is in use on this host by another program; choose another, the same on every host"
            ) from None
        return store

    def _reach(self, address: str, port: int) -> Store:
        """Wait for the serving host."""
        deadline, notice = time.monotonic() + self._job.options.join_timeout, self._notice()
        while not network.answers(address, port, timeout=1.0):
            if time.monotonic() > deadline:
                raise self._unreachable((address, port))
            notice.poll(self._silent(address, port))
            time.sleep(POLL)
        return self._connect(address, port, deadline)

    def _connect(self, address: str, port: int, deadline: float) -> Store:
        """Return the store that answers there. A thread connects: torch's own wait is not bounded or interruptible."""
        way, result = local_store_endpoint(address, port, self._token), list[Store]()
        caller = threading.Thread(target=_call, args=(*way, result), daemon=True)
        foreign = f"the launcher at --master {address}:{port}; the program that listens there does not answer as one"
        with _no_stack_traces() as console:
            notice = self._notice(lambda line, _: print(f"echelon: {line}", file=console))
            caller.start()
            while caller.is_alive() and time.monotonic() < deadline:
                notice.poll(foreign)
                time.sleep(POLL)
        if not result:
            raise PeerLost(
                f"--master {address}:{port}: the program that listens there is not a launcher; choose another port"
            )
        return result[0]

    def _notice(self, say: Say = say_wait) -> WaitNotice:
        return WaitNotice("this launcher", self._job.options.join_timeout, component="launcher", say=say)

    def _silent(self, address: str, port: int) -> str:
        return f"--master {address}:{port} to answer; start the same command on that host"

    def _unreachable(self, place: tuple[str, int]) -> PeerLost:
        needed = self._job.elastic or self._job.nnodes
        return PeerLost(
            f"1 of {needed} hosts came: --master {place[0]}:{place[1]} has not answered for "
            f"{self._job.options.join_timeout:g} s; start the same command on that host"
        )


def _hang_out_sign(port: int) -> bool:
    """Reserve the port among launchers on this host before it is bound; return False if another one has reserved it.

    The reservation is an abstract Unix socket name, which vanishes with the process. Only Linux has these; elsewhere
    this always returns True, and a second launcher finds the port in use.
    """
    if port in _signs:
        return True
    sign = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sign.bind(f"\0echelon-rendezvous-{port}")
    except OSError as error:
        sign.close()
        return error.errno != errno.EADDRINUSE
    _signs[port] = sign
    return True


def _take_in_sign(port: int) -> None:
    if (sign := _signs.pop(port, None)) is not None:
        sign.close()


def _call(address: str, port: int, found: list[Store]) -> None:
    with contextlib.suppress(RuntimeError):
        found.append(TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT))


@contextlib.contextmanager
def _no_stack_traces() -> Iterator[TextIO]:
    """Silence torch's C++ stack frames, which it prints for unexpected answers; the caller reports them in one line.

    Yields the console, for messages in the meantime.
    """
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with open(kept, "w", buffering=1, closefd=False) as console:
            yield console
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
