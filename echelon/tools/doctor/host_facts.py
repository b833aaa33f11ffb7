"""Facts that one process of a host collects before the hosts communicate; every check has a time limit."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from echelon.base import network
from echelon.base.network import Nic
from echelon.tools.doctor import machine
from echelon.tools.doctor.bounded_check import Facts, facts_of
from echelon.tools.doctor.redact import variables
from echelon.tools.doctor.wrong_nic import HostNics, NicChoice, gloo_choice, nccl_choice

PATIENCE = 10.0


def host_facts() -> Facts:
    checks = {
        "system": machine.system,
        "versions": machine.versions,
        "capacity": machine.capacity,
        "limits": machine.limits,
        "network": network_facts,
    }
    return {name: facts_of(check, PATIENCE) for name, check in checks.items()} | {"variables": variables(os.environ)}


def network_facts() -> Facts:
    nics, own = network.nics(), network.own_name_address()
    return {
        "own_address": own,
        "nics": [asdict(nic) for nic in nics],
        "choices": [asdict(gloo_choice(os.environ, nics, own)), asdict(nccl_choice(os.environ, nics))],
        "ports": port_range(Path("/proc/sys/net/ipv4/ip_local_port_range")),
    }


def host_nics(host: Facts) -> HostNics:
    """Return the network interfaces of a host from its facts."""
    found = host["network"]
    return HostNics(
        name_of(host),
        [Nic(**nic) for nic in found.get("nics", [])],
        [NicChoice(**choice) for choice in found.get("choices", [])],
    )


def name_of(host: Facts) -> str:
    return str(host["system"].get("name", "?"))


def port_range(path: Path) -> list[int] | None:
    """Return the first and the last port of the kernel's ephemeral range; None if it cannot be read."""
    try:
        first, last = path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return [int(first), int(last)]


def routes(addresses: dict[int, str]) -> dict[int, Facts]:
    """Return the route to each of the other hosts: destination address, interface and gateway."""
    table = Path("/proc/self/net/route").read_text(encoding="ascii")
    found = {}
    for host, address in addresses.items():
        way = None if ":" in address else network.route_to(address, table)
        inner = network.is_local(address)
        found[host] = {
            "to": address,
            "interface": "lo" if inner else way.interface if way else None,
            "gateway": way.gateway if way and not inner else None,
        }
    return found
