"""Jobs with real servers for tests: ``results = served(train, servers=2, workers=2)``, each a process of its own."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Callable
from typing import Any

from harness import RANKS, free_port, run


def served(
    train: Callable[..., Any], *args: Any, servers: int = 1, workers: int = 2, late: int = 0, **kwargs: Any
) -> list[Any]:
    """Call ``train`` on every worker of a job; what they returned, by worker. The last ``late`` are not expected."""
    endpoints = ",".join(f"127.0.0.1:{free_port()}" for _ in range(servers))
    meeting = free_port()
    with tempfile.TemporaryDirectory() as state:
        told = {"servers": servers, "workers": workers, "endpoints": endpoints, "meeting": meeting, "state": state}
        told["expected"] = workers - late
        results = run(part, train, told, args, kwargs, ranks=servers + workers)
    assert results[:servers] == [0] * servers, results[:servers]
    return results[servers:]


def part(train: Callable[..., Any], told: dict[str, Any], args: Any, kwargs: Any) -> Any:
    """One process of the job: the first ones are servers."""
    index = int(os.environ["RANK"])
    for name in RANKS:  # workers and servers are told other things
        del os.environ[name]
    os.environ |= {
        "PADDLE_PSERVERS_IP_PORT_LIST": told["endpoints"],
        "MASTER_PORT": str(told["meeting"]),
        "ECHELON_PS_STATE": told["state"],
        "ECHELON_PS_TOKEN": "between-us-alone",
    }
    import echelon

    if index < told["servers"]:
        os.environ |= {"TRAINING_ROLE": "PSERVER", "PADDLE_CURRENT_ENDPOINT": told["endpoints"].split(",")[index]}
        os.environ["PADDLE_TRAINERS_NUM"] = str(told["expected"])
        try:
            echelon.init()
        except SystemExit as end:
            return end.code
        raise AssertionError("a server's init() returned")
    worker = index - told["servers"]
    count = max(worker + 1, told["expected"])  # who comes late counts itself, too
    os.environ |= {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(worker), "PADDLE_TRAINERS_NUM": str(count)}
    try:
        return train(*args, **kwargs)
    finally:
        atexit._run_exitfuncs()  # as at the end of a script: the harness ends its ranks without
