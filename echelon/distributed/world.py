"""Joining the job: ``init()`` and the questions every script asks afterwards (which rank, how many, which device)."""

from __future__ import annotations

import atexit
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

import echelon.base.lazy_dynamo  # noqa: F401  # before an optimizer is made
from echelon.base.endpoints import Trainers
from echelon.base.environment import ALONE as ALONE_PLACE
from echelon.base.environment import (
    BOUND_MARK,
    PADDLE_ENDPOINTS,
    PS_JOIN_TIMEOUT,
    RankInfo,
    detect_rank_info,
    worker_rank_info,
)
from echelon.base.errors import UsageError
from echelon.base.user_traceback import install_hook
from echelon.distributed.activity import waiting
from echelon.distributed.device_choice import choose_device, count_gpus
from echelon.distributed.endpoint_trainers import say_launcher_wins, trainer_rank_info, with_master_endpoint
from echelon.distributed.join_ranks import join_ranks
from echelon.distributed.ps_role import ALONE, Role, find_role

DEFAULT_TIMEOUT = 300.0


@dataclass(frozen=True)
class World:
    """This process's view of the job it has joined."""

    place: RankInfo
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
_parents_world: World | None = None


def init(
    *,
    seed: int = 0,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    pservers: str | Sequence[str] | None = None,
    trainers: Trainers = None,
    trainer_id: int | str | None = None,
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

    Without servers, ``trainers`` as the endpoints of all trainers ("host:port,..."), ``trainer_id`` and
    ``current_endpoint`` place it in a collective job that no launcher started (Fluid's NCCL2 mode); rank 0 listens at
    the first endpoint. The variables of a launcher win over them.
    """
    global _world  # noqa: PLW0603 - a process belongs to one job
    if _world is not None:
        return _world
    install_hook()
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
    place = _place_of(part, trainers, trainer_id, current_endpoint)
    world = World(place, _take_device(place, device), "none", seed, timeout, None, part)
    _world = _joined(world, backend) if part.role == "alone" and world.size > 1 else world
    seed_everything(seed)
    return _world


def _serve(role: Role) -> NoReturn:
    """Be a server until the workers are done; then the script ends, too."""
    from echelon.parameter_server.server.process import end, serve

    try:
        code = serve(role)
    except Exception as error:  # Python's own end would wait, inside gRPC, for workers that are still connected
        sys.excepthook(type(error), error, error.__traceback__)
        end(1)
    if code:
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
        from echelon.parameter_server.worker.server_connections import announce_worker

        with announce_worker(world.role):
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
    """Leave the parent's job, in a process that was forked.

    The object is kept: its process group would wait for threads that were not forked.
    """
    global _world, _parents_world
    _world, _parents_world = None, _world


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
    """``host:port`` of every worker, as the launcher or the script wrote them; empty where neither did."""
    if _world and _world.place.endpoints:
        return list(_world.place.endpoints)
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
            "another; call echelon.distributed.world.bind() before it, or leave it out"
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


def _place() -> RankInfo:
    return _world.place if _world else _place_of(find_role())


def _role() -> Role:
    return _world.role if _world else find_role()


def _place_of(
    role: Role, trainers: Trainers = None, trainer_id: int | str | None = None, current_endpoint: str | None = None
) -> RankInfo:
    """The place of this process: among servers' workers, in its launcher's job, or among the announced trainers."""
    if role.role == "worker":
        return with_master_endpoint(worker_rank_info(role.index, role.workers), os.environ, trainers)
    place = detect_rank_info()
    if place == ALONE_PLACE:
        return trainer_rank_info(
            os.environ, trainers=trainers, trainer_id=trainer_id, current_endpoint=current_endpoint
        )
    say_launcher_wins(place, trainers)
    return place


def _take_device(place: RankInfo, asked: str | torch.device | None) -> torch.device:
    chosen = choose_device(place, asked, count_gpus())
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen


def _choose_backend(place: RankInfo, chosen: torch.device) -> str:
    """NCCL wants a GPU of its own for every rank; several ranks on one GPU talk through Gloo."""
    if chosen.type != "cuda" or not dist.is_nccl_available():
        return "gloo"
    return "nccl" if place.local_world_size <= torch.cuda.device_count() else "gloo"


def _joined(world: World, backend: str | None) -> World:
    """The same world, its processes joined by torch.distributed."""
    if mark := os.environ.get(BOUND_MARK):
        Path(mark).touch()  # from now on others may wait for us
    wanted = backend or _choose_backend(world.place, world.device)
    join = world.role.join_timeout if world.role.endpoints else world.timeout
    agreed, control = join_ranks(world.place, world.device, wanted, world.timeout, join)
    atexit.register(_leave)
    return replace(world, backend=agreed, control=control)
