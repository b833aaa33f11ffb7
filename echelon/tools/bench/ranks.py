"""Start the processes of a measurement: the ranks of one job on this host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from echelon.base.environment import LOOPBACK
from echelon.base.errors import EchelonError
from echelon.base.network import free_ports

LIMIT = 300.0  #: seconds after which a measurement is given up


def run_ranks(processes: int, quick: bool, *, engine: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Start ``processes`` ranks and return the measurements of rank 0.

    quick:   measure fewer sizes, and each for a shorter time
    engine:  measure only the host costs of training (engine_costs.py)

    Raises EchelonError if a rank fails, or if the measurement takes longer than LIMIT.
    """
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as directory:
        result = Path(directory) / "rows.json"
        command = [sys.executable, "-m", "echelon.tools.bench.rank_process", str(result)]
        command += [f"--{name}" for name, requested in (("quick", quick), ("engine", engine)) if requested]
        port = free_ports(LOOPBACK, 1)[0]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(processes):
                ranks.append(subprocess.Popen(command, env=_environment(rank, processes, port)))
            _wait(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        rows: dict[str, list[dict[str, Any]]] = json.loads(result.read_text(encoding="utf-8"))
        return rows


def _environment(rank: int, processes: int, port: int) -> dict[str, str]:
    place = {
        "RANK": rank,
        "WORLD_SIZE": processes,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": processes,
        "GROUP_RANK": 0,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
    }
    return os.environ | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in place.items()}


def _wait(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Wait for all ranks. Raises EchelonError as soon as one of them fails, or after LIMIT seconds."""
    deadline = time.monotonic() + LIMIT
    while None in (codes := [process.poll() for process in ranks]):
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed or time.monotonic() > deadline:
            reason = f"process {failed[0]} ended with {codes[failed[0]]}" if failed else f"not done after {LIMIT:.0f} s"
            raise EchelonError(f"measuring with {len(ranks)} processes failed: {reason}; try fewer with --procs")
        time.sleep(0.05)
    if any(codes):
        raise EchelonError(f"measuring with {len(ranks)} processes failed: they ended with {codes}; see above")
