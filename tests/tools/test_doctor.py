"""The doctor's judgement, on facts as hosts tell them; and its connections and disk checks, on this machine."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.base import network
from echelon.base.network import NetworkRoute, Nic, route_to
from echelon.tools.doctor import disk
from echelon.tools.doctor.doctor_report import DoctorReport
from echelon.tools.doctor.findings import find_nic_problems, findings
from echelon.tools.doctor.host_details import (
    CheckFailed,
    capacity,
    driver_version,
    masked,
    os_name,
    ranges,
    run_bounded,
    run_check,
    variables,
)
from echelon.tools.doctor.nics import (
    GLOO,
    NCCL,
    REACHED,
    HostNics,
    NicChoice,
    ProbeListeners,
    gloo_choice,
    nccl_choice,
    probe_hosts,
)
from echelon.tools.doctor.rank_measurements import MOST_STEPS, host_rounds, steps
from echelon.tools.doctor.report_text import WIDTH, text_of
from echelon.tools.doctor.slowness import slow
from echelon.tools.doctor.store_messages import clock_offset

LO, ETH, DOCKER = (
    Nic("lo", "127.0.0.1", True, 65536, None),
    Nic("eth0", "10.0.0.2", True, 1500, 10000),
    Nic("docker0", "172.17.0.1", True, 1500, None),
)
NICS = [LO, DOCKER, ETH]
GIB = 2.0**30


def standing(name: str, choice: NicChoice) -> HostNics:
    return HostNics(name, NICS, [choice])


def answers(**wrong: str) -> dict[str, str]:
    return {"lo": "connection refused", "docker0": "connection refused", "eth0": REACHED} | wrong


# The wrong interface


def test_unreachable_interface_is_named_with_a_reachable_one() -> None:
    """An interface that other hosts cannot reach is named, together with the one that they can reach."""
    hosts = {
        0: standing("a", nccl_choice({NCCL: "eth0"}, NICS)),
        1: standing("b", nccl_choice({NCCL: "docker0"}, NICS)),
    }
    knocks = {0: {1: answers()}, 1: {0: answers()}}
    [found] = find_nic_problems(hosts, knocks, [GLOO, NCCL])
    assert found.sentence == (
        "host b: NCCL_SOCKET_IFNAME=docker0 (172.17.0.1) cannot be reached from host a; the interface that can is eth0 "
        "(10.0.0.2): export NCCL_SOCKET_IFNAME=eth0, or echelon run --nic eth0. This is the hang at the first "
        "collective"
    )
    assert found.wrong
    [unused] = find_nic_problems(hosts, knocks, [GLOO])  # no rank has a GPU
    assert not unused.wrong
    assert unused.sentence.endswith("; this job does not use NCCL")


def test_an_interface_that_is_not_there_is_named() -> None:
    hosts = {0: standing("a", gloo_choice({GLOO: "ib7"}, NICS, None))}
    [found] = find_nic_problems(hosts, {}, [GLOO])
    assert found.wrong
    assert "host a: GLOO_SOCKET_IFNAME=ib7 names no interface that is there and up; there are lo" in found.sentence


def test_host_that_accepts_no_connection_is_a_firewall_problem() -> None:
    """A host that no other can connect to on any interface is reported as a problem of its firewall."""
    choice = gloo_choice({GLOO: "eth0"}, NICS, None)
    closed = dict.fromkeys(("lo", "docker0", "eth0"), "no answer within 3 s")
    found = find_nic_problems(
        {0: standing("a", choice), 1: standing("b", choice)}, {0: {1: closed}, 1: {0: answers()}}, [GLOO]
    )
    assert [one.wrong for one in found] == [True]
    assert found[0].sentence.startswith(
        "host a cannot connect to a fresh port of host b (docker0 172.17.0.1: no answer"
    )


def test_right_interfaces_are_no_finding() -> None:
    choice = gloo_choice({GLOO: "eth0"}, NICS, None)
    assert (
        find_nic_problems(
            {0: standing("a", choice), 1: standing("b", choice)}, {0: {1: answers()}, 1: {0: answers()}}, [GLOO]
        )
        == []
    )


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        ("eth", "eth0"),
        ("=eth", None),
        ("=eth0", "eth0"),
        ("^lo,docker", "eth0"),
        ("^=lo", "docker0"),
        ("ib,eth", "eth0"),
        (None, "eth0"),  # inner ones come last
    ],
)
def test_nccl_reads_its_variable_as_prefixes(said: str | None, taken: str | None) -> None:
    assert nccl_choice({NCCL: said} if said else {}, NICS).nic == taken


def test_gloo_takes_what_the_name_of_the_host_leads_to() -> None:
    assert gloo_choice({}, NICS, "10.0.0.2").nic == "eth0"
    assert gloo_choice({}, NICS, "127.0.1.1").nic == "lo"  # Debian's entry of the host's own name
    assert gloo_choice({}, NICS, None).nic is None
    assert gloo_choice({GLOO: "eth"}, NICS, "10.0.0.2").nic is None  # no prefixes here


def test_probe_tells_which_interface_answers_and_its_host() -> None:
    """Connections tell which interface answers and which host it belongs to."""
    doors = ProbeListeners([LO])
    try:
        card = doors.card
        shut = {"word": "x", "where": {"eth0": ["127.0.0.1", network.free_ports("127.0.0.1", 1)[0]]}}
        other = card | {"word": "0" * len(card["word"])}
        found = probe_hosts({1: card, 2: other, 3: shut})
    finally:
        doors.close()
    assert found == {
        1: {"lo": REACHED},
        2: {"lo": "another host has that address too"},
        3: {"eth0": "connection refused"},
    }


def test_the_route_is_the_one_with_the_longest_prefix() -> None:
    table = (
        "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
        "eth0 00000000 0100000A 0003 0 0 100 00000000 0 0 0\n"
        "eth1 0000010A 00000000 0001 0 0 0 0000FFFF 0 0 0\n"
        "wlan0 00000000 0100A8C0 0003 0 0 600 00000000 0 0 0\n"
    )
    assert route_to("10.1.2.3", table) == NetworkRoute("eth1", None)
    assert route_to("8.8.8.8", table) == NetworkRoute("eth0", "10.0.0.1")
    assert route_to("8.8.8.8", table.splitlines()[0]) is None


# Slow ranks


def test_what_is_more_than_half_again_off_the_median_is_slow() -> None:
    assert slow({0: 10.0, 1: 9.0, 2: 6.1, 3: 5.0}, more_is_better=True) == {3: pytest.approx(7.55 / 5)}
    assert slow({0: 1.0, 1: 1.1, 2: 1.6}, more_is_better=False) == {}
    assert slow({0: 1.0, 1: 1.0, 2: 1.6}, more_is_better=False) == {2: 1.6}
    assert slow({0: 1.0}, more_is_better=True) == {}


@given(st.integers(1, 9), st.integers(1, 4))
def test_steps_measure_each_pair_of_hosts_once_without_overlap(hosts: int, each: int) -> None:
    """Every pair of ranks on different hosts is measured once, and shares no host with another pair of its step."""
    ranks_of = {host: range(host * each, (host + 1) * each) for host in range(hosts)}
    plan = steps(ranks_of)
    for step in plan:
        nodes = [rank // each for pair in step for rank in pair]
        inside = all(a // each == b // each for a, b in step)
        assert len(set(nodes)) == len(nodes) / (2 if inside else 1)
    pairs = [pair for step in plan for pair in step if pair[0] // each != pair[1] // each]
    wanted = [pair for pair in itertools.combinations(range(hosts * each), 2) if pair[0] // each != pair[1] // each]
    assert sorted(pairs) == wanted


def test_steps_of_many_ranks_pair_only_the_same_local_places() -> None:
    """With very many ranks only those with the same place on their hosts are paired."""
    plan = steps({host: range(host * 8, host * 8 + 8) for host in range(64)})
    assert len(plan) - 1 == 63 * 8 <= MOST_STEPS
    assert len(host_rounds(range(64))) == 63


# Verdicts


def host(name: str, **changed: object) -> dict:
    facts: dict = {
        "system": {"name": name, "os": "Debian", "kernel": "6", "machine": name, "container": None},
        "versions": {
            "python": "3.11.2",
            "torch": "2.13.0",
            "cuda": "12.8",
            "nccl": "2.27",
            "driver": "570.1",
            "echelon": "0.1.0",
            "from": "~/echelon",
            "executable": "~/python",
            "gpus": 1,
        },
        "capacity": {
            "processor": "CPU",
            "cores": 8,
            "affinity": 8,
            "usable_cores": 8,
            "load": 0.1,
            "memory": 64 * GIB,
            "usable_memory": 64 * GIB,
            "available_memory": 60 * GIB,
            "shared_memory": 8 * GIB,
        },
        "limits": {"nofile": 65536, "memlock": None, "nproc": None, "core": 0, "rdma": []},
        "network": {
            "own_address": "10.0.0.2",
            "nics": [vars(nic) for nic in NICS],
            "choices": [vars(gloo_choice({GLOO: "eth0"}, NICS, None)), vars(nccl_choice({}, NICS))],
            "ports": [32768, 60999],
        },
        "clock": {"ahead": 0.001, "within": 0.01},
        "disk": {
            "free": 500 * GIB,
            "size": 900 * GIB,
            "inodes": 10**6,
            "free_inodes": 10**5,
            "shared": True,
            "write": 2e8,
            "read": 1e9,
            "fsync": 0.002,
        },
        "variables": {"OMP_NUM_THREADS": "1"},
    }
    for path, value in changed.items():
        part, _, key = path.partition("__")
        facts[part] = facts[part] | {key: value} if key else value
    return facts


def report(*hosts: dict, pairs: list[dict] | None = None, **of_rank_1: object) -> DoctorReport:
    speeds = {"float32": 4e13, "bfloat16": 4e14, "memory": 2e12}
    rank = {"device": "H200", "memory": 140 * GIB, "free_memory": 139 * GIB, "threads": 1, "capability": "9.0"}
    ranks = {n: {"node": n, "speeds": speeds, "affinity": "0-7", **rank} for n in range(len(hosts))}
    ranks[min(1, len(hosts) - 1)] |= of_rank_1
    reached = {a: {b: answers() for b in range(len(hosts)) if b != a} for a in range(len(hosts))}
    together = {"backend": "nccl", "latency": 3e-5, "bandwidth": 1e10, "right": True}
    return DoctorReport(
        len(hosts), "/ckpt", False, "10.0.0.1:5 on eth0", dict(enumerate(hosts)), ranks, reached, together, pairs or []
    )


def only(found: DoctorReport) -> tuple[bool, str]:
    [one] = findings(found)
    return one.wrong, one.sentence


def test_two_sound_hosts_are_no_finding() -> None:
    assert findings(report(host("a"), host("b"))) == []
    assert text_of(report(host("a"), host("b")), []).splitlines()[1] == "nothing is wrong"


@pytest.mark.parametrize(
    ("changed", "wrong", "words"),
    [
        ({"capacity__shared_memory": 2.0**26}, False, "host b: /dev/shm has 64 MB"),
        ({"capacity__usable_cores": 2}, False, "host b: the container may use 2 of 8 cores"),
        ({"capacity__usable_memory": 0.5 * GIB}, False, "host b: 0.5 GiB of memory for 1 ranks"),
        ({"capacity__load": 20.0}, False, "host b: other processes are busy (load 20.0 on 8 cores)"),
        ({"limits__nofile": 128}, False, "host b: ulimit -n is 128; 2 ranks want 272"),
        ({"limits__nproc": 100}, False, "host b: ulimit -u is 100; 1 ranks want 384"),
        (
            {"limits": {"nofile": None, "memlock": 65536, "nproc": None, "core": 0, "rdma": ["mlx5_0"]}},
            False,
            "ulimit -l is 64 KB",
        ),
        ({"versions__torch": "2.11.0"}, True, "torch is not the same on all hosts: 2.11.0 on b; 2.13.0 on a;"),
        (
            {"versions__gpus": 0},
            False,
            "host b: driver 570.1 is there, but torch sees no GPU: torch is built for CUDA 12.8",
        ),
        (
            {"network__own_address": "127.0.1.1"},
            False,
            "host b: its own name resolves to 127.0.1.1 (Debian's /etc/hosts)",
        ),
        ({"network__own_address": None}, False, "host b: its own name has no address"),
        ({"network__ports": [40000, 41000]}, False, "host b: the kernel deals out only ports 40000-41000"),
        ({"clock": {"ahead": -3.0, "within": 0.1}}, False, "host b: its clock is 3.0 s behind host a's"),
        ({"disk__shared": False}, True, "host b does not see what host a writes to /ckpt"),
        ({"disk__free": 2 * GIB}, False, "host b: 2.0 GiB are left in /ckpt"),
        ({"disk__free_inodes": 17}, False, "host b: 17 inodes are left in /ckpt"),
        ({"disk": {"failed": "PermissionError: no"}}, True, "host b: the check of disk failed: PermissionError: no"),
        (
            {"limits": {"failed": "did not end within 10 s"}},
            False,
            "host b: the check of limits failed: did not end within",
        ),
        ({"system__name": "a"}, False, "2 hosts are called a"),
    ],
    ids=lambda value: value.replace(" ", "-")[:30] if isinstance(value, str) else "",
)
def test_each_trouble_of_a_host_has_its_sentence(changed: dict, wrong: bool, words: str) -> None:
    found = only(report(host("a"), host("b", **changed)))
    assert found[0] is wrong
    assert words in found[1]


def test_clock_difference_within_measurement_error_is_no_finding() -> None:
    assert findings(report(host("a"), host("b", clock={"ahead": 3.0, "within": 2.9}))) == []


@pytest.mark.parametrize(
    ("changed", "wrong", "words"),
    [
        ({"device": "A100"}, False, "devices differ, and the slowest sets the pace: H200: rank 0; A100: rank 1"),
        ({"free_memory": 70 * GIB}, False, "rank 1: 70.0 of 140.0 GiB of its GPU were in use before the job began"),
        ({"speeds": {"failed": "CUDA error"}}, True, "rank 1: the check of its device failed: CUDA error"),
    ],
)
def test_each_trouble_of_a_rank_has_its_sentence(changed: dict, wrong: bool, words: str) -> None:
    found = only(report(host("a"), host("b"), **changed))
    assert found[0] is wrong
    assert found[1].startswith(words)


def test_threads_are_counted_where_ranks_compute_on_cores() -> None:
    on_cpu = {"device": "CPU", "threads": 9}
    assert only(report(host("a"), **on_cpu))[1] == "host a: 1 ranks have 9 threads for 8 cores; set OMP_NUM_THREADS=8"
    assert findings(report(host("a"), threads=9)) == []


def test_a_slow_rank_and_a_slow_host_are_named_and_marked() -> None:
    names = "abc"
    hosts = [host(name) for name in names]
    rows = [
        {"ranks": [0, 1], "latency": 2e-5, "bandwidth": 1e9},
        {"ranks": [0, 2], "latency": 2e-5, "bandwidth": 1.1e9},
        {"ranks": [1, 2], "latency": 9e-5, "bandwidth": 1e9},
    ]
    slow_rank = {"speeds": {"float32": 4e13, "bfloat16": 1e14, "memory": 2e12}}
    found = report(*hosts, pairs=rows, **slow_rank)
    assert [one.sentence for one in findings(found)] == [
        "rank 1 (host b) is slow: bfloat16 products 4.0x worse than the median",
        "the link between hosts b and c is slow: latency 4.5x worse than the median",
    ]
    marked = [line.split() for line in text_of(found, findings(found)).splitlines() if "<-- slow" in line]
    assert [line[0] for line in marked] == ["1", "1-2"]


def test_host_with_slow_network_is_named_despite_many_slow_links() -> None:
    """A host with a slow network is named even where most of the links lead to it."""
    rows = [
        {"ranks": [0, 1], "latency": 2e-5, "bandwidth": 1.2e8},
        {"ranks": [0, 2], "latency": 2e-5, "bandwidth": 2.4e7},
        {"ranks": [1, 2], "latency": 2e-5, "bandwidth": 2.4e7},
    ]
    found = report(*(host(name) for name in "abc"), pairs=rows)
    assert only(found)[1] == "host c: its network is slow: bandwidth 5.0x worse than the median of the hosts"
    lines = [line.split() for line in text_of(found, []).splitlines() if "<-- slow" in line]
    assert [line[0] for line in lines] == ["0-2", "1-2"]


def test_ranks_that_did_not_come_are_named() -> None:
    found = report(host("a"), host("b"))
    found.world_size = 4
    assert only(found)[0]
    assert only(found)[1].startswith("rank 2, 3 of 4 did not report")
    assert "at 10.0.0.1:5 on eth0 (an interface, or --nic," in only(found)[1]


def test_a_host_that_says_nothing_is_told_by_its_ranks() -> None:
    found = report(host("a"), host("b"))
    del found.hosts[1], found.knocks[1]
    assert only(found)[1].startswith("the host of rank 1 did not end its checks in time")
    assert "number 1" in text_of(found, [])


def test_whether_a_disk_is_shared_may_remain_unknown() -> None:
    lonely = host("b")
    del lonely["disk"]["shared"]
    found = report(host("a", disk={"failed": "PermissionError"}), lonely)
    assert only(found)[1] == "host a: the check of disk failed: PermissionError"
    assert "shared or not: unknown" in text_of(found, [])


def test_a_sum_that_failed_is_wrong() -> None:
    found = report(host("a"), host("b"))
    found.together = {"failed": "rank 1: DistBackendError: no"}
    assert only(found) == (
        True,
        "the ranks could not communicate through torch.distributed: rank 1: DistBackendError: no",
    )
    assert "all ranks together: failed: rank 1" in text_of(found, findings(found))


def test_the_text_is_narrow_and_plain_whatever_the_names_are() -> None:
    found = report(
        host("a" * 70), host("h\u00f6st-" + "b" * 60, variables={"NCCL_X": "word " * 80, "NCCL_Y": "y" * 200})
    )
    text = text_of(found, findings(found))
    assert text.isascii()
    assert max(len(line) for line in text.splitlines()) <= WIDTH


# Figures read from the machine


def test_secrets_and_homes_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    env = {
        "ECHELON_TOKEN": "s3cret",
        "NCCL_API_KEY": "s3cret",
        "https_proxy": "http://me:s3cret@proxy:3128",
        "NCCL_TOPO_FILE": "/home/somebody/topo.xml",
        "PATH": "/bin",
        "OMP_NUM_THREADS": "2",
    }
    assert variables(env) == {
        "ECHELON_TOKEN": "***",
        "NCCL_API_KEY": "***",
        "NCCL_TOPO_FILE": "~/topo.xml",
        "OMP_NUM_THREADS": "2",
        "https_proxy": "http://***@proxy:3128",
    }
    assert masked("MY_PASSWORD", "x") == "***"


def test_a_container_with_a_quota_and_a_limit_has_only_these(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("100000 100000\n")
    (group / "memory.max").write_text(f"{2**28}\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 1024 kB\n")
    found = capacity(tmp_path)
    assert (found["usable_cores"], found["usable_memory"], found["available_memory"]) == (1, 2**28, 2**20)


def test_what_systems_write_is_read() -> None:
    assert os_name('NAME="x"\nPRETTY_NAME="Debian GNU/Linux 12"\n') == "Debian GNU/Linux 12"
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 1\n"
    assert driver_version(line) == "570.86.15"
    opened = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.51.03  Release Build\n"
    assert driver_version(opened) == "575.51.03"
    assert driver_version("") is None
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_a_clock_s_offset_lies_within_half_the_trip() -> None:
    within, ahead = clock_offset(sent_at=100.0, trip=0.2, remote_time=90.1)
    assert (within, ahead) == (0.1, pytest.approx(10.0))


def test_a_directory_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    found = disk.room(tmp_path)
    assert 0 < found["free"] <= found["size"]
    disk.leave_mark(tmp_path, "mark")
    assert disk.sees_mark(tmp_path, "mark", 1.0)
    disk.remove_mark(tmp_path, "mark")
    assert not disk.sees_mark(tmp_path, "mark", 0.05)
    assert list(tmp_path.iterdir()) == []
    assert "failed" in run_check(lambda: disk.room(tmp_path / "mark" / "\0"), 5.0)


def test_a_check_that_hangs_or_breaks_is_left_behind() -> None:
    assert run_bounded(lambda: 3, 5.0) == 3
    with pytest.raises(CheckFailed, match=r"did not end within 0\.05 s"):
        run_bounded(lambda: time.sleep(2.0), 0.05)
    assert run_check(lambda: {}[1], 5.0) == {"failed": "KeyError: 1"}
