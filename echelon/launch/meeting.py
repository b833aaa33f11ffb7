"""Opening the muster: in our own memory for one host, at --master for several."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator

from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from echelon.environment import LOOPBACK
from echelon.errors import PeerLost, UsageError
from echelon.launch import network
from echelon.launch.job import Job
from echelon.launch.muster import POLL, STORE_TIMEOUT, Muster

#: held open until the process ends
_signs: list[socket.socket] = []


def own_address(job: Job) -> str:
    """The address by which the job's other hosts reach this one; loopback when there are none."""
    if job.master is None or job.one_host:
        return LOOPBACK
    if job.nic is not None and (address := network.address_of(job.nic)):
        return address
    return job.master[0] if network.is_local(job.master[0]) else network.address_towards(*job.master)


class WorkersStore:
    """Where the workers of a job with parameter servers meet if they join torch.distributed.

    Served by the launcher on one host, afresh for every attempt; at --master worker 0 serves it.
    """

    def __init__(self, job: Job) -> None:
        self._master = None if job.one_host else job.master
        self._elsewhere = not job.one_host
        self._store: TCPStore | None = None

    def open(self) -> dict[str, str]:
        """What workers find of it in their environment; nothing where several hosts were given no place to meet."""
        if self._elsewhere:
            return {"MASTER_ADDR": self._master[0], "MASTER_PORT": str(self._master[1])} if self._master else {}
        listener = network.listen(LOOPBACK, 0)
        port = int(listener.getsockname()[1])
        self._store = TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def open_muster(job: Job, address: str) -> Muster:
    where = network.endpoint(*job.master) if job.master else "this host"
    store, serves = (HashStore(), True) if job.master is None or job.nnodes == 1 else _open_store(job, *job.master)
    return Muster(
        store,
        where=where,
        name=socket.gethostname(),
        address=address,
        procs=job.procs,
        hosts=job.nnodes,
        node_rank=job.node_rank,
        serves=serves,
        join_timeout=job.join_timeout,
        max_restarts=job.max_restarts,
    )


def _open_store(job: Job, address: str, port: int) -> tuple[Store, bool]:
    """The store, and whether we serve it: host 0 does, or, where no host has a number, the one at that address."""
    if job.node_rank == 0 and not network.is_local(address):
        raise UsageError(f"--node-rank 0 must be the host of --master, but {address} is no address of this host")
    if job.node_rank == 0 or (job.node_rank is None and network.is_local(address)):
        try:
            return _serve(address, port), True
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UsageError(f"--master {address}:{port} cannot be served: {error.strerror}") from None
            if job.node_rank == 0 or not _is_muster(port):
                raise UsageError(
                    f"--master {address}:{port}: the port is in use on this host by another program; "
                    "choose another, the same on every host"
                ) from None
    return _reach(job, address, port), False


def _serve(address: str, port: int) -> Store:
    listener = network.listen(address, port)
    _hang_out_sign(port)
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT, master_listen_fd=listener.detach()
    )


def _sign(port: int) -> str:
    return f"\0echelon-muster-{port}"


def _hang_out_sign(port: int) -> None:
    """A second launcher on this host can tell by it whose the port is. It vanishes with our process."""
    sign = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(OSError):  # only Linux has names without a file
        sign.bind(_sign(port))
        sign.listen()
        _signs.append(sign)


def _is_muster(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.connect(_sign(port))
        return True
    return False


def _reach(job: Job, address: str, port: int) -> Store:
    """Wait for the serving host. torch's own wait can be neither bounded nor interrupted: a thread does it."""
    deadline = time.monotonic() + job.join_timeout
    while not network.answers(address, port, timeout=1.0):
        if time.monotonic() > deadline:
            raise PeerLost(
                f"1 of {job.nnodes} hosts came: nobody answers at --master {address}:{port} within "
                f"{job.join_timeout:g} s; start the same command on that host"
            )
        time.sleep(POLL)
    found: list[Store] = []
    caller = threading.Thread(target=_call, args=(address, port, found), daemon=True)
    with _no_stack_traces():
        caller.start()
        while caller.is_alive() and time.monotonic() < deadline:
            time.sleep(POLL)
    if not found:
        raise PeerLost(f"what answers at --master {address}:{port} is not a launcher; choose another port")
    return found[0]


def _call(address: str, port: int, found: list[Store]) -> None:
    with contextlib.suppress(RuntimeError):
        found.append(TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT))


@contextlib.contextmanager
def _no_stack_traces() -> Iterator[None]:
    """torch prints pages of C++ frames when it is not answered as expected; the caller says it in one line."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
