"""Findings of the doctor: present and possible problems, derived from the details, with advice.

A wrong interface, which other hosts do not reach, is a common cause of a silent hang.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from echelon.base.environment import LOOPBACK
from echelon.base.network import Nic
from echelon.tools.doctor.doctor_report import DoctorFinding, DoctorReport, listed
from echelon.tools.doctor.host_details import FAILED
from echelon.tools.doctor.nics import REACHED, HostNics, NicChoice
from echelon.tools.doctor.slowness import slow_findings

GIB = 1024.0**3
#: Bytes of shared memory, memory per rank and disk space below which jobs often fail later.
LEAST_SHARED, LEAST_MEMORY, LEAST_DISK = 1.0 * GIB, 1.0 * GIB, 10.0 * GIB
LEAST_PORTS = 10_000
#: Tolerated clock offset in seconds.
CLOCK = 0.5
#: Load per core above which other processes disturb the measurements.
BUSY = 1.0
#: Fraction of a GPU's memory that may be in use before the job starts.
OCCUPIED = 0.2
#: Versions that should be equal on all hosts. True: a difference is an error (NCCL refuses or hangs, or plans differ).
_ALIKE = {"torch": True, "nccl": True, "echelon": True, "cuda": False, "driver": False, "python": False}
#: By source host, target host and interface of the target: ``REACHED``, or the reason for failure.
Knocks = Mapping[int, Mapping[int, Mapping[str, str]]]


def findings(report: DoctorReport) -> list[DoctorFinding]:
    """Return all findings without duplicates, errors first."""
    result = [one for part in _PARTS for one in part(report)]
    return sorted(dict.fromkeys(result), key=lambda one: not one.wrong)


# Interfaces of hosts


def nic_findings(report: DoctorReport) -> list[DoctorFinding]:
    return find_nic_problems(report.nics_by_host(), report.knocks, report.used)


def find_nic_problems(hosts: Mapping[int, HostNics], knocks: Knocks, used: Sequence[str]) -> list[DoctorFinding]:
    """Return the findings about interfaces.

    used: variables of the libraries that the job uses
    """
    result = _closed(hosts, knocks)
    if len(hosts) == 1:
        return [one for host in hosts.values() for one in _missing(host, [], used)]
    for number, host in hosts.items():
        callers = [other for other in hosts if other != number and not _walled(knocks, other, number)]
        good = [nic for nic in host.nics if callers and not _deaf(knocks, callers, number, nic.name)]
        result += _missing(host, good, used)
        for choice in host.choices:
            if choice.said is None and choice.variable not in used:
                continue
            if choice.nic and (deaf := _deaf(knocks, callers, number, choice.nic)):
                names = [hosts[other].name for other in deaf]
                result.append(_unreachable(host, choice, names, good, choice.variable in used))
    return result


def _closed(hosts: Mapping[int, HostNics], knocks: Knocks) -> list[DoctorFinding]:
    """Return findings for pairs of hosts between which no interface can be reached at all."""
    result = []
    for source, target in ((a, b) for a in hosts for b in hosts if a != b and _walled(knocks, a, b)):
        why = [
            f"{nic.name} {nic.address}: {knocks[source][target][nic.name]}"
            for nic in hosts[target].nics
            if nic.name in knocks[source][target] and nic.name != "lo"
        ]
        result.append(
            DoctorFinding(
                f"host {hosts[source].name} cannot connect to a fresh port of host {hosts[target].name} "
                f"({listed(why) or 'it has no address'}); Gloo and NCCL take ports as they come: open all ports "
                "between these hosts in the firewall, or the security group. This is the hang at the first collective",
                wrong=True,
            )
        )
    return result


def _walled(knocks: Knocks, source: int, target: int) -> bool:
    answers = knocks.get(source, {}).get(target)
    return answers is not None and REACHED not in answers.values()


def _deaf(knocks: Knocks, callers: Sequence[int], target: int, nic: str) -> list[int]:
    """Return the callers that do not reach interface ``nic`` of host ``target``."""
    return [one for one in callers if knocks.get(one, {}).get(target, {}).get(nic, REACHED) != REACHED]


def _missing(host: HostNics, good: Sequence[Nic], used: Sequence[str]) -> list[DoctorFinding]:
    there = listed([f"{nic.name} ({nic.address})" for nic in host.nics if nic.address])
    return [
        DoctorFinding(
            f"host {host.name}: {choice.variable}={choice.said} names no interface that is there and up; there are "
            f"{there}{_remedy(choice, good)}",
            wrong=choice.variable in used,
        )
        for choice in host.choices
        if choice.nic is None and choice.said is not None
    ]


def _unreachable(host: HostNics, choice: NicChoice, names: list[str], good: Sequence[Nic], used: bool) -> DoctorFinding:
    hang = ". This is the hang at the first collective" if used else f"; this job does not use {choice.variable[:4]}"
    return DoctorFinding(
        f"host {host.name}: {choice.words} cannot be reached from host {listed(names)}"
        f"{_remedy(choice, good) or '; no interface of it is reached by all: look at the routes'}{hang}",
        wrong=used,
    )


def _remedy(choice: NicChoice, good: Sequence[Nic]) -> str:
    real = [nic for nic in good if nic.name != "lo"] or list(good)
    if not real:
        return ""
    nic = real[0]
    return (
        f"; the interface that can is {nic.name} ({nic.address}): export {choice.variable}={nic.name}, "
        f"or echelon run --nic {nic.name}"
    )


# Hosts and ranks


def _absent(report: DoctorReport) -> Iterator[DoctorFinding]:
    if missing := report.missing_ranks:
        names = listed([str(rank) for rank in missing])
        yield DoctorFinding(
            f"rank {names} of {report.world_size} did not report, although its launcher is there; either it cannot "
            f"reach the store of the first host at {report.store} (an interface, or --nic, that the others do not "
            "reach; a firewall), or it hangs while importing torch: look at its log",
            wrong=True,
        )
    for node in sorted({details["node"] for details in report.ranks.values()} - set(report.hosts)):
        ranks = listed([str(rank) for rank in report.ranks_of(node)])
        yield DoctorFinding(
            f"the host of rank {ranks} did not end its checks in time; look at its disk and name service", True
        )


def _failed_checks(report: DoctorReport) -> Iterator[DoctorFinding]:
    for node, host in report.hosts.items():
        for name, details in host.items():
            if isinstance(details, dict) and FAILED in details:
                yield DoctorFinding(
                    f"host {report.name(node)}: the check of {name} failed: {details[FAILED]}", name == "disk"
                )
    for rank, details in report.ranks.items():
        for part in (details, details.get("speeds", {})):
            if FAILED in part:
                yield DoctorFinding(f"rank {rank}: the check of its device failed: {part[FAILED]}", wrong=True)


def _versions(report: DoctorReport) -> Iterator[DoctorFinding]:
    for name, matters in _ALIKE.items():
        there: dict[str, list[str]] = {}
        for node, details in report.part("versions"):
            there.setdefault(str(details[name]), []).append(report.name(node))
        if len(there) > 1:
            words = "; ".join(f"{version} on {listed(names)}" for version, names in sorted(there.items()))
            yield DoctorFinding(
                f"{name} is not the same on all hosts: {words}; install one version everywhere", matters
            )


def _unused_gpus(report: DoctorReport) -> Iterator[DoctorFinding]:
    for node, details in report.part("versions"):
        if details["driver"] and not details["gpus"]:
            why = (
                f"torch {details['torch']} is built without CUDA; install a CUDA build"
                if details["cuda"] is None
                else f"torch is built for CUDA {details['cuda']}; is the driver too old for it, or "
                "CUDA_VISIBLE_DEVICES empty, or the container started without --gpus all?"
            )
            yield DoctorFinding(
                f"host {report.name(node)}: driver {details['driver']} is there, but torch sees no GPU: {why}"
            )


def _processors(report: DoctorReport) -> Iterator[DoctorFinding]:
    for node, details in report.part("capacity"):
        ranks, cores, name = report.ranks_of(node), details["usable_cores"], report.name(node)
        on_cpu = all(report.ranks[rank].get("device") == "CPU" for rank in ranks)
        threads = sum(report.ranks[rank].get("threads", 1) for rank in ranks)
        if details["load"] > BUSY * cores and not report.quick:
            yield DoctorFinding(
                f"host {name}: other processes are busy (load {details['load']:.1f} on {cores} cores); speeds suffer"
            )
        if cores < details["affinity"]:
            words = f"host {name}: the container may use {cores} of {details['affinity']} cores (its CPU quota)"
            yield DoctorFinding(f"{words}; more threads than that are stopped for parts of every 100 ms")
        if len(ranks) > cores:
            yield DoctorFinding(f"host {name}: {len(ranks)} ranks share {cores} cores; start fewer (--procs)")
        elif on_cpu and threads > cores:
            yield DoctorFinding(
                f"host {name}: {len(ranks)} ranks have {threads} threads for {cores} cores; "
                f"set OMP_NUM_THREADS={max(1, cores // len(ranks))}"
            )


def _memory(report: DoctorReport) -> Iterator[DoctorFinding]:
    for node, details in report.part("capacity"):
        name, ranks = report.name(node), max(1, len(report.ranks_of(node)))
        shared = details["shared_memory"]
        if shared is None or shared < LEAST_SHARED:
            has = "is not there" if shared is None else f"has {shared / 2**20:.0f} MB"
            yield DoctorFinding(
                f"host {name}: /dev/shm {has}; workers of data loaders and NCCL share memory through it, and end with "
                "a bus error when it is full: docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir with "
                "medium: Memory at /dev/shm"
            )
        if details["usable_memory"] / ranks < LEAST_MEMORY:
            yield DoctorFinding(f"host {name}: {details['usable_memory'] / GIB:.1f} GiB of memory for {ranks} ranks")


def _limits(report: DoctorReport) -> Iterator[DoctorFinding]:
    for node, details in report.part("limits"):
        name, here = report.name(node), len(report.ranks_of(node))
        files, processes = 256 + 8 * report.world_size, 256 + 128 * here
        if details["nofile"] is not None and details["nofile"] < files:
            yield DoctorFinding(
                f"host {name}: ulimit -n is {details['nofile']}; {report.world_size} ranks want {files}"
            )
        if details["nproc"] is not None and details["nproc"] < processes:
            yield DoctorFinding(
                f"host {name}: ulimit -u is {details['nproc']}; {here} ranks want {processes}, with threads"
            )
        if details["rdma"] and details["memlock"] is not None:
            yield DoctorFinding(
                f"host {name}: ulimit -l is {details['memlock'] // 1024} KB, and {listed(details['rdma'])} does RDMA, "
                "which locks its buffers in memory: ulimit -l unlimited (docker run --ulimit memlock=-1)"
            )


def _names(report: DoctorReport) -> Iterator[DoctorFinding]:
    """Check host names. The address of a host's own name matters to processes not started by ``echelon run``."""
    if len(report.hosts) < 2:
        return
    for node, details in report.part("network"):
        name, own = report.name(node), details["own_address"]
        if own is None:
            yield DoctorFinding(f"host {name}: its own name has no address; write it into /etc/hosts")
        elif own.startswith("127.") and not _all_on_loopback(report):
            whose = " (Debian's /etc/hosts)" if own == "127.0.1.1" else ""
            yield DoctorFinding(
                f"host {name}: its own name resolves to {own}{whose}, which no other host reaches; Gloo takes that "
                "address where GLOO_SOCKET_IFNAME is not set (echelon run sets it, torchrun does not): give the name "
                "the host's real address in /etc/hosts"
            )
    machines: dict[str, set[str]] = {}
    for _, details in report.part("system"):
        machines.setdefault(details["name"], set()).add(details["machine"])
    for name, there in machines.items():
        if len(there) > 1:
            yield DoctorFinding(
                f"{len(there)} hosts are called {name}; give each a name of its own, or logs cannot be told apart"
            )


def _all_on_loopback(report: DoctorReport) -> bool:
    """Return True if every host chose loopback, as launchers on one machine do."""
    return all(
        any(choice["address"] == LOOPBACK for choice in details["choices"]) for _, details in report.part("network")
    )


def _interfaces(report: DoctorReport) -> Iterator[DoctorFinding]:
    sizes: dict[int, list[str]] = {}
    for node, details in report.part("network"):
        chosen = {choice["nic"] for choice in details["choices"] if choice["variable"] in report.used}
        for nic in details["nics"]:
            if nic["name"] in chosen and nic["mtu"] is not None:
                sizes.setdefault(nic["mtu"], []).append(f"{report.name(node)} ({nic['name']})")
        if details["ports"] and details["ports"][1] - details["ports"][0] + 1 < LEAST_PORTS:
            first, last = details["ports"]
            yield DoctorFinding(
                f"host {report.name(node)}: the kernel deals out only ports {first}-{last} "
                "(net.ipv4.ip_local_port_range); connections of many ranks may run out of them"
            )
    if len(sizes) > 1:
        words = "; ".join(f"{size} on {listed(names)}" for size, names in sorted(sizes.items()))
        yield DoctorFinding(f"the MTU differs: {words}; large packets may vanish on the way, which looks like a hang")


def _clocks(report: DoctorReport) -> Iterator[DoctorFinding]:
    for node, details in report.part("clock"):
        if abs(details["ahead"]) - details["within"] > CLOCK:
            way = "ahead of" if details["ahead"] > 0 else "behind"
            yield DoctorFinding(
                f"host {report.name(node)}: its clock is {abs(details['ahead']):.1f} s {way} host {report.name(0)}'s; "
                "times in logs do not compare, and certificates may not hold: run an NTP service"
            )


def _disks(report: DoctorReport) -> Iterator[DoctorFinding]:
    for node, details in report.part("disk"):
        name = report.name(node)
        if details.get("shared") is False:
            yield DoctorFinding(
                f"host {name} does not see what host {report.name(0)} writes to {report.checkpoint}; every rank writes "
                "its part of a checkpoint there: use a directory that all hosts share",
                wrong=True,
            )
        if details["free"] < LEAST_DISK:
            yield DoctorFinding(f"host {name}: {details['free'] / GIB:.1f} GiB are left in {report.checkpoint}")
        if details["inodes"] and details["free_inodes"] < details["inodes"] / 100:
            yield DoctorFinding(f"host {name}: {details['free_inodes']} inodes are left in {report.checkpoint}")


def _devices(report: DoctorReport) -> Iterator[DoctorFinding]:
    kinds: dict[str, list[str]] = {}
    for rank, details in report.ranks.items():
        kinds.setdefault(details.get("device", "?"), []).append(str(rank))
        total, free = details.get("memory"), details.get("free_memory")
        if total and free is not None and free < (1 - OCCUPIED) * total:
            used = f"{(total - free) / GIB:.1f} of {total / GIB:.1f} GiB"
            yield DoctorFinding(
                f"rank {rank}: {used} of its GPU were in use before the job began; look at nvidia-smi there"
            )
    if len(kinds) > 1:
        words = "; ".join(f"{kind}: rank {listed(ranks)}" for kind, ranks in kinds.items())
        yield DoctorFinding(f"devices differ, and the slowest sets the pace: {words}")


def _joining(report: DoctorReport) -> Iterator[DoctorFinding]:
    together = report.together
    if FAILED in together:
        yield DoctorFinding(
            f"the ranks could not communicate through torch.distributed: {together[FAILED]}", wrong=True
        )
    if together.get("right") is False:
        yield DoctorFinding("a sum over all ranks is wrong; look at the devices and their memory", wrong=True)


_PARTS = (
    nic_findings,
    _absent,
    _joining,
    _versions,
    _unused_gpus,
    _disks,
    _failed_checks,
    _names,
    _interfaces,
    _memory,
    _processors,
    _limits,
    _clocks,
    _devices,
    slow_findings,
)
