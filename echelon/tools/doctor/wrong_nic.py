"""Comparison of the interface that Gloo and NCCL will choose with those that other hosts can reach.

A wrong interface is a common cause of a silent hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echelon.base.network import Nic
from echelon.tools.doctor.finding import DoctorFinding, listed
from echelon.tools.doctor.reachability import REACHED

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
#: Interfaces that NCCL chooses last by default.
_INNER = ("lo", "docker", "virbr")

#: By source host, target host and interface of the target: ``REACHED``, or the reason for failure.
Knocks = Mapping[int, Mapping[int, Mapping[str, str]]]


@dataclass(frozen=True)
class NicChoice:
    """The interface that one library chooses on one host; ``nic`` is None if the library finds no interface.

    said: value of the library's environment variable; None if it is not set
    """

    variable: str
    said: str | None
    nic: str | None
    address: str | None

    @property
    def words(self) -> str:
        address = f" ({self.address})" if self.address else ""
        if self.said is not None:
            return f"{self.variable}={self.said}{address}"
        library = self.variable.partition("_")[0].replace("GLOO", "Gloo")
        taken = f"takes {self.nic}{address}" if self.nic else f"finds no interface{address}"
        return f"{library} {taken}, as {self.variable} is not set, which"


@dataclass(frozen=True)
class HostNics:
    """The interfaces of one host, and the choices of the libraries."""

    name: str
    nics: Sequence[Nic]
    choices: Sequence[NicChoice]


def gloo_choice(env: Mapping[str, str], nics: Sequence[Nic], own: str | None) -> NicChoice:
    """Return Gloo's choice: an interface that the variable names exactly, else that of the host's own address.

    own: address that the host's own name resolves to
    """
    if said := env.get(GLOO):
        names = said.split(",")
        return _choice(GLOO, said, next((nic for nic in nics if nic.name in names), None))
    if own is not None and own.startswith("127."):
        own_nic = next((nic for nic in nics if nic.address and nic.address.startswith("127.")), None)
    else:
        own_nic = next((nic for nic in nics if own is not None and nic.address == own), None)
    return NicChoice(GLOO, None, own_nic.name if own_nic else None, own)


def nccl_choice(env: Mapping[str, str], nics: Sequence[Nic]) -> NicChoice:
    """Return NCCL's choice: the first interface that matches the variable, else an ib..., else one not in ``_INNER``.

    The variable has prefixes of names; a leading ``=`` means exact names, a leading ``^`` excludes the names.
    """
    usable = [nic for nic in nics if nic.up and nic.address]
    if said := env.get(NCCL):
        return _choice(NCCL, said, next((nic for nic in usable if _matches(nic.name, said)), None))
    ordered = sorted(
        usable, key=lambda nic: 0 if nic.name.startswith("ib") else 2 if nic.name.startswith(_INNER) else 1
    )
    return _choice(NCCL, None, ordered[0] if ordered else None)


def _matches(name: str, said: str) -> bool:
    but, said = said.startswith("^"), said.removeprefix("^")
    exact, said = said.startswith("="), said.removeprefix("=")
    words = [word for word in said.split(",") if word]
    return any(name == word if exact else name.startswith(word) for word in words) is not but


def _choice(variable: str, said: str | None, nic: Nic | None) -> NicChoice:
    return NicChoice(variable, said, nic.name if nic else None, nic.address if nic else None)


def find_nic_problems(hosts: Mapping[int, HostNics], knocks: Knocks, used: Sequence[str]) -> list[DoctorFinding]:
    """Return the findings about interfaces.

    used: variables of the libraries that the job uses
    """
    found = _closed(hosts, knocks)
    if len(hosts) == 1:
        return [one for host in hosts.values() for one in _missing(host, [], used)]
    for number, host in hosts.items():
        callers = [other for other in hosts if other != number and not _walled(knocks, other, number)]
        good = [nic for nic in host.nics if callers and not _deaf(knocks, callers, number, nic.name)]
        found += _missing(host, good, used)
        for choice in host.choices:
            if choice.said is None and choice.variable not in used:
                continue
            if choice.nic and (deaf := _deaf(knocks, callers, number, choice.nic)):
                names = [hosts[other].name for other in deaf]
                found.append(_unreachable(host, choice, names, good, choice.variable in used))
    return found


def _closed(hosts: Mapping[int, HostNics], knocks: Knocks) -> list[DoctorFinding]:
    """Return findings for pairs of hosts between which no interface can be reached at all."""
    found = []
    for source, target in ((a, b) for a in hosts for b in hosts if a != b and _walled(knocks, a, b)):
        why = [
            f"{nic.name} {nic.address}: {knocks[source][target][nic.name]}"
            for nic in hosts[target].nics
            if nic.name in knocks[source][target] and nic.name != "lo"
        ]
        found.append(
            DoctorFinding(
                f"host {hosts[source].name} cannot connect to a fresh port of host {hosts[target].name} "
                f"({listed(why) or 'it has no address'}); Gloo and NCCL take ports as they come: open all ports "
                "between these hosts in the firewall, or the security group. This is the hang at the first collective",
                wrong=True,
            )
        )
    return found


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
