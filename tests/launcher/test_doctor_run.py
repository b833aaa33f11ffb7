"""``echelon doctor`` as it is typed: on one host, and on two of which one would talk through the wrong interface."""

import json
import os
import subprocess
import sys

import pytest
from command import LIMIT, _clean_environment, echelon
from harness import free_port

from benchmarks.support.network import Network


def test_two_ranks_on_one_host_are_measured_and_told(tmp_path):
    end = echelon("doctor", "--procs", 2, "--checkpoint", "kept", "--save", "found.json", cwd=tmp_path)
    assert (end.code, end.err) == (0, ""), end
    assert max(len(line) for line in end.out.splitlines()) < 100
    assert end.out.isascii()
    found = json.loads((tmp_path / "found.json").read_text())
    assert not any(one["wrong"] for one in found["findings"])
    assert found["together"]["right"] is True
    assert [row["ranks"] for row in found["pairs"]] == [[0, 1]]
    assert found["hosts"]["0"]["disk"]["shared"] is True
    speeds = found["ranks"]["1"]["speeds"]
    for name in ("float32", "bfloat16"):  # what is printed is what was found
        assert f"{speeds[name] / 1e12:.3g}" in next(line for line in end.out.splitlines() if line.startswith("  1 "))
    assert list((tmp_path / "kept").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "kept"]


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_the_wrong_interface_is_named_in_words_and_nothing_hangs(tmp_path):
    """An interface of host 2 has an address that host 1 cannot reach, as with docker0."""
    words = ["doctor", "--procs", "1", "--nnodes", "2", "--master", f"10.77.0.1:{free_port()}", "--quick"]
    words += ["--save", "found.json", "--checkpoint", "kept"]
    common = _clean_environment() | {"ECHELON_TOKEN": "of the test alone", "CUDA_VISIBLE_DEVICES": ""}
    common["RES_OPTIONS"] = "timeout:1 attempts:1"  # torch resolves names of addresses, and no server answers there
    docker = "ip link add docker0 type bridge && ip address add 172.17.0.1/16 dev docker0 && ip link set docker0 up"
    command = [sys.executable, "-m", "echelon", *words]
    ends = []
    with Network(2) as network:
        for host, env in enumerate([common, common | {"GLOO_SOCKET_IFNAME": "docker0"}]):
            directory = tmp_path / str(host)  # so the checkpoints' directory is not the same, either
            directory.mkdir()
            typed = ["sh", "-c", f"{docker} && cd {directory} && exec {subprocess.list2cmdline(command)}"]
            with (directory / "err").open("wb") as log:
                ends.append(network.start(host, typed, env, log))
        outs = [process.communicate(timeout=LIMIT)[0].decode() for process in ends]
    assert [process.returncode for process in ends] == [1, 1], [(tmp_path / f"{n}/err").read_text() for n in (0, 1)]
    said = " ".join(outs[0].split())
    assert (
        "x host 10.77.0.2: GLOO_SOCKET_IFNAME=docker0 (172.17.0.1) cannot be reached from host 10.77.0.1; the "
        "interface that can is eth0 (10.77.0.2): export GLOO_SOCKET_IFNAME=eth0, or echelon run --nic eth0. "
        "This is the hang at the first collective"
    ) in said
    assert "x host 10.77.0.2 does not see what host 10.77.0.1 writes to" in said
    assert "all ranks together: left out: it would hang on the chosen interfaces" in said
    assert "10.77.0.2 (10.77.0.2): eth0" in said  # the route
    assert "of the test" not in outs[0]
    found = json.loads((tmp_path / "0/found.json").read_text())
    assert found["knocks"]["0"]["1"]["eth0"] == ""
    assert found["knocks"]["0"]["1"]["docker0"] != ""
    clock = found["hosts"]["1"]["clock"]
    assert abs(clock["ahead"]) <= clock["within"] + 0.01  # both are this machine's
    assert outs[1] == ""
