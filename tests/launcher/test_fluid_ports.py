"""Fluid's own examples, ported: each process started by hand, losses and weights those of one process."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from harness import RANKS, free_port, run

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
#: A process: the example, its arguments, what its environment has besides.
Started = tuple[str, list[str], dict[str, str]]


def by_hand(processes: list[Started], directory: str) -> str:
    """Return the output of one process of the list, started as ``python EXAMPLE ARGUMENTS``."""
    name, arguments, environment = processes[int(os.environ["RANK"])]
    for variable in (*RANKS, "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[variable]
    os.environ |= environment
    os.chdir(directory)
    sys.argv = [str(EXAMPLES / name), *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:  # of a server
            if end.code:
                raise
    atexit._run_exitfuncs()
    return out.getvalue()


def endpoints(count: int) -> list[str]:
    return [f"127.0.0.1:{free_port()}" for _ in range(count)]


def transpiled() -> list[Started]:
    """Two servers and four trainers."""
    servers = endpoints(2)
    common = ["--pservers", ",".join(servers), "--trainers", "4"]
    roles = [["--role", "PSERVER", "--current_endpoint", server] for server in servers]
    roles += [["--role", "TRAINER", "--trainer_id", str(number)] for number in range(4)]
    return [("fluid_pservers.py", [*role, *common], {}) for role in roles]


def nccl2() -> list[Started]:
    """Two trainers by arguments, two by the environment."""
    found: list[Started] = []
    given, known = endpoints(2), endpoints(2)
    for number in range(2):
        words = ["--trainer_id", str(number), "--trainers", ",".join(given), "--current_endpoint", given[number]]
        found.append(("fluid_nccl2.py", words, {}))
    for number in range(2):
        told = {"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": ",".join(known), "TRAINING_ROLE": "TRAINER"}
        told |= {"PADDLE_TRAINER_ID": str(number), "PADDLE_CURRENT_ENDPOINT": known[number]}
        found.append(("fluid_nccl2.py", [], told))
    return found


def read(line: str) -> tuple[str, float, list[float]]:
    """Return the trainer of the line, the sum of its weights, and its losses."""
    found = re.fullmatch(r"(trainer \d of \d): weights ([\d.]+), losses ([\d. ]+)\n", line)
    assert found, line
    return found[1], float(found[2]), [float(loss) for loss in found[3].split()]


def test_fluid_examples_by_hand_equal_one_process(tmp_path: Path) -> None:
    alone: list[Started] = [("fluid_pservers.py", [], {}), ("fluid_nccl2.py", [], {})]
    said = run(by_hand, [*transpiled(), *nccl2(), *alone], str(tmp_path), ranks=12)
    assert [line.split(" is ready")[0] for line in said[:2]] == ["echelon: server 0 of 2", "echelon: server 1 of 2"]
    found = [read(line) for line in said[2:]]
    workers, trainers, (by_servers, collective) = found[:4], found[4:8], found[8:]

    assert [who for who, _, _ in workers] == [f"trainer {number} of 4" for number in range(4)]
    for _, weights, _ in workers:
        assert weights == pytest.approx(by_servers[1], abs=1e-5)
    means = [sum(losses) / 4 for losses in zip(*(losses for _, _, losses in workers), strict=True)]
    assert means == pytest.approx(by_servers[2], abs=2e-6)

    assert [who for who, _, _ in trainers] == ["trainer 0 of 2", "trainer 1 of 2"] * 2
    for _, weights, losses in trainers:
        assert weights == pytest.approx(collective[1], abs=1e-5)
        assert losses == pytest.approx(collective[2], abs=2e-6)
    assert len(collective[2]) == len(by_servers[2]) == 8
    assert collective[2][-1] < collective[2][0] - 0.1
