"""``join_ranks``: joins torch.distributed with the other ranks of the job, and names those that are missing."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from echelon.base.endpoints import split_endpoint
from echelon.base.environment import AGENT_STORE, LOOPBACK, RESTART_COUNT, RankInfo
from echelon.base.errors import MismatchError, PeerLost, UsageError
from echelon.base.torch_log import quiet_torch
from echelon.base.wait_notice import WaitNotice, name_ranks

#: Seconds between two checks that rank 0 listens, and between two checks which ranks have joined.
REACH, LOOK = 0.05, 0.01


def join_ranks(
    place: RankInfo, device: torch.device, wanted: str, timeout: float, join: float | None = None
) -> tuple[str, dist.ProcessGroup]:
    """Join the ranks; return the backend that all agreed on, and the group for small messages between hosts.

    timeout:  seconds that a collective may take
    join:     seconds within which all ranks must join; ``timeout`` by default
    """
    join = timeout if join is None else join
    _choose_interface(place)
    limit = timedelta(seconds=timeout)
    with quiet_torch():
        store = _open_store(place, join)
        backend = _roll_call(place, store, wanted, join)
    with WaitNotice(f"rank {place.rank}", timeout).during(lambda: f"{backend} to connect it with the other ranks"):
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=limit,
            device_id=device if backend == "nccl" else None,
        )
    control = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=limit)
    assert control is not None
    _wait_until_connected(place, store, timeout)
    return backend, control


def _choose_interface(place: RankInfo) -> None:
    """Choose Gloo's interface: loopback for a job on one host, else the one that has this trainer's address."""
    if sys.platform != "linux":
        return
    carrier = "lo" if place.one_host else None  # other hosts have no reason to connect
    if carrier is None and place.endpoints:
        from echelon.base import network

        host = split_endpoint(place.endpoints[place.rank])[0].strip("[]")
        carrier = network.interface_with(network.resolve(host, "current_endpoint"))
    if carrier is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", carrier)


def _open_store(place: RankInfo, timeout: float) -> Store:
    """Open the store of the job. The launcher or rank 0 serves it, rank 0 on loopback if the job is on one host."""
    served_by_agent = os.environ.get(AGENT_STORE) == "True"
    attempt = os.environ.get(RESTART_COUNT, "0")
    if place.rank == 0 and not served_by_agent:
        store: Store = _store(place, timeout, _listen(place))
    else:
        store = _reach(place, timeout, "the launcher" if served_by_agent else "rank 0")
    return PrefixStore(f"echelon/attempt-{attempt}", store)


def _store(place: RankInfo, timeout: float, listener: socket.socket | None = None) -> Store:
    return TCPStore(
        place.master_addr,
        place.master_port,
        is_master=listener is not None,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )


def _listen(place: RankInfo) -> socket.socket:
    address = LOOPBACK if place.one_host else place.master_addr
    try:
        family = socket.getaddrinfo(address, place.master_port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, place.master_port))
        listener.listen(2048)
    except OSError as error:
        raise UsageError(
            f"rank 0 cannot listen on {address}:{place.master_port}: {error.strerror or error}; "
            f"choose a free port and an address of this host ({_setting(place, 'MASTER_PORT, MASTER_ADDR')})"
        ) from None
    return listener


def _reach(place: RankInfo, timeout: float, server: str) -> Store:
    """Connect to the store that another process serves.

    Until something listens there, torch's wait would print pages of C++ frames; and if another program listens there
    and does not answer, torch would wait forever. So a plain socket waits for a listener, and a thread makes the call.
    """
    where, deadline = _where(place), time.monotonic() + timeout
    notice = WaitNotice(f"rank {place.rank}", timeout)
    while not _accepts(place):
        if time.monotonic() > deadline:
            raise PeerLost(
                f"rank {place.rank} could not reach {server} at {where} within "
                f"{timeout:.0f} s; is {server} running, and is that address reachable from here?"
            )
        notice.poll(f"{server} at {where}, where nothing listens yet")
        time.sleep(REACH)
    result, notice = list[Store](), WaitNotice(f"rank {place.rank}", timeout)
    caller = threading.Thread(target=_call, args=(place, timeout, result), name="store", daemon=True)
    caller.start()
    while caller.is_alive() and time.monotonic() < deadline:
        notice.poll(f"{server} at {where}, where a program listens that has not answered as {server} does")
        caller.join(REACH)
    if not result:
        raise PeerLost(
            f"rank {place.rank} could not join {server} at {where}: the program that listens there has not answered "
            f"as {server} does within {timeout:.0f} s; if another program has that port, choose another "
            f"{_setting(place, 'MASTER_PORT')} on all ranks"
        )
    return result[0]


def _accepts(place: RankInfo) -> bool:
    try:
        with socket.create_connection((place.master_addr, place.master_port), timeout=1.0):
            return True
    except OSError:
        return False


def _call(place: RankInfo, timeout: float, found: list[Store]) -> None:
    try:
        found.append(_store(place, timeout))
    except RuntimeError:  # the caller reports it
        return


def _roll_call(place: RankInfo, store: Store, wanted: str, timeout: float) -> str:
    """Wait for every rank to join, so that a missing rank is named.

    Returns the backend for all: Gloo if any rank cannot use NCCL (because it shares its GPU, for example).
    """
    everyone = range(place.world_size)
    missing, deadline = set(everyone), time.monotonic() + timeout
    notice = WaitNotice(f"rank {place.rank}", timeout, "start the missing processes, or look at their logs")
    try:
        _compare_lists(place, store)
        store.set(f"here/{place.rank}", wanted)
        while missing := {rank for rank in missing if not store.check([f"here/{rank}"])}:
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"rank {place.rank} has waited {timeout:.0f} s, but of {place.world_size} processes these have "
                    f"not joined: {_names(place, missing)}; look at their logs, or start them"
                )
            notice.poll(f"{_names(place, missing)} of {place.world_size} to call echelon.init()")
            time.sleep(LOOK)
        wishes = {bytes(wish).decode() for wish in store.multi_get([f"here/{rank}" for rank in everyone])}
    except dist.DistError:
        raise PeerLost(
            f"rank {place.rank}: rank 0 has exited before these joined: {_names(place, missing)}; look at the "
            "log of rank 0"
        ) from None
    return wishes.pop() if len(wishes) == 1 else "gloo"


def _wait_until_connected(place: RankInfo, store: Store, timeout: float) -> None:
    """Wait until all ranks are connected: a script that ends at once would cut off ranks that still connect."""
    deadline = time.monotonic() + timeout
    try:
        store.add("connected", 1)
        while (connected := store.add("connected", 0)) < place.world_size:
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"rank {place.rank} has waited {timeout:.0f} s, but only {connected} of {place.world_size} ranks "
                    "are connected with all others; look at the logs of the ranks"
                )
            time.sleep(LOOK)
    except dist.DistError:
        return  # rank 0, which serves the store, leaves when all are connected


def _compare_lists(place: RankInfo, store: Store) -> None:
    """Raise if trainers were given different lists: each would wait for the ranks of its own list."""
    local = ",".join(place.endpoints)
    if not local:
        return
    first = bytes(store.compare_set("trainers", "", local)).decode()
    if first != local:
        raise MismatchError(
            f"trainer {place.rank} was given the trainers {local}, but another trainer of this job was given {first}; "
            "give every trainer the same list, in the same order"
        )


def _names(place: RankInfo, ranks: set[int]) -> str:
    """Return "rank 1" or "ranks 1, 2", each with its endpoint if the job has a list of them."""
    if not place.endpoints:
        return name_ranks(ranks)
    return ", ".join(f"rank {rank} ({place.endpoints[rank]})" for rank in sorted(ranks))


def _where(place: RankInfo) -> str:
    """Return the address of rank 0, as the endpoint that the user gave if there is one."""
    address = f"{place.master_addr}:{place.master_port}"
    if not place.endpoints or place.endpoints[0] == address:
        return address
    return f"{place.endpoints[0]} (here {address})"


def _setting(place: RankInfo, otherwise: str) -> str:
    """Return the name of the setting for the address of rank 0."""
    return "first endpoint of the trainers" if place.endpoints else otherwise
