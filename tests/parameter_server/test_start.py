"""The start of a job with servers: a server killed before it held anything, one that is not there, one that ends."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting_server import free_endpoint
from harness import Died, free_port, run, run_raw
from serving import RANKS
from serving_process import ServerProcess

import echelon
from echelon.base.errors import EchelonError, PeerLost
from echelon.parameter_server.protocol.channel import ServerChannel
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.worker import session
from echelon.parameter_server.worker.client import ParameterServerClient

STEPS = 4


def train() -> list[float]:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    engine = echelon.distribute(
        net,
        loss=F.mse_loss,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        strategy=echelon.Strategy(ps=echelon.ParameterServer(timeout=60.0)),
        log=echelon.Log(console=False),
    )
    data = torch.arange(STEPS * 6, dtype=torch.float32).reshape(STEPS, 2, 3) / 10
    losses = [float(engine.step(batch, batch.sum(1, keepdim=True))) for batch in data]
    engine.close()
    return losses


def be_worker(endpoint: str, workers: int = 1, join: float = 60.0) -> None:
    for name in RANKS:
        os.environ.pop(name, None)
    os.environ |= {"PADDLE_PSERVERS_IP_PORT_LIST": endpoint, "TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "0"}
    os.environ |= {"PADDLE_TRAINERS_NUM": str(workers), "ECHELON_PS_JOIN_TIMEOUT": str(join)}
    echelon.init(seed=0)


def train_with_break(endpoint: str, before: str, mark: Path) -> Any:
    """Train, but stop before the client's call ``before`` until the file ``mark`` is gone again."""

    def stop() -> None:
        mark.touch()
        while mark.exists():
            time.sleep(0.02)

    class Breakpoint(ParameterServerClient):
        def open(self) -> None:
            stop() if before == "open" else None
            super().open()

        def begin(self, dense: Any) -> None:
            stop() if before == "begin" else None
            super().begin(dense)
            stop() if before == "step" else None

    session.ParameterServerClient = Breakpoint  # type: ignore[misc]
    be_worker(endpoint)
    try:
        return train()
    except PeerLost as error:
        return str(error)


@pytest.mark.parametrize("before", ["open", "begin", "step"])
def test_a_server_killed_before_it_held_anything_is_filled_again(tmp_path: Path, before: str) -> None:
    """It keeps nothing on a disk, so it comes back empty. One that had the first values ends the job."""
    endpoint, mark = free_endpoint(), tmp_path / "stopped"
    command = ["--pservers", endpoint, "--endpoint", endpoint, "--trainers", "1"]
    server = ServerProcess(command, tmp_path / "log")
    started: list[ServerProcess] = [server]

    def kill() -> None:
        while not mark.exists():
            time.sleep(0.02)
        server.kill()
        started.append(ServerProcess(command, tmp_path / "log"))
        mark.unlink()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    (got,) = run(train_with_break, endpoint, before, mark, ranks=1)
    killer.join()
    if before == "step":
        assert got.startswith("server 0 has restarted without its state (its journal is off or lost)")
        started[1].kill()
        return
    if not isinstance(got, list):
        started[1].kill()
    assert isinstance(got, list), got
    assert started[1].wait() == 0
    (alone,) = run(train, ranks=1)
    assert got == pytest.approx(alone, rel=1e-6)


def fail_to_start(endpoint: str) -> tuple[str, str]:
    """Return the line of a worker that finds no server, and what it printed before and while it ended."""
    os.environ["ECHELON_WAIT_NOTICE"] = "0.3"
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        be_worker(endpoint, join=0.8)
        with pytest.raises(PeerLost) as caught:
            train()
        atexit._run_exitfuncs()
    return str(caught.value), re.sub(r"waited \d+ s", "waited N s", printed.getvalue())


def test_a_worker_without_its_server_names_it_and_ends_in_time() -> None:
    """In time for the job, not for ``ParameterServer.timeout``, and without a traceback of ours."""
    endpoint = free_endpoint()
    ((line, printed),) = run(fail_to_start, endpoint, ranks=1, timeout=60.0)  # ParameterServer.timeout is 120
    where = f"server 0 at {endpoint}"
    assert line == (
        f"{where} has not answered within 0.8 s (nothing listens there); start it, or give it more time by "
        "--join-timeout or ECHELON_PS_JOIN_TIMEOUT"
    )
    notice = f"worker 0 of 1 has waited N s for {where} (nothing listens there); it gives up after 0.8 s"
    assert printed == f"echelon: ps: {notice}; start the missing processes\n"


def test_another_program_at_server_port_is_told_from_a_server() -> None:
    with socket.socket() as silent, socket.socket() as http:
        for one in (silent, http):
            one.bind(("127.0.0.1", 0))
            one.listen()

        def answer() -> None:
            caller, _ = http.accept()
            caller.recv(100)
            caller.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            time.sleep(0.2)
            caller.close()

        threading.Thread(target=answer, daemon=True).start()
        links = [  # the one that answers is told apart at once: it will not become a server
            ServerChannel("{}:{}".format(*one.getsockname()), join=join, name="server 0")
            for one, join in ((silent, 1.0), (http, 60.0))
        ]
        with pytest.raises(
            EchelonError, match=r"^server 0 at .* is no parameter server: another program has that port"
        ):
            links[1].call(WireMessage({"op": "hello"}))
        with pytest.raises(
            PeerLost,
            match=r"has not answered within 1 s \(the program that listens there does not answer: it",
        ):
            links[0].call(WireMessage({"op": "hello"}))
        for link in links:
            link.close()


def be_script(endpoint: str) -> Any:
    """One script in both roles: rank 0 is the server, rank 1 the one worker of two that comes."""
    if os.environ["RANK"] == "0":
        os.environ |= {"TRAINING_ROLE": "PSERVER", "PADDLE_CURRENT_ENDPOINT": endpoint, "PADDLE_TRAINERS_NUM": "2"}
        os.environ |= {"PADDLE_PSERVERS_IP_PORT_LIST": endpoint, "ECHELON_PS_JOIN_TIMEOUT": "5"}
        echelon.init()
        raise AssertionError("a server's init() returned")
    os.environ["ECHELON_WAIT_NOTICE"] = "0.5"
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        be_worker(endpoint, workers=2)
        with pytest.raises(PeerLost) as caught:
            train()
    told = time.monotonic()
    host, _, port = endpoint.partition(":")
    with contextlib.suppress(OSError):
        while time.monotonic() - told < 30.0:  # our links to it are open still
            socket.create_connection((host, int(port)), timeout=1.0).close()
            time.sleep(0.05)
    return str(caught.value), printed.getvalue(), time.monotonic() - told


def test_server_in_script_role_ends_at_once_and_tells_worker_why() -> None:
    server, (line, printed, seconds) = run_raw(be_script, free_endpoint(), ranks=2)
    assert server == Died(1)
    assert line == "server 0 has waited 5 s for worker 1; start it, or fewer with trainers="
    assert "worker 0 of 2 has waited" in printed
    assert "for worker 1 to call echelon.distribute(); it gives up after 60 s; start the missing processes\n" in printed
    assert seconds < 30.0  # it is gone, and was not waited for


def bind_alone(endpoint: str) -> str:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    be_worker(endpoint, workers=2, join=6.0)
    with pytest.raises(PeerLost) as caught:
        echelon.distributed.world.bind()
    return str(caught.value)


def test_a_worker_that_waits_to_be_bound_is_not_the_missing_one(tmp_path: Path) -> None:
    """It meets the other workers before it opens the job, and the server knows that it is there."""
    endpoint = free_endpoint()
    command = ["--pservers", endpoint, "--endpoint", endpoint, "--trainers", "2", "--join-timeout", "5"]
    server = ServerProcess(command, tmp_path / "log")
    (line,) = run(bind_alone, endpoint, ranks=1)
    assert line.startswith("rank 0 has waited 6 s, but of 2 processes these have not joined: rank 1")
    assert server.wait() == 1
    assert server.lines()[-1] == "echelon: server 0 has waited 5 s for worker 1; start it, or fewer with trainers="
