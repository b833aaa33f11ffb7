"""Joining a job, under each launcher's variables."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist
from harness import errors, run

import echelon
from echelon.base.environment import ALONE, detect_rank_info, expand_hosts
from echelon.base.errors import UsageError


def who_am_i() -> tuple[object, ...]:
    echelon.init()
    echelon.barrier()
    return echelon.rank(), echelon.world_size(), echelon.worker_index(), echelon.is_first_worker()


def test_ranks_find_each_other() -> None:
    assert run(who_am_i, ranks=3) == [(0, 3, 0, True), (1, 3, 1, False), (2, 3, 2, False)]


def test_without_a_launcher_one_process_is_the_job() -> None:
    assert run(who_am_i, ranks=1) == [(0, 1, 0, True)]
    assert detect_rank_info({}) == ALONE


def one_stays_away() -> None:
    if os.environ["RANK"] != "1":
        echelon.init(timeout=4)


def test_a_missing_rank_is_named_after_a_bounded_wait() -> None:
    lines = errors(one_stays_away, ranks=3)
    assert "PeerLost: rank 0 has waited 4 s, but of 3 processes these have not joined: rank 1" in lines[0]
    assert lines[2].startswith("PeerLost: rank 2")  # by its own clock, or because rank 0 has left
    assert "join" in lines[2]
    assert "rank 1" in lines[2]


def one_connects_late() -> tuple[float, float]:
    connect, connected = dist.init_process_group, []

    def slowly(*args: object, **options: object) -> None:
        connect(*args, **options)  # type: ignore[arg-type]
        time.sleep(1.0 if os.environ["RANK"] == "2" else 0.0)
        connected.append(time.monotonic())

    dist.init_process_group = slowly
    echelon.init()
    return connected[0], time.monotonic()


def test_no_rank_leaves_while_another_connects() -> None:
    """Keep a script that ends after init() from cutting off the ranks that are still connecting."""
    times = run(one_connects_late, ranks=3)
    assert min(left for _, left in times) >= max(connected for connected, _ in times)


def one_cannot_have_nccl() -> str:
    backend = "nccl" if os.environ["RANK"] == "0" else "gloo"
    return echelon.init(backend=backend).backend


def test_all_ranks_use_one_backend() -> None:
    assert run(one_cannot_have_nccl, ranks=2) == ["gloo", "gloo"]


def taken_port() -> None:
    if os.environ["RANK"] == "1":
        return
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        holder.listen()
        echelon.init(timeout=2)


def test_a_port_that_is_taken_is_one_line() -> None:
    line = errors(taken_port, ranks=2)[0]
    assert "rank 0 cannot listen on 127.0.0.1:" in line
    assert "Address already in use" in line


def listening_addresses() -> set[str]:
    """The local addresses on which this job's processes listen, from the kernel's table."""
    echelon.init()
    dist.barrier()
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            for row in list(file)[1:]:
                fields = row.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    found.add(fields[1].split(":")[0])
    dist.barrier()
    return found


def test_a_job_on_one_host_listens_on_loopback_only() -> None:
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    for addresses in run(listening_addresses, ranks=2):
        assert addresses <= loopback
        assert addresses


SLURM = {
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "6", "SLURM_JOB_ID": "77",
    "SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_STEP_NODELIST": "gpu[08-09]",
}  # fmt: skip


def test_slurm_places_a_task() -> None:
    place = detect_rank_info(SLURM)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 6, 1, 2)
    assert (place.node_rank, place.master_addr, place.launcher) == (1, "gpu08", "Slurm")
    assert place.master_port == detect_rank_info({**SLURM, "SLURM_PROCID": "0"}).master_port


def test_a_plain_command_in_a_slurm_batch_script_is_alone() -> None:
    assert detect_rank_info({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}) == ALONE


def test_slurms_host_lists() -> None:
    assert expand_hosts("a[01-03,07],b,c[9-10]x") == ["a01", "a02", "a03", "a07", "b", "c9x", "c10x"]


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip


def test_open_mpi_over_hosts_needs_to_be_told_where_rank_0_is() -> None:
    with pytest.raises(UsageError, match="mpirun -x MASTER_ADDR"):
        detect_rank_info(OPEN_MPI)
    place = detect_rank_info({**OPEN_MPI, "MASTER_ADDR": "first"})
    assert (place.rank, place.local_rank, place.node_rank, place.master_addr) == (3, 1, 1, "first")


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ({"RANK": "1"}, "WORLD_SIZE must be a whole number, but it is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a whole number, but it is 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "rank 2 of 2 processes"),
    ],
)
def test_broken_environments_are_one_line(env: dict[str, str], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        detect_rank_info(env)
