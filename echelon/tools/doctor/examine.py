"""The program that ``echelon doctor`` runs in every rank: run checks and send the results to rank 0, which reports.

The first process of a host (its leader) checks the host. Every wait has a limit, because in the cases that the doctor
is for, other ranks never come.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from echelon.base import network
from echelon.base.environment import DOCTOR_RESULT, RESTART_COUNT, RankInfo, detect_rank_info
from echelon.base.errors import PeerLost
from echelon.tools.doctor import disk
from echelon.tools.doctor.doctor_report import DoctorReport
from echelon.tools.doctor.findings import findings, nic_findings
from echelon.tools.doctor.host_details import (
    FAILED,
    Details,
    device_details,
    device_speeds,
    host_details,
    routes,
    run_check,
)
from echelon.tools.doctor.nics import ProbeListeners, probe_hosts
from echelon.tools.doctor.report_text import text_of
from echelon.tools.doctor.store_messages import (
    MessageStore,
    answer_clock_requests,
    measure_clock_offset,
    open_message_store,
)

#: Limits in seconds: to reach the store; for others to import torch; for a host to finish a step; for the whole run.
STORE, START, STEP, WHOLE = 15.0, 30.0, 60.0, 400.0
#: Limits in seconds: a disk check; a device check; to join torch.distributed; all measurements through it.
DISK, DEVICE, JOIN, TALK = 20.0, 30.0, 20.0, 150.0
#: Seconds within which other hosts must see a file; otherwise the directory is not shared.
SEEN = 5.0


@dataclass(frozen=True)
class DoctorOptions:
    checkpoint: str | None
    json: str | None
    quick: bool


def main() -> None:
    requested, place = _options(sys.argv[1:]), detect_rank_info()
    try:
        messages = open_message_store(place, STORE, os.environ.get(RESTART_COUNT, "0"))
    except PeerLost:
        time.sleep(START)  # rank 0 must report before the launcher stops it because of this rank's failure
        raise
    code = Examination(requested, place, messages).run()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(code)  # a check may have left a hanging thread


def _options(words: list[str]) -> DoctorOptions:
    parser = argparse.ArgumentParser(prog="echelon doctor")
    parser.add_argument("--checkpoint")
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true")
    return DoctorOptions(**vars(parser.parse_args(words)))


class Examination:
    """The checks of one rank. Every rank runs the same steps; some are for leaders, and rank 0 collects the results."""

    def __init__(self, options: DoctorOptions, place: RankInfo, messages: MessageStore) -> None:
        self._options, self._place, self._messages = options, place, messages
        self._report = DoctorReport(place.world_size, options.checkpoint, options.quick, _where(place))
        self._first, self._leader = place.rank == 0, place.local_rank == 0
        self._node = place.node_rank

    def run(self) -> int:
        """Run all checks and return the exit code: 1 on rank 0 if there are errors and no result file, else 0."""
        self._messages.put(f"rank/{self._place.rank}", self._describe())
        if self._leader:
            self._examine_host()
        self._measure_device()
        self._talk()
        if self._first:
            self._conclude()
        return self._end()

    def _describe(self) -> Details:
        return {"node": self._node, **run_check(partial(device_details, self._place), DEVICE)}

    # ---- steps of a leader ----

    def _examine_host(self) -> None:
        report = self._report
        details = host_details()
        report.ranks = self._messages.gather("rank", range(self._place.world_size), START)
        doors = ProbeListeners(network.nics())
        self._messages.put(f"doors/{self._node}", doors.card)
        cards = self._messages.gather("doors", self._others, STEP)
        knocks = probe_hosts(cards)
        details["routes"] = run_check(partial(self._routes, cards, knocks), STEP)
        details |= self._clock()
        if self._options.checkpoint is not None:
            details["disk"] = self._disk(Path(self._options.checkpoint))
        self._messages.put(f"knocks/{self._node}", knocks)
        self._messages.put(f"host/{self._node}", details)
        if self._first:
            report.hosts = self._messages.gather("host", self._nodes, STEP)
            said = self._messages.gather("knocks", self._nodes, STEP)
            report.knocks = {a: {int(b): nics for b, nics in targets.items()} for a, targets in said.items()}
            self._messages.put("looked", True)
        self._messages.get("looked", WHOLE)
        doors.close()

    @property
    def _nodes(self) -> list[int]:
        return sorted({int(details["node"]) for details in self._report.ranks.values()})

    @property
    def _others(self) -> list[int]:
        return [node for node in self._nodes if node != self._node]

    def _routes(self, cards: dict[int, Any], knocks: dict[int, dict[str, str]]) -> Details:
        """Return the routes to each other host, at an address that this host reached, or else at the first address."""
        towards = {}
        for node, card in cards.items():
            where = {name: address for name, (address, _) in card["where"].items()}
            reached = [name for name, why in knocks[node].items() if not why]
            if names := sorted(reached or where, key=lambda name: name == "lo"):
                towards[node] = where[names[0]]
        return {str(node): way for node, way in routes(towards).items()}

    def _clock(self) -> Details:
        if self._first:
            answer_clock_requests(self._messages, self._others)
            return {}
        return {"clock": measure_clock_offset(self._messages, self._node, STEP)}

    def _disk(self, directory: Path) -> Details:
        result = run_check(partial(disk.room, directory), DISK)
        mark = f".echelon-doctor-mark-{self._place.master_port}"
        if self._first:
            written = run_check(partial(disk.leave_mark, directory, mark), DISK)
            self._messages.put("mark", FAILED not in written)
        if self._messages.get("mark", STEP) and FAILED not in result:
            result |= run_check(lambda: {"shared": disk.sees_mark(directory, mark, SEEN)}, DISK)
        self._messages.put(f"seen/{self._node}", True)
        if self._first:
            self._messages.gather("seen", self._nodes, STEP)
            run_check(partial(disk.remove_mark, directory, mark), DISK)
        if self._options.quick or FAILED in result:
            return result
        return result | run_check(partial(disk.speeds, directory), DISK)

    # ---- steps of every rank ----

    def _measure_device(self) -> None:
        if self._options.quick:
            return
        self._messages.get("looked", WHOLE)  # all ranks measure at the same time, as in training
        self._messages.put(f"speeds/{self._place.rank}", run_check(partial(device_speeds, self._place), DEVICE))
        if self._first:
            for rank, details in self._messages.gather("speeds", self._report.ranks, DEVICE + STEP).items():
                self._report.ranks[rank]["speeds"] = details

    def _talk(self) -> None:
        """Run the measurements through torch.distributed, unless they are known to hang."""
        if self._first:
            self._messages.put("talk", {"why_not": self._why_not(), "ranks_of": self._ranks_of()})
        agreed = self._messages.get("talk", WHOLE) or {"why_not": "the first rank has ended"}
        if agreed["why_not"]:
            self._report.together = {"left_out": agreed["why_not"]}
            return
        from echelon.tools.doctor.rank_measurements import talk

        ranks_of = {int(node): ranks for node, ranks in agreed["ranks_of"].items()}
        found = run_check(partial(talk, ranks_of, JOIN, self._options.quick), JOIN + TALK)
        self._messages.put(f"talked/{self._place.rank}", found)
        if self._first:
            self._take(self._messages.gather("talked", self._report.ranks, STEP))

    def _why_not(self) -> str:
        if self._place.world_size == 1:
            return "there is one rank only"
        if self._report.missing_ranks:
            return "not all ranks are there"
        if any(one.wrong for one in nic_findings(self._report)):
            return "it would hang on the chosen interfaces"
        return ""

    def _ranks_of(self) -> dict[int, list[int]]:
        return {node: self._report.ranks_of(node) for node in self._nodes}

    def _take(self, said: dict[int, Details]) -> None:
        report = self._report
        for details in said.values():
            report.pairs += details.pop("pairs", [])
        wrong = [f"rank {rank}: {details[FAILED]}" for rank, details in said.items() if FAILED in details]
        report.together = {FAILED: "; ".join(wrong[:2])} if wrong else said.get(0, {FAILED: "rank 0 has not ended"})

    # ---- end ----

    def _conclude(self) -> None:
        found = findings(self._report)
        with contextlib.suppress(BrokenPipeError):  # the reader, such as ``head``, has closed the pipe
            print(text_of(self._report, found), flush=True)
        if self._options.json is not None:
            _write(Path(self._options.json), asdict(self._report) | {"findings": [asdict(one) for one in found]})
        self._messages.put("end", sum(one.wrong for one in found))

    def _end(self) -> int:
        """Wait for the number of errors, write it to the result file if that file exists, and return the exit code.

        The command creates the result file on each host where it waits for the result.
        """
        wrong = int(self._messages.get("end", WHOLE) or 0)
        self._messages.put(f"left/{self._place.rank}", True)
        result = Path(os.environ.get(DOCTOR_RESULT, ""))
        waits = result.is_file()
        if waits and self._leader:
            result.write_text(str(wrong), encoding="ascii")
        if self._first:
            self._messages.gather("left", self._report.ranks, STEP)
            return 1 if wrong and not waits else 0
        return 0


def _where(place: RankInfo) -> str:
    """Return the address of the store, with its interface if it is on this host.

    A wrong interface is a reason why ranks of other hosts never come.
    """
    carrier = network.interface_with(place.master_addr)
    return f"{place.master_addr}:{place.master_port}" + (f" on {carrier}" if carrier else "")


def _write(path: Path, values: Details) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
