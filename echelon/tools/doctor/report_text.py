"""Output of the doctor's report as plain text, narrow enough to be pasted into an issue."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from echelon.base.formatting import text_table, things
from echelon.tools.doctor.doctor_report import DoctorFinding, DoctorReport
from echelon.tools.doctor.host_details import FAILED, Details
from echelon.tools.doctor.nics import REACHED
from echelon.tools.doctor.slowness import DISK, RANK, disk_speeds, rank_speeds, slow_hosts, slow_ones, slow_pairs

WIDTH = 98
GIB = 1024.0**3
SLOW = "<-- slow"
#: Largest number of rank pairs shown: slow pairs first, then pairs in the order of ranks.
_PAIRS_SHOWN = 40


def text_of(report: DoctorReport, found: Sequence[DoctorFinding]) -> str:
    lines = [_title(report), *_verdict(found)]
    for node, host in report.hosts.items():
        lines += ["", f"host {report.name(node)}", *_host_lines(report, node, host)]
    lines += ["", *_rank_lines(report), *_reach_lines(report), "", *_together_lines(report), *_pair_lines(report)]
    return "\n".join(line.rstrip() for line in lines).encode("ascii", "replace").decode()


def _title(report: DoctorReport) -> str:
    quick = ", quick" if report.quick else ""
    hosts, ranks = things(len(report.hosts), "host"), things(report.world_size, "rank")
    return f"echelon doctor, {report.when}: {hosts}, {ranks}{quick}"


def _verdict(found: Sequence[DoctorFinding]) -> list[str]:
    if not found:
        return ["nothing is wrong"]
    lines = [f"{things(len(found), 'thing')} to look at (x: wrong; !: may be slow, or go wrong later):"]
    for one in found:
        lines += textwrap.wrap(one.sentence, WIDTH, initial_indent=f"  {one.mark} ", subsequent_indent="    ")
    return lines


def _host_lines(report: DoctorReport, node: int, host: Details) -> list[str]:
    lines = []
    for name, words in _PARTS.items():
        details = host.get(name)
        if details is None:
            continue
        if FAILED in details:
            lines += _entry(name, f"failed: {details[FAILED]}")
            continue
        for label, text in words(report, node, details):
            lines += _entry(label, text)
    return lines


def _entry(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"  {label:<10}", subsequent_indent=" " * 12, break_on_hyphens=False
    )


Entries = Iterator[tuple[str, str]]


def _system(report: DoctorReport, node: int, details: Details) -> Entries:
    container = f", in {details['container']}" if details["container"] else ""
    yield "system", f"{details['os']}, kernel {details['kernel']}{container}"


def _versions(report: DoctorReport, node: int, details: Details) -> Entries:
    names = {"python": "Python", "torch": "torch", "cuda": "CUDA", "nccl": "NCCL", "driver": "driver"}
    there = [f"{shown} {details[name] or 'none'}" for name, shown in names.items()]
    yield "versions", f"{', '.join(there)}, echelon {details['echelon']} from {details['from']}"


def _capacity(report: DoctorReport, node: int, details: Details) -> Entries:
    cores = f"{details['cores']} cores, {details['affinity']} by affinity, {details['usable_cores']} usable"
    yield "processor", f"{details['processor']}, {cores}, load {details['load']:.1f}"
    available = details["available_memory"]
    shared = details["shared_memory"]
    yield (
        "memory",
        f"{details['memory'] / GIB:.1f} GiB, {details['usable_memory'] / GIB:.1f} usable, "
        f"{'?' if available is None else f'{available / GIB:.1f}'} available; "
        f"/dev/shm {'none' if shared is None else f'{shared / 2**20:,.0f} MB'}",
    )


def _limits(report: DoctorReport, node: int, details: Details) -> Entries:
    names = ("nofile", "memlock", "nproc", "core")
    words = [f"{name} {'unlimited' if details[name] is None else details[name]}" for name in names]
    yield "limits", ", ".join(words) + (f"; RDMA: {', '.join(details['rdma'])}" if details["rdma"] else "")


def _network(report: DoctorReport, node: int, details: Details) -> Entries:
    for nic in details["nics"]:
        speed = f", {nic['speed']} Mb/s" if nic["speed"] else ""
        state = "up" if nic["up"] else "down"
        yield "nic", f"{nic['name']}: {nic['address'] or 'no IPv4 address'}, {state}, MTU {nic['mtu']}{speed}"
    gloo, nccl = (choice["nic"] or "none" for choice in details["choices"])
    yield "takes", f"Gloo {gloo}, NCCL {nccl}; the host's own name resolves to {details['own_address'] or 'no address'}"
    if details["ports"]:
        yield "ports", f"{details['ports'][0]}-{details['ports'][1]} are dealt out by the kernel"


def _routes(report: DoctorReport, node: int, details: Details) -> Entries:
    for other, way in details.items():
        gateway = f", gateway {way['gateway']}" if way["gateway"] else ""
        yield "route", f"to {report.name(int(other))} ({way['to']}): {way['interface'] or 'none'}{gateway}"


def _clock(report: DoctorReport, node: int, details: Details) -> Entries:
    yield (
        "clock",
        f"{details['ahead'] * 1e3:+.2f} ms against host {report.name(0)}, +- {details['within'] * 1e3:.2f} ms",
    )


def _disk(report: DoctorReport, node: int, details: Details) -> Entries:
    inodes = f", {details['free_inodes']:,} inodes free" if details["inodes"] else ""
    same = details.get("shared")
    shared = "shared or not: unknown" if same is None else "the same on all hosts" if same else "not the first host's"
    yield "disk", f"{details['free'] / GIB:,.1f} of {details['size'] / GIB:,.1f} GiB free{inodes}; {shared}"
    if "write" in details:
        rates = f"write {details['write'] / 1e6:,.0f} MB/s, read {details['read'] / 1e6:,.0f} MB/s"
        mark = f" {SLOW}" if node in slow_ones(disk_speeds(report), DISK) else ""
        yield "", f"{rates}, fsync {details['fsync'] * 1e3:.2f} ms{mark}"


def _variables(report: DoctorReport, node: int, details: Details) -> Entries:
    if details:
        yield "variables", " ".join(f"{name}={value}" for name, value in details.items())


_PARTS = {
    "system": _system,
    "versions": _versions,
    "capacity": _capacity,
    "limits": _limits,
    "network": _network,
    "routes": _routes,
    "clock": _clock,
    "disk": _disk,
    "variables": _variables,
}


def _rank_lines(report: DoctorReport) -> list[str]:
    slow = slow_ones(rank_speeds(report), RANK)
    rows = [
        [
            str(rank),
            report.name(details["node"]),
            details.get("device", "?"),
            f"{details['memory'] / GIB:.0f} GiB" if "memory" in details else "-",
            details.get("capability", "-"),
            details.get("affinity", "?"),
            str(details.get("threads", "?")),
            *_speeds(details.get("speeds", {})),
            SLOW if rank in slow else "",
        ]
        for rank, details in sorted(report.ranks.items())
    ]
    return table(["rank", "host", "device", "memory", "cc", "cores", "thr", "fp32", "bf16", "GB/s", ""], rows) + (
        [] if report.quick else ["  (fp32, bf16: TFLOP/s of a matrix product; GB/s of the device's memory)"]
    )


def _speeds(details: Mapping[str, Any]) -> list[str]:
    units = {"float32": 1e12, "bfloat16": 1e12, "memory": 1e9}
    return [f"{details[name] / unit:.3g}" if name in details else "-" for name, unit in units.items()]


def _reach_lines(report: DoctorReport) -> list[str]:
    """Return lines that say from which host each interface of each other host is reached."""
    lines = []
    for source, targets in report.knocks.items():
        for target, answers in targets.items():
            words = [f"{nic} {'yes' if why == REACHED else f'no ({why})'}" for nic, why in answers.items()]
            text = f"{report.name(source)} -> {report.name(target)}: {', '.join(words)}"
            lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ")
    return ["", "reached on a fresh port, by interface", *lines] if lines else []


def _together_lines(report: DoctorReport) -> list[str]:
    details = report.together
    if FAILED in details or "left_out" in details:
        words = f"failed: {details[FAILED]}" if FAILED in details else f"left out: {details['left_out']}"
        return textwrap.wrap(f"all ranks together: {words}", WIDTH, subsequent_indent="  ")
    if "bandwidth" not in details:
        return [
            f"all ranks together: a sum is {'right' if details.get('right') else 'WRONG'} ({details.get('backend')})"
        ]
    rates = f"{details['latency'] * 1e6:,.0f} us, {details['bandwidth'] / 1e6:,.0f} MB/s on each link"
    return [f"all ranks together, sum ({details['backend']}): {rates}"]


def _pair_lines(report: DoctorReport) -> list[str]:
    between = report.between()
    hosts = slow_hosts(report).keys()
    slow = {pair for pair in between if hosts & {report.ranks[rank]["node"] for rank in pair}} | {*slow_pairs(report)}
    shown = sorted(between, key=lambda pair: (pair not in slow, pair))[:_PAIRS_SHOWN]
    rows = [_pair_row(report, pair, row, "") for pair, row in sorted(report.within().items())]
    rows += [_pair_row(report, pair, between[pair], SLOW if pair in slow else "") for pair in sorted(shown)]
    if not rows:
        return []
    more = [f"  and {len(between) - len(shown)} pairs more"] if len(between) > len(shown) else []
    if late := report.together.get("planned", 0) - len(report.pairs):
        more.append(f"  {late} pairs were not measured, as that took too long")
    return ["", *table(["ranks", "hosts", "latency", "bandwidth", ""], rows), *more]


def _pair_row(report: DoctorReport, pair: tuple[int, int], row: Details, mark: str) -> list[str]:
    a, b = (report.name(report.ranks[rank]["node"]) for rank in pair)
    hosts = f"within {a}" if a == b else f"{a} - {b}"
    return [
        f"{pair[0]}-{pair[1]}",
        hosts,
        f"{row['latency'] * 1e6:,.0f} us",
        f"{row['bandwidth'] / 1e6:,.0f} MB/s",
        mark,
    ]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Format rows with columns as wide as their widest cell; the widest column is cut if a line would be too long."""
    return text_table([header, *rows], indent=2, width=WIDTH)
