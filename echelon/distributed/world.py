"""Joins the job: ``init()``, and the functions that return rank, world size and device afterwards."""

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
from echelon.base.start_times import start_times
from echelon.base.user_traceback import install_hook
from echelon.distributed.activity import waiting
from echelon.distributed.device_choice import choose_device, count_gpus
from echelon.distributed.endpoint_trainers import say_launcher_wins, trainer_rank_info, with_master_endpoint
from echelon.distributed.join_ranks import join_ranks
from echelon.distributed.ps_role import ALONE, Role, find_role

DEFAULT_TIMEOUT = 300.0


@dataclass(frozen=True)
class World:
    """This process's view of the job it has joined: which process it is, and which of how many batches it reads.

    ``rank`` and ``size`` count all training processes. ``mesh_rank`` and ``mesh_size`` count those that run one plan
    with collectives: all of them, or this process alone if workers are connected through parameter servers only.
    ``data_rank`` and ``data_size`` say which of how many batches this process reads.
    """

    place: RankInfo
    device: torch.device
    backend: str
    seed: int
    timeout: float
    #: carries small messages in host memory, such as plan hashes and checkpoint agreement; ``None`` in a job of one
    #: process, and for parameter-server workers until ``bind``
    control: dist.ProcessGroup | None
    role: Role = ALONE
    #: index and number of batches in a step if a plan lets several processes share one; None: each has its own
    batches: tuple[int, int] | None = None

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.world_size

    @property
    def mesh_rank(self) -> int:
        return self.rank if self.control is not None else 0

    @property
    def mesh_size(self) -> int:
        return self.size if self.control is not None else 1

    @property
    def ranks_per_host(self) -> int:
        """The number of processes on this host that run one plan."""
        return self.place.local_world_size if self.control is not None else 1

    @property
    def data_rank(self) -> int:
        return self.rank if self.batches is None else self.batches[0]

    @property
    def data_size(self) -> int:
        return self.size if self.batches is None else self.batches[1]

    def reading(self, index: int, count: int) -> World:
        """Return the world of a process that reads batch ``index`` of the ``count`` batches of a step."""
        return replace(self, batches=(index, count))

    def without_collectives(self) -> World:
        """Return the world of a worker that is connected to the others through parameter servers only."""
        return replace(self, backend="none", control=None)


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
    """Join the job described by the launcher's environment; without a launcher, the process is the whole job.

    seed:             seed of Python, numpy and torch, alike on every rank, so that all ranks build the same model;
                      ``echelon.distribute`` then gives each rank its own random stream for dropout
    device:           device to train on; default: the GPU of this rank, or the CPU
    backend:          backend of torch.distributed; default: "nccl" on GPUs, "gloo" on CPUs
    timeout:          longest wait, in seconds, for another process, default 300
    pservers:         endpoints of the parameter servers, "host:port,..."
    trainers:         number of trainers, or their endpoints "host:port,..."
    trainer_id:       index of this trainer
    role:             "worker" or "server"
    current_endpoint: endpoint of this process, "host:port"

    A second call returns the same world. The last five give a process its role in a job with parameter servers; they
    default to the environment (docs/launch.md). A server serves here until the workers are done, and its script ends
    with this call.

    Without servers, ``trainers`` as the endpoints of all trainers, ``trainer_id`` and ``current_endpoint`` give a
    process its rank in a collective job that no launcher started (Fluid's NCCL2 mode); rank 0 listens at the first
    endpoint. The variables of a launcher win over them.

    >>> world = echelon.init(seed=0)
    """
    global _world  # noqa: PLW0603 - a process belongs to one job
    if _world is not None:
        return _world
    start_times.end("import")
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
    start_times.end("join")
    return _world


def _serve(role: Role) -> NoReturn:
    """Serve as a parameter server until the workers are done; then end the script."""
    from echelon.parameter_server.server.process import end, serve

    try:
        code = serve(role)
    except Exception as error:  # the interpreter's own exit would wait for workers still connected
        sys.excepthook(type(error), error, error.__traceback__)
        end(1)
    if code:
        end(code)  # the server was ended by a signal, whose exit code is kept
    raise SystemExit(0)


def bind(backend: str | None = None) -> World:
    """Join torch.distributed with the other workers of a job with parameter servers, for collectives among them.

    From then on the workers fail together: if one dies, ``echelon run`` restarts all of them.
    """
    global _world  # noqa: PLW0603
    world = current()
    if world.size > 1 and world.control is None:
        if not world.place.master_addr:
            raise UsageError(
                "workers on several hosts need a rendezvous address for bind(); give every "
                "'echelon run' the same --master HOST:PORT, or set MASTER_ADDR and MASTER_PORT"
            )
        from echelon.parameter_server.worker.server_connections import announce_worker

        with announce_worker(world.role):
            _world = world = _joined(world, backend)
    return world


def current() -> World:
    """Return the joined world; joins with the defaults if ``init()`` was not called."""
    return _world or init()


def is_initialized() -> bool:
    return _world is not None


def shutdown() -> None:
    """Leave the job. It runs by itself at exit; a test or a notebook may call it earlier."""
    global _world  # noqa: PLW0603
    _world = None
    if dist.is_initialized():
        dist.destroy_process_group()


def forget() -> None:
    """Leave the parent's job, in a forked process.

    The object is kept: destroying its process group would wait for threads that were not forked.
    """
    global _world, _parents_world
    _world, _parents_world = None, _world


def _leave() -> None:
    """Leave the job at exit, and give Gloo's threads time to release their last messages, for which they need the GIL.

    A thread that requests the GIL while Python is already finalizing aborts the process (seen as SIGABRT in AsyncWork's
    destructor, once in four runs that end right after a collective). Sleeping releases the GIL.
    """
    shutdown()
    time.sleep(0.1)


def rank() -> int:
    """Return the index of this process among all processes of the job."""
    return _place().rank


def world_size() -> int:
    """Return the number of processes in the job."""
    return _place().world_size


def local_rank() -> int:
    """Return the index of this process among those on its host."""
    return _place().local_rank


def node_rank() -> int:
    """Return the index of this process's host."""
    return _place().node_rank


def worker_index() -> int:
    """Return ``rank()``, under Fleet's name."""
    return rank()


def worker_num() -> int:
    """Return ``world_size()``, under Fleet's name."""
    return world_size()


def is_first_worker() -> bool:
    """Return True on rank 0, the process that prints and writes shared files."""
    return rank() == 0


def worker_endpoints() -> list[str]:
    """Return ``host:port`` of every worker, as given by the launcher or the script; empty if neither gave them."""
    if _world and _world.place.endpoints:
        return list(_world.place.endpoints)
    text = os.environ.get(PADDLE_ENDPOINTS, "")
    return text.split(",") if text else []


def device() -> torch.device:
    """Return the device this process trains on."""
    return current().device


def is_server() -> bool:
    """Return True if this process is a parameter server."""
    return _role().is_server


def is_worker() -> bool:
    """Return True if this process trains: in a job without servers every process does."""
    return _role().is_worker


def server_endpoints() -> list[str]:
    """Return ``host:port`` of every parameter server; empty in a job without servers."""
    return list(_role().endpoints)


def server_num() -> int:
    """Return the number of parameter servers."""
    return len(_role().endpoints)


def barrier() -> None:
    """Wait until every process of the job has arrived."""
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
    """Seed Python, numpy and torch. Numpy refuses negative seeds, so the seed is reduced to 32 bits for numpy."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_for_rank(seed: int, rank: int) -> None:
    """Seed each rank differently, for dropout. Rank 0 keeps its stream, which is that of a single process."""
    if rank:
        seed_everything(seed + 1_000_003 * rank)


def _place() -> RankInfo:
    return _world.place if _world else _place_of(find_role())


def _role() -> Role:
    return _world.role if _world else find_role()


def _place_of(
    role: Role, trainers: Trainers = None, trainer_id: int | str | None = None, current_endpoint: str | None = None
) -> RankInfo:
    """Return the coordinates of this process: from its worker role, its launcher, or the list of trainers."""
    if role.role == "worker":
        return with_master_endpoint(worker_rank_info(role.index, role.workers), os.environ, trainers)
    place = detect_rank_info()
    if place == ALONE_PLACE:
        return trainer_rank_info(
            os.environ, trainers=trainers, trainer_id=trainer_id, current_endpoint=current_endpoint
        )
    say_launcher_wins(place, trainers)
    return place


def _take_device(place: RankInfo, requested: str | torch.device | None) -> torch.device:
    chosen = choose_device(place, requested, count_gpus())
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen


def _choose_backend(place: RankInfo, chosen: torch.device) -> str:
    """Return the backend: NCCL needs one GPU per rank, so several ranks on one GPU use Gloo."""
    if chosen.type != "cuda" or not dist.is_nccl_available():
        return "gloo"
    return "nccl" if place.local_world_size <= torch.cuda.device_count() else "gloo"


def _joined(world: World, backend: str | None) -> World:
    """Join torch.distributed; return the world with backend and control group."""
    if mark := os.environ.get(BOUND_MARK):
        Path(mark).touch()  # from now on other workers may wait for this one
    wanted = backend or _choose_backend(world.place, world.device)
    join = world.role.join_timeout if world.role.endpoints else world.timeout
    agreed, control = join_ranks(world.place, world.device, wanted, world.timeout, join)
    atexit.register(_leave)
    return replace(world, backend=agreed, control=control)
