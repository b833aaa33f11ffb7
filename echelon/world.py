"""Joining the job: ``init()`` and the questions every script asks afterwards (which rank, how many, which device)."""

from __future__ import annotations

import atexit
import os
import random
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

import echelon.untraced  # noqa: F401  # before an optimizer is made
from echelon.environment import (
    AGENT_STORE,
    BOUND_MARK,
    LOOPBACK,
    PADDLE_ENDPOINTS,
    PS_JOIN_TIMEOUT,
    RESTART_COUNT,
    Place,
    find_place,
    worker_place,
)
from echelon.errors import EchelonError, PeerLost, UsageError
from echelon.ps.role import ALONE, Role, find_role
from echelon.watch.activity import waiting

DEFAULT_TIMEOUT = 300.0


@dataclass(frozen=True)
class World:
    """This process's view of the job it has joined."""

    place: Place
    device: torch.device
    backend: str
    seed: int
    timeout: float
    #: carries small host-side messages: plan hashes, checkpoint talk; ``None`` in a job of one process, and for workers
    #: that talk to parameter servers alone (``bind`` makes them talk to one another)
    control: dist.ProcessGroup | None
    role: Role = ALONE

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.world_size


_world: World | None = None


def init(
    *,
    seed: int = 0,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    pservers: str | Sequence[str] | None = None,
    trainers: int | None = None,
    trainer_id: int | None = None,
    role: str | None = None,
    current_endpoint: str | None = None,
) -> World:
    """Join the job described by the launcher's environment; started without a launcher, be the whole job.

    ``seed`` seeds Python, numpy and torch alike on every rank, so that all ranks build the same model;
    ``echelon.distribute`` then gives each rank its own stream for dropout and the like.
    ``timeout`` bounds, in seconds, every wait for another process. A second call returns the same world.

    ``pservers`` ("host:port,..."), ``trainers``, ``trainer_id``, ``role`` ("worker" or "server") and
    ``current_endpoint`` place this process in a job with parameter servers; where they are left out the environment
    says it (docs/launch.md). A server serves here until the workers are done, and its script ends with this call.
    """
    global _world  # noqa: PLW0603 - a process belongs to one job
    if _world is not None:
        return _world
    _one_line_errors()
    part = find_role(
        pservers=pservers,
        trainers=trainers,
        trainer_id=trainer_id,
        role=role,
        current_endpoint=current_endpoint,
        join_timeout=None if PS_JOIN_TIMEOUT in os.environ else timeout,
    )
    if part.is_server:
        _serve(part)
    place = _place_of(part)
    world = World(place, _choose_device(place, device), "none", seed, timeout, None, part)
    _world = _joined(world, backend) if part.role == "alone" and world.size > 1 else world
    seed_everything(seed)
    return _world


def _serve(role: Role) -> NoReturn:
    """Be a server until the workers are done; then the script ends, too."""
    from echelon.ps.serve import end, serve

    if code := serve(role):
        end(code)  # by a signal, and as one would end it
    raise SystemExit(0)


def bind(backend: str | None = None) -> World:
    """Join torch.distributed with the other workers of a job with parameter servers, for collectives among them.

    From then on they stand and fall together: when one dies, ``echelon run`` starts all of them again.
    """
    global _world  # noqa: PLW0603
    world = current()
    if world.size > 1 and world.control is None:
        if not world.place.master_addr:
            raise UsageError(
                "workers on several hosts need a place to meet before they can be bound together; give every "
                "'echelon run' the same --master HOST:PORT, or set MASTER_ADDR and MASTER_PORT"
            )
        _world = world = _joined(world, backend)
    return world


def current() -> World:
    """The joined world; joins with the defaults when ``init()`` was not called."""
    return _world or init()


def is_initialized() -> bool:
    return _world is not None


def shutdown() -> None:
    """Leave the job. Done by itself at exit; a test or a notebook may want it earlier."""
    global _world  # noqa: PLW0603
    _world = None
    if dist.is_initialized():
        dist.destroy_process_group()


def forget() -> None:
    """In a process that was forked: the parent's job is not this one's."""
    global _world  # noqa: PLW0603
    _world = None


def _leave() -> None:
    """At exit: Gloo's threads let go of their last messages, and need the interpreter for it.

    One that asks while Python is already finalizing brings the process down (seen as SIGABRT in
    AsyncWork's destructor, once in four runs that end right after a collective). Sleeping frees the interpreter.
    """
    shutdown()
    time.sleep(0.1)


def rank() -> int:
    """Index of this process among all processes of the job."""
    return _place().rank


def world_size() -> int:
    """Number of processes in the job."""
    return _place().world_size


def local_rank() -> int:
    """Index of this process among those on its host."""
    return _place().local_rank


def node_rank() -> int:
    """Index of this process's host."""
    return _place().node_rank


def worker_index() -> int:
    """Fleet's name for ``rank()``."""
    return rank()


def worker_num() -> int:
    """Fleet's name for ``world_size()``."""
    return world_size()


def is_first_worker() -> bool:
    """Whether this is rank 0: the one that prints and writes shared files."""
    return rank() == 0


def worker_endpoints() -> list[str]:
    """``host:port`` of every worker, as the launcher wrote them; empty where no launcher did."""
    text = os.environ.get(PADDLE_ENDPOINTS, "")
    return text.split(",") if text else []


def device() -> torch.device:
    """The device this process trains on."""
    return current().device


def is_server() -> bool:
    """Whether this process is a parameter server."""
    return _role().is_server


def is_worker() -> bool:
    """Whether this process trains: in a job without servers every one does."""
    return _role().is_worker


def server_endpoints() -> list[str]:
    """``host:port`` of every parameter server; empty in a job without."""
    return list(_role().endpoints)


def server_num() -> int:
    """Number of parameter servers."""
    return len(_role().endpoints)


def barrier() -> None:
    """Wait until every process of the job is here."""
    world = current()
    if world.control is None and world.size > 1:
        raise UsageError(
            "barrier() was called by a worker that talks to parameter servers alone, where workers do not wait for one "
            "another; call echelon.world.bind() before it, or leave it out"
        )
    if world.control is not None:
        with waiting("barrier()", "", world.control):
            dist.barrier(world.control)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch. A negative seed is refused by numpy, so it is folded into 32 bits."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_for_rank(seed: int, rank: int) -> None:
    """Every rank its own dropout. Rank 0 keeps the stream it has: the one that one process would have."""
    if rank:
        seed_everything(seed + 1_000_003 * rank)


def _place() -> Place:
    return _world.place if _world else _place_of(find_role())


def _role() -> Role:
    return _world.role if _world else find_role()


def _place_of(role: Role) -> Place:
    return worker_place(role.index, role.workers) if role.role == "worker" else find_place()


def _choose_device(place: Place, asked: str | torch.device | None) -> torch.device:
    if asked is not None:
        chosen = torch.device(asked)
    elif torch.cuda.is_available():
        chosen = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    else:
        chosen = torch.device("cpu")
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"device '{asked}' was asked for, but torch sees no GPU here; use device='cpu'")
        torch.cuda.set_device(chosen)
    return chosen


def _choose_backend(place: Place, chosen: torch.device) -> str:
    """NCCL wants a GPU of its own for every rank; several ranks on one GPU talk through Gloo."""
    if chosen.type != "cuda" or not dist.is_nccl_available():
        return "gloo"
    return "nccl" if place.local_world_size <= torch.cuda.device_count() else "gloo"


def _joined(world: World, backend: str | None) -> World:
    """The same world, its processes joined by torch.distributed."""
    if mark := os.environ.get(BOUND_MARK):
        Path(mark).touch()  # from now on others may wait for us
    wanted = backend or _choose_backend(world.place, world.device)
    agreed, control = _join(world.place, world.device, wanted, world.timeout)
    return replace(world, backend=agreed, control=control)


def _join(place: Place, chosen: torch.device, wanted: str, timeout: float) -> tuple[str, dist.ProcessGroup]:
    if place.one_host and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody outside this host has business here
    limit = timedelta(seconds=timeout)
    store = _open_store(place, limit)
    backend = _roll_call(place, store, wanted, timeout)
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=limit,
        device_id=chosen if backend == "nccl" else None,
    )
    atexit.register(_leave)
    control = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=limit)
    assert control is not None
    return backend, control


def _open_store(place: Place, limit: timedelta) -> Store:
    """The meeting point. Rank 0 serves it, on loopback when the whole job is on one host."""
    served_by_agent = os.environ.get(AGENT_STORE) == "True"
    attempt = os.environ.get(RESTART_COUNT, "0")
    serve = place.rank == 0 and not served_by_agent
    listener = _listen(place) if serve else None
    try:
        store = TCPStore(
            place.master_addr,
            place.master_port,
            is_master=serve,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener else None,
        )
    except dist.DistNetworkError:
        raise PeerLost(
            f"rank {place.rank} could not reach rank 0 at {place.master_addr}:{place.master_port} within "
            f"{limit.total_seconds():.0f} s; is rank 0 running, and is that address reachable from here?"
        ) from None
    return PrefixStore(f"echelon/attempt-{attempt}", store)


def _listen(place: Place) -> socket.socket:
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
            "choose a free port and an address of this host (MASTER_PORT, MASTER_ADDR)"
        ) from None
    return listener


def _roll_call(place: Place, store: Store, wanted: str, timeout: float) -> str:
    """Wait for every rank to show up, so that a missing one is named instead of waited for in silence.

    Returns the backend for all: Gloo as soon as one rank cannot have NCCL (it shares its GPU, say).
    """
    everyone = range(place.world_size)
    missing, deadline = set(everyone), time.monotonic() + timeout
    try:
        store.set(f"here/{place.rank}", wanted)
        while missing := {rank for rank in missing if not store.check([f"here/{rank}"])}:
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"rank {place.rank} waited {timeout:.0f} s, but of {place.world_size} processes these did not "
                    f"join: rank {_names(missing)}; look at their logs, or start them"
                )
            time.sleep(0.01)
        wishes = {bytes(wish).decode() for wish in store.multi_get([f"here/{rank}" for rank in everyone])}
    except dist.DistError:
        raise PeerLost(
            f"rank {place.rank}: rank 0 has gone, while these had not joined: rank {_names(missing)}; look at its log"
        ) from None
    return wishes.pop() if len(wishes) == 1 else "gloo"


def _names(ranks: set[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))


def _one_line_errors() -> None:
    """An error we can explain is printed as its one line; anything else keeps its traceback."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, EchelonError):
            print(f"echelon: {error}", file=sys.stderr)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook
