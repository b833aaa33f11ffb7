"""Describing machines: what a user writes, what is found here, and where every figure comes from."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.base.errors import UsageError
from echelon.base.quantities import quantity, show
from echelon.planner.cluster.cluster import Cluster, Link, read_curve
from echelon.planner.cluster.detect import cores, memory_bytes
from echelon.planner.cluster.device_catalog import CATALOGUE, RESERVE, find_kind


@pytest.fixture(autouse=True)
def no_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide measurements of this machine from the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("text", "hosts", "kinds", "gigabits"),
    [
        ("4x8xH100", [(4, 8)], ["H100"], 3200),
        ("8xV100", [(1, 8)], ["V100"], 100),
        ("H200", [(1, 1)], ["H200"], 3200),
        ("2x8xV100+1x8xT4", [(2, 8), (1, 8)], ["V100", "T4"], 50),
        (" 2 x 4 x a100-80gb ", [(2, 4)], ["A100"], 1600),
        ("h100-sxm", [(1, 1)], ["H100"], 3200),
        ("2xA100-40", [(1, 2)], ["A100-40"], 1600),
        ("RTX4090", [(1, 1)], ["RTX4090"], 25),
        ("2x4090", [(1, 2)], ["RTX4090"], 25),
        ("4x8xH100@100Gb", [(4, 8)], ["H100"], 100),
        ("4x8xH100@8x200Gb/s", [(4, 8)], ["H100"], 1600),
        ("4x8xH100@12.5 GB/s", [(4, 8)], ["H100"], 100),
        ("4x8xH100@50GB", [(4, 8)], ["H100"], 400),
        ("16xCPU", [(1, 16)], ["CPU"], 10),
    ],
)
def test_words_become_hosts_and_devices(
    text: str, hosts: list[tuple[int, int]], kinds: list[str], gigabits: float
) -> None:
    cluster = Cluster.parse(text)
    assert [(count, len(host.devices)) for count, host in cluster.hosts] == hosts
    assert [device.name for device in cluster.kinds] == kinds
    assert cluster.network.bandwidth == pytest.approx(gigabits * 1e9 / 8)
    assert cluster.size == sum(count * here for count, here in hosts) == len(list(cluster.devices()))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8xV10", "did you mean 'V100'"),
        ("8xGPU", "known: P100"),
        ("0x8xH100", "no number of hosts or devices"),
        ("2x2x2xH100", "describes no machines"),
        ("", "describes no machines"),
        ("8x", "describes no machines"),
        ("H100+", "describes no machines"),
        ("H100@fast", "'fast' is no quantity in bytes/s"),
        ("H100@", "no quantity"),
        ("H100@100gb", "no quantity"),
        ("H100@0Gb", "above 0"),
        ("nowhere.yaml", "no cluster file at 'nowhere.yaml'"),
    ],
)
def test_a_mistake_is_one_line(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says.replace("(", r"\(")) as caught:
        Cluster.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("driver", "kind"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla V100-SXM2-32GB", "V100-32"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10G", "A10"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
    ],
)
def test_what_drivers_call_devices_is_understood(driver: str, kind: str) -> None:
    found = find_kind(driver)
    assert found is not None
    assert found.device.name == kind


def test_the_catalogue_is_of_one_piece() -> None:
    for kind in CATALOGUE.values():
        device = kind.device
        assert device.peak["float32"] <= max(device.peak.values())
        assert device.peak_of("float8") >= device.peak_of("float16") or device.name == "P100"
        for curve in (device.products, device.streams):
            assert list(curve) == sorted(curve)
            assert all(0 < part <= 1 for _, part in curve)
        assert kind.link.bandwidth < device.bandwidth
        assert device.origin_of("peak") == "default"
    a100 = CATALOGUE["A100"].device
    assert a100.peak_of("bfloat16") == 312e12
    assert a100.memory + RESERVE == pytest.approx(79.2 * 2**30)
    assert CATALOGUE["V100"].device.peak_of("bfloat16") == 15.7e12  # it has no units for it


def test_a_hundred_thousand_devices_cost_no_more_than_eight() -> None:
    cluster = Cluster.parse("12500x8xH100")
    for rank in range(0, 100_000, 100):
        assert cluster.place(rank)[0] == rank // 8
    doubled = cluster.with_(network=2.0, hosts=25_000)
    assert (cluster.size, doubled.size) == (100_000, 200_000)
    assert [len(host.devices) for _, host in cluster.hosts] == [8]


def test_ranks_are_numbered_by_host_and_use_the_link_they_share() -> None:
    cluster = Cluster.parse("2x8xV100+1x8xT4")
    assert [cluster.device(rank).name for rank in (0, 15, 16, 23)] == ["V100", "V100", "T4", "T4"]
    assert [device.name for device in cluster.devices()] == [cluster.device(rank).name for rank in range(24)]
    assert {cluster.place(rank)[2].link.name for rank in range(8, 16)} == {"NVLink"}
    assert {cluster.place(rank)[2].link.name for rank in range(16, 24)} == {"PCIe"}
    assert cluster.place(0)[0] != cluster.place(8)[0]
    assert not cluster.uniform
    assert Cluster.parse("2x8xV100").uniform
    with pytest.raises(IndexError):
        cluster.place(24)


def test_asking_what_would_be_changes_only_what_was_asked() -> None:
    cluster = Cluster.parse("4x8xA100")
    faster = cluster.with_(network=2.0, memory=1.5)
    assert faster.network.bandwidth == 2 * cluster.network.bandwidth
    assert faster.network.latency == cluster.network.latency
    assert faster.device(0).memory == 1.5 * cluster.device(0).memory
    assert faster.device(0).peak == cluster.device(0).peak
    assert cluster.with_(speed=3.0).device(0).peak_of("tf32") == 3 * 156e12
    assert cluster.with_(hosts=7).size == 56
    assert cluster.with_(device="H100").device(5).name == "H100"
    assert cluster.with_() == cluster
    mixed = Cluster.parse("2x8xV100+1x8xT4").with_(hosts=6)
    assert [count for count, _ in mixed.hosts] == [4, 2]


def test_double_bandwidth_halves_table_times_beyond_the_latency() -> None:
    link = Link("l", 1e9, 1e-5, tables={("all_reduce", 2): ((1e3, 1e-4), (1e8, 0.2001))})
    table = link.faster(2.0).tables["all_reduce", 2]
    np.testing.assert_allclose(table, ((1e3, 1e-4), (1e8, 0.1001)))


FILE = """
name: two kinds
hosts:
  - {count: 2, devices: 8xV100, link: 130 GB/s}
  - {devices: 4xT4+4xMine}
network: {bandwidth: 8x25 Gb/s, latency: 10 us, rails: 8}
devices:
  V100: {memory: 30 GB, peak: {float16: 100 TFLOP/s}}
  Mine: {like: A100, bandwidth: 1.5 TB/s, launch: 7 us}
"""


def test_a_file_gives_figures_in_place_of_the_catalogues(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    cluster = Cluster.parse(path)
    v100, t4, mine = cluster.kinds
    assert (str(cluster), cluster.size) == ("two kinds", 24)
    assert (v100.memory, v100.peak_of("float16"), v100.peak_of("float32")) == (30e9, 100e12, 15.7e12)
    assert v100.origin_of("memory") == "given"
    assert v100.origin_of("bandwidth") == "default"
    assert (mine.bandwidth, mine.launch, mine.peak_of("bfloat16")) == (1.5e12, 7e-6, 312e12)
    assert t4 == CATALOGUE["T4"].device
    assert cluster.hosts[0][1].link.bandwidth == 130e9
    assert cluster.hosts[1][1].link.name == "PCIe"  # the slower of the two
    assert (cluster.network.bandwidth, cluster.network.rails) == (25e9, 8)
    assert cluster.network.latency == pytest.approx(10e-6)
    lines = cluster.table().splitlines()
    assert next(line for line in lines if "V100" in line and " memory " in line).split()[-1] == "given"
    assert all(line.split()[-1] in ("measured", "default", "given") for line in lines[1:])


def test_a_device_outside_the_catalogue_needs_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("hosts: [{devices: 2xAbacus}]\ndevices: {Abacus: {peak: {float32: 1 TFLOP/s}}}")
    with pytest.raises(UsageError, match=r"devices\.Abacus: a device of its own needs memory, bandwidth"):
        Cluster.parse(path)
    path.write_text(
        "hosts: [{devices: 2xAbacus}]\n"
        "devices: {Abacus: {peak: {float32: 1 TFLOP/s}, memory: 8 GiB, bandwidth: 100 GB/s}}"
    )
    device = Cluster.parse(path).device(1)
    assert (device.name, device.memory, device.origin_of("peak")) == ("Abacus", 8 * 2**30, "given")


@pytest.mark.parametrize("text", ["2x8xV100+1x8xT4", "4x8xH100@100Gb", "here", "3xhere"])
def test_what_is_written_comes_back_the_same(text: str, tmp_path: Path) -> None:
    cluster = Cluster.parse(text)
    table = {("all_reduce", 2): ((1024.0, 1e-4), (2.0**20, 1 / 3))}
    cluster = replace(cluster, network=replace(cluster.network, tables=table, origin="measured"))
    cluster.to_yaml(tmp_path / "cluster.yaml")
    again = Cluster.parse(tmp_path / "cluster.yaml")
    assert again == cluster
    assert again.table() == cluster.table()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hosts: []", "expected one or more"),
        ("hosts: [{devices: 8xV100, links: 3}]", "has no option 'links'; did you mean 'link'"),
        ("hosts: [{devices: 8xV101}]", "did you mean 'V100'"),
        ("hosts: [{devices: 8xV100, count: 0}]", "expected 1 or more"),
        ("hosts: [{devices: 8xV100}]\nnetwork: 3 apples", "'3 apples' is no quantity"),
        ("hosts: [{devices: 8xV100}]\ndevices: {V100: {memory: -1}}", "above 0"),
        ("hosts: [{devices: 8xV100}]\ndevices: {V100: {products: [[2, 1], [1, 1]]}}", "the first rising"),
        ("hosts: [{devices: 8xV100}]\nhosts: []", "given twice"),
        ("", "is empty"),
        ("hosts: [", "line 1"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_that_names_it(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=says) as caught:
        Cluster.parse(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_curves_are_straight_between_logarithms_and_flat_beyond() -> None:
    curve = ((1e3, 0.1), (1e5, 0.5), (1e9, 0.9))
    sizes = np.geomspace(1e2, 1e10, 50)
    wanted = np.interp(np.log(sizes), np.log([x for x, _ in curve]), [y for _, y in curve])
    np.testing.assert_allclose([read_curve(curve, size) for size in sizes], wanted, rtol=1e-12)
    assert read_curve(((5.0, 0.3),), 77.0) == 0.3


@given(st.floats(1e-3, 1e15), st.sampled_from(["bytes", "bytes/s", "FLOP/s"]))
def test_a_shown_quantity_reads_back_as_nearly_the_same(value: float, kind: str) -> None:
    assert math.isclose(quantity(show(value, kind), kind, "x"), value, rel_tol=6e-3) or value < 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("80 GB", "bytes", 80e9),
        ("40GiB", "bytes", 40 * 2**30),
        ("100 Gb/s", "bytes/s", 12.5e9),
        ("100gbit", "bytes/s", 12.5e9),
        ("2.5 TB/s", "bytes/s", 2.5e12),
        ("5us", "seconds", 5e-6),
        ("312 TFLOP/s", "FLOP/s", 312e12),
        ("1e12", "FLOP/s", 1e12),
    ],
)
def test_quantities_are_read_as_people_write_them(text: str, kind: str, value: float) -> None:
    assert quantity(text, kind, "x") == pytest.approx(value)  # type: ignore[arg-type]


def test_here_is_this_machine() -> None:
    cluster = Cluster.parse("here")
    device = cluster.device(0)
    assert cluster.size == cores() <= len(os.sched_getaffinity(0))
    assert device.origin_of("memory") == "measured"
    assert cluster.size * device.memory < memory_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_ranks_beyond_the_cores_share_them() -> None:
    here, many = Cluster.parse("here"), Cluster.parse(f"{2 * cores()}xhere")
    assert many.size == 2 * here.size
    assert many.device(0).peak_of("float32") == here.device(0).peak_of("float32") / 2
    assert many.device(0).memory < here.device(0).memory / 2


def test_here_in_a_job_is_all_of_its_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"RANK": 0, "WORLD_SIZE": 6, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in job.items():
        monkeypatch.setenv(name, str(value))
    cluster = Cluster.parse("here")
    assert [(count, len(host.devices)) for count, host in cluster.hosts] == [(3, 2)]


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal:       16777216 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_limits_of_control_groups_are_kept(tmp_path: Path) -> None:
    gib = 2**30
    bare = _tree(tmp_path / "bare", {})
    assert memory_bytes(bare) == 16 * gib
    assert cores(bare) == len(os.sched_getaffinity(0))
    second = _tree(
        tmp_path / "second",
        {
            "proc/self/cgroup": "0::/job/inner\n",
            "sys/fs/cgroup/job/inner/memory.max": "max\n",
            "sys/fs/cgroup/job/memory.max": str(4 * gib),
            "sys/fs/cgroup/job/cpu.max": "100000 100000\n",
            "sys/fs/cgroup/job/inner/cpu.max": "max 100000\n",
        },
    )
    assert (memory_bytes(second), cores(second)) == (4 * gib, 1)
    first = _tree(
        tmp_path / "first",
        {
            "proc/self/cgroup": "4:memory:/unseen\n3:cpu,cpuacct:/unseen\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * gib),
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert (memory_bytes(first), cores(first)) == (2 * gib, 1)
    unlimited = _tree(
        tmp_path / "unlimited",
        {
            "proc/self/cgroup": "4:memory:/\n3:cpu:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert (memory_bytes(unlimited), cores(unlimited)) == (16 * gib, len(os.sched_getaffinity(0)))
