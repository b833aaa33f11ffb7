"""``echelon run --servers --workers``: real servers, real workers, and what becomes of the job when one is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
from command import (
    Ended,
    command_lines,
    echelon,
    finish,
    processes_with,
    start,
    start_fresh,
    start_python,
    until,
    write,
)
from harness import free_port
from members import members

from echelon.checkpoint import Stored, find
from echelon.launcher.ps_job import StoppedProcesses
from echelon.launcher.stall_plugin import process_state

#: A worker that knows its servers, and does nothing but talk to them.
TALK = """
import json, os, signal, sys, time
import echelon
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.protocol.channel import ServerChannel
from echelon.distributed.ps_role import find_role
from echelon.base.security import Security
from echelon.strategy.sparse_update_rules import Sgd
from echelon.parameter_server.protocol.job_spec import JobSpec, TableSpec

role = find_role()
me = role.index
away = float(os.environ.get("AWAY", role.join_timeout))
own = Security.from_environment().for_loopback(role.endpoints)
links = [
    ServerChannel(endpoint, name=f"server {n}", security=own, timeout=away)
    for n, endpoint in enumerate(role.endpoints)
]

def ask(op, **head):
    return [link.call(WireMessage({"op": op, "worker": me, **head})).head for link in links]

def note(name, text=""):
    open(name + ".part", "w").write(str(text))
    os.rename(name + ".part", name)

def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.02)

def join():
    known = ask("hello", session=role.session)
    table = TableSpec(name="words", dim=2, rule=Sgd(lr=1.0))
    job = JobSpec(session=role.session, mode="async", trainers=role.workers, servers=len(links), tables=(table,))
    ask("open", job=job.to_json())
    return [(answer["opened"], answer.get("session")) for answer in known]

known = join()
"""
#: The same by ``init``, which takes torch and 1.5 s of a core.
INIT = TALK.replace("find_role()", "echelon.init() and echelon.distributed.world.current().role")


def processes(directory: Path) -> dict[str, int]:
    """The job's processes by their name ("server-0", "rank-1")."""
    return members(directory / "log")


def environment(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def gone(directory: Path) -> bool:
    return not processes_with(str(directory / "log"))


def logs(directory: Path) -> dict[str, str]:
    return {log.name: log.read_text() for log in (directory / "log").glob("*.log")}


def test_roles_find_their_environment_servers_end_with_workers(tmp_path: Path) -> None:
    """Servers and workers find what they need in their environment, and servers end with the workers."""
    write(
        tmp_path / "look.py",
        INIT + "print('words of worker', me)\n"
        "note(f'up-{me}', json.dumps({'argv': sys.argv} | dict(os.environ)))\n"
        "wait_for('seen')\nask('leave')\n",
    )
    (tmp_path / "log").mkdir()
    write(tmp_path / "log" / "server-7.log", "of an earlier, larger job")
    job = start_fresh("run", "--servers", 2, "--workers", 2, "look.py", "--lr", "1", cwd=tmp_path)
    until(lambda: len(list(tmp_path.glob("up-?"))) == 2, "both workers")
    found = processes(tmp_path)
    assert sorted(found) == ["rank-0", "rank-1", "server-0", "server-1"]
    servers = [environment(found[f"server-{n}"]) for n in range(2)]
    loaded = [Path(f"/proc/{found[f'server-{n}']}/maps").read_text() for n in range(2)]
    workers = [json.loads((tmp_path / f"up-{n}").read_text()) for n in range(2)]
    token, session = workers[0]["ECHELON_PS_TOKEN"], workers[0]["ECHELON_PS_SESSION"]
    commands = command_lines()
    state = tmp_path / "log" / f"servers-{session}"
    assert (state / "session").read_text() == session
    (tmp_path / "seen").touch()
    end = finish(job)

    assert (end.code, end.out, end.err) == (0, "words of worker 0\n", "")
    assert not [maps for maps in loaded if "libtorch" in maps]  # servers of tables alone do without
    endpoints = workers[0]["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
    assert len(set(endpoints)) == 2
    for env in workers + servers:
        assert env["PADDLE_PSERVERS_IP_PORT_LIST"].split(",") == endpoints
        assert (env["PADDLE_TRAINERS_NUM"], env["ECHELON_PS_TOKEN"]) == ("2", token)
    for n, env in enumerate(workers):
        assert (env["TRAINING_ROLE"], env["PADDLE_TRAINER_ID"], env["RANK"], env["WORLD_SIZE"]) == (
            "TRAINER",
            *f"{n}{n}2",
        )
        assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"], env["MASTER_ADDR"]) == (str(n), "2", "127.0.0.1")
        assert (env["ECHELON_RESTARTS"], env["TORCHELASTIC_RESTART_COUNT"]) == ("0", "0")
        assert env["PADDLE_TRAINER_ENDPOINTS"].split(",")[n] == env["PADDLE_CURRENT_ENDPOINT"]
        assert env["argv"] == ["look.py", "--lr", "1"]
    for n, env in enumerate(servers):
        assert (env["TRAINING_ROLE"], env["PADDLE_CURRENT_ENDPOINT"]) == ("PSERVER", endpoints[n])
    assert len(token) >= 32
    assert not [words for words in commands if token in words]
    assert sorted(logs(tmp_path)) == ["rank-0.log", "rank-1.log", "server-0.log", "server-1.log"]
    assert not [name for name, text in logs(tmp_path).items() if token in text]
    assert not state.exists()
    assert gone(tmp_path)


@pytest.mark.usefixtures("warm")
def test_killed_process_restarts_alone_and_others_stay(tmp_path: Path) -> None:
    """A server at the same endpoint, then a worker under the same id; the worker beside it stays the same process.

    At last the server is stopped and stays so, which is as good as dead."""
    write(
        tmp_path / "talk.py",
        TALK + "note(f'up-{me}-{os.environ[\"ECHELON_RESTARTS\"]}', os.getpid())\n"
        "wait_for('server-killed'); note(f'again-{me}', join() == [(True, role.session)])\n"
        "wait_for('worker-killed'); join(); ask('leave')\n",
    )
    job = start("run", "--servers", 1, "--workers", 2, "--stall", 1, "talk.py", cwd=tmp_path)
    until(lambda: len(list(tmp_path.glob("up-?-0"))) == 2, "both workers")
    before = processes(tmp_path)
    os.kill(before["server-0"], signal.SIGKILL)
    (tmp_path / "server-killed").touch()
    until(lambda: len(list(tmp_path.glob("again-?"))) == 2, "answers of the new server")
    assert [(tmp_path / f"again-{n}").read_text() for n in range(2)] == ["True"] * 2  # it knows the job
    os.kill(before["rank-1"], signal.SIGKILL)
    os.kill(processes(tmp_path)["server-0"], signal.SIGSTOP)
    until((tmp_path / "up-1-1").exists, "the new worker")
    after = processes(tmp_path)
    (tmp_path / "worker-killed").touch()
    end = finish(job)
    assert end.code == 0, end.err
    assert end.err.splitlines() == [
        "echelon: restarting server 0 (restart 1 of 3) because it was killed by SIGKILL",
        "echelon: restarting worker 1 (restart 1 of 3) because it was killed by SIGKILL",
        "echelon: restarting server 0 (restart 2 of 3) because it stood still for 1 s (stopped by SIGSTOP)",
    ]
    assert after["rank-0"] == before["rank-0"]
    assert after["rank-1"] != before["rank-1"]
    assert after["server-0"] != before["server-0"]
    assert not (tmp_path / "up-0-1").exists()
    written = logs(tmp_path)
    assert "----- restart 2 -----" in written["server-0.log"]
    assert "----- restart 1 -----" in written["rank-1.log"]
    assert "restart" not in written["rank-0.log"]


def test_only_a_process_that_stays_stopped_is_overdue() -> None:
    watch, sleeper = StoppedProcesses(0.3), subprocess.Popen(["sleep", "600"])
    try:
        sleeper.send_signal(signal.SIGSTOP)
        until(lambda: process_state(sleeper.pid) == "T", "the stop")
        assert watch.overdue([sleeper.pid]) == []
        sleeper.send_signal(signal.SIGCONT)
        until(lambda: process_state(sleeper.pid) == "S", "its going on")
        time.sleep(0.4)
        assert watch.overdue([sleeper.pid]) == []
        sleeper.send_signal(signal.SIGSTOP)
        until(lambda: process_state(sleeper.pid) == "T", "the second stop")
        assert watch.overdue([sleeper.pid]) == []  # counted from here
        until(lambda: watch.overdue([sleeper.pid]) == [sleeper.pid], "the end of our patience")
        assert StoppedProcesses(0.0).overdue([sleeper.pid]) == []
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.usefixtures("warm")
def test_bound_workers_restart_together_at_another_port(tmp_path: Path) -> None:
    """Workers bound by a process group are restarted together, with a new port to meet at."""
    write(
        tmp_path / "bound.py",
        INIT + "import torch, torch.distributed as dist\n"
        "first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "echelon.distributed.world.bind()\n"
        "mine = torch.tensor([10.0 ** me]); dist.all_reduce(mine)\n"
        "if first and me == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if first: dist.all_reduce(mine)\n"
        "print(mine.item(), os.environ['ECHELON_RESTARTS'], os.environ['MASTER_PORT'])\n"
        "ask('leave')\n",
    )
    end = echelon("run", "--servers", 1, "--workers", 2, "bound.py", cwd=tmp_path)
    assert end.code == 0, end.err
    assert end.err.splitlines() == [
        "echelon: restarting all workers (restart 1 of 3) because worker 1 was killed by SIGKILL"
    ]
    total, restarts, _ = end.out.split()
    assert (total, restarts) == ("11.0", "1")
    assert logs(tmp_path)["rank-1.log"].splitlines() == ["----- restart 1 -----", end.out.strip()]


def blamed(end: Ended) -> str:
    """The first line that is not about a restart, without where it was."""
    line = next(line for line in end.err.splitlines() if "restarting" not in line)
    return re.sub(rf" \(host {re.escape(socket.gethostname())}, pid \d+\)", "", line).removeprefix("echelon: ")


@pytest.mark.parametrize("role", ["worker", "server"])
def test_restarts_used_up_names_first_failure_and_ends_all(tmp_path: Path, role: str) -> None:
    """When the restarts are used up, the first process to fail is named and all processes end."""
    fail = "if os.environ['RANK'] == '1': raise ValueError('labels out of range')\n" if role == "worker" else ""
    write(tmp_path / "train.py", f"import os, time\n{fail}time.sleep(600)\n")
    options = ["--servers", 1, "--workers", 2, "--max-restarts", 1 if role == "worker" else 0]
    job = start("run", *options, "train.py", cwd=tmp_path)
    if role == "server":
        until(lambda: len(processes(tmp_path)) == 3, "all processes")
        os.kill(processes(tmp_path)["server-0"], signal.SIGKILL)
    end = finish(job)
    lines = end.err.splitlines()
    if role == "worker":
        why = "it raised ValueError: labels out of range"
        assert lines[0] == f"echelon: restarting worker 1 (restart 1 of 1) because {why}"
        assert blamed(end) == "worker 1 of 2 raised ValueError: labels out of range"
        assert lines[2] == "Traceback (most recent call last):"
        assert end.code == 1
    else:
        assert blamed(end) == "server 0 of 1 was killed by SIGKILL"
        assert end.code == 128 + signal.SIGKILL
    log = "rank-1" if role == "worker" else "server-0"
    assert f"echelon: its log is {tmp_path}/log/{log}.log" in lines
    assert gone(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_launcher_leaves_neither_servers_nor_workers(tmp_path: Path, number: signal.Signals) -> None:
    write(tmp_path / "sleep.py", "import time\ntime.sleep(600)\n")
    job = start("run", "--servers", 1, "--workers", 2, "sleep.py", cwd=tmp_path)
    until(lambda: len(processes(tmp_path)) == 3, "all processes")
    job.send_signal(number)
    if number == signal.SIGKILL:
        until(lambda: gone(tmp_path), "the end of all processes")
        job.communicate()
        return
    end = finish(job)
    assert gone(tmp_path)
    assert end.code == 128 + number
    assert end.err == f"echelon: stopped by {number.name}; no process is left\n"
    assert not list((tmp_path / "log").glob("servers-*"))


LEAVE = """
import torch
import echelon
echelon.init(seed=0)
net = torch.nn.Linear(2, 1)
torch.nn.init.constant_(net.weight, 0.5); torch.nn.init.constant_(net.bias, 0.0)
engine = echelon.distribute(
    net, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
    strategy=echelon.Strategy(ps="sync"), checkpoint=echelon.Checkpoint(dir="ckpt"), log=echelon.Log(console=False),
)
while True:
    engine.step(torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0]]))
    open(f"up-{engine.world.rank}", "w").close()
"""


@pytest.mark.usefixtures("warm")
def test_launcher_asked_to_leave_lets_workers_save_via_servers(tmp_path: Path) -> None:
    """The saved weights are those of one process after as many steps: all workers see the same sample."""
    write(tmp_path / "train.py", LEAVE)
    job = start("run", "--servers", 1, "--workers", 2, "train.py", cwd=tmp_path)
    until(lambda: len(list(tmp_path.glob("up-?"))) == 2, "both workers")
    job.send_signal(signal.SIGUSR1)
    end = finish(job)
    assert (end.code, end.err) == (
        75,
        "echelon: stopped by SIGUSR1 after saving; exit code 75 requests a restart\n",
    )
    assert gone(tmp_path)
    saved = Stored(find(tmp_path / "ckpt"))
    alone = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(alone.weight, 0.5)
    torch.nn.init.constant_(alone.bias, 0.0)
    sgd = torch.optim.SGD(alone.parameters(), lr=0.01)
    for _ in range(saved.step):
        sgd.zero_grad()
        torch.nn.functional.mse_loss(alone(torch.tensor([[1.0, -2.0]])), torch.tensor([[3.0]])).backward()
        sgd.step()
    torch.testing.assert_close(saved.read("model.weight"), alone.weight.data)


def test_workers_that_left_by_themselves_are_not_started_again(tmp_path: Path) -> None:
    write(tmp_path / "left.py", "import os\nraise SystemExit(75 if os.environ['RANK'] == '1' else 0)\n")
    elsewhere = ["--pservers", f"127.0.0.1:{free_port()}", "--servers", 0, "--trainers", 2, "--workers", 2]
    end = echelon("run", *elsewhere, "left.py", cwd=tmp_path)
    assert end.code == 75
    assert end.err == f"echelon: host {socket.gethostname()} has saved and requests a restart\n"


@pytest.mark.usefixtures("warm")
def test_missing_server_is_named_after_join_timeout(tmp_path: Path) -> None:
    write(tmp_path / "talk.py", TALK)
    port = free_port()
    options = ["--pservers", f"127.0.0.1:{port}", "--servers", 0, "--trainers", 1, "--join-timeout", 1]
    end = echelon("run", *options, "talk.py", cwd=tmp_path)
    assert blamed(end).startswith(
        f"worker 0 of 1 raised PeerLost: server 0 at 127.0.0.1:{port} has not answered for 1 s"
    )
    assert "restarting" not in end.err
    assert end.code == 1


#: Make a step, then wait for the weights of the next one: for all other workers.
WAIT = """
import numpy as np
ids, rows = np.empty(0, np.int64), np.empty(0, np.float32)
push = {"op": "push", "seq": 0, "weight": 1.0, "version": 0, "kind": "gradient", "has": ["ids", "rows"]}
pull = {"op": "pull", "step": 1, "dense": False, "commit": None, "peek": False, "state": False}
for head, arrays in (({**push, "commit": True}, [ids, rows]), (pull, [ids])):
    links[0].call(WireMessage({"worker": me, "tables": {}, **head}, arrays))
"""


@pytest.mark.usefixtures("warm")
def test_missing_worker_is_named_after_join_timeout(tmp_path: Path) -> None:
    """Worker 0, which waits for it in a pull, is not blamed: the server tells it why it ends. Both are said in time."""
    write(
        tmp_path / "talk.py",
        "import os, time\nif os.environ['RANK'] == '1': time.sleep(600)\n" + TALK.replace('"async"', '"sync"') + WAIT,
    )
    options = ["--servers", 1, "--workers", 2, "--join-timeout", 5]
    end = echelon("run", *options, "talk.py", cwd=tmp_path, AWAY="60", ECHELON_WAIT_NOTICE="1.2")
    lines = end.err.splitlines()
    notice = r"echelon: ps: server 0 has waited \d s for worker 1 to call echelon.distribute\(\); it gives up after 5 s"
    assert [line for line in lines if re.fullmatch(notice, line)]
    ended = Ended(end.code, end.out, "\n".join(line for line in lines if " ps: " not in line))
    cause = "server 0 has waited 5 s for worker 1; start it, or fewer with trainers="
    assert blamed(ended) == f"server 0 of 1 raised PeerLost: {cause}"
    assert "restarting" not in end.err
    assert end.code == 1
    assert gone(tmp_path)


def test_first_cause_that_ends_after_its_echo_is_blamed(tmp_path: Path) -> None:
    """Worker 0 has lost contact with worker 1, whose own end takes longer: worker 1 is the one to name."""
    write(
        tmp_path / "late.py",
        "import os, time\nfrom echelon.base.errors import PeerLost\n"
        "if os.environ['RANK'] == '0': raise PeerLost('worker 1 does not answer')\n"
        "time.sleep(4.5)\nraise ValueError('labels out of range')\n",
    )
    end = echelon("run", "--servers", 1, "--workers", 2, "--max-restarts", 0, "late.py", cwd=tmp_path)
    assert blamed(end) == "worker 1 of 2 raised ValueError: labels out of range"
    assert gone(tmp_path)


def test_a_servers_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    write(tmp_path / "any.py", "")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        end = echelon("run", "--pservers", where, "--trainers", 1, "any.py", cwd=tmp_path)
    why = "the port is in use by another program; choose a free one, the same in every list of servers"
    assert (end.code, end.err) == (2, f"echelon: endpoint {where}: {why}\n")
    assert not list((tmp_path / "log").glob("*.log"))


@pytest.mark.usefixtures("warm")
def test_two_hosts_share_their_servers(tmp_path: Path) -> None:
    """One launcher brings both servers and worker 0, which ends first; the servers stay for the other's worker 1."""
    write(
        tmp_path / "talk.py",
        TALK + "note(f'up-{me}'); wait_for('up-0'); wait_for('up-1')\n"
        "if me == 1: wait_for('first-left')\n"
        "ask('leave')\n",
    )
    endpoints = [f"127.0.0.{host}:{free_port()}" for host in (1, 2)]
    secret = {"ECHELON_PS_TOKEN": "the-same-on-both", "ECHELON_PS_SESSION": "both"}
    common = ["--pservers", ",".join(endpoints), "--trainers", 2]
    here = start("run", *common, "--trainer-id-from", 0, "talk.py", cwd=tmp_path, **secret)
    there = start(
        "run", *common, "--servers", 0, "--trainer-id-from", 1, "--log-dir", "there", "talk.py", cwd=tmp_path, **secret
    )
    until(lambda: (tmp_path / "up-0").exists() and "rank-0" not in processes(tmp_path), "the end of worker 0")
    assert sorted(processes(tmp_path)) == ["server-0", "server-1"]
    (tmp_path / "first-left").touch()
    ends = finish(here), finish(there)
    assert [(end.code, end.err) for end in ends] == [(0, ""), (0, "")]
    assert sorted(logs(tmp_path)) == ["rank-0.log", "server-0.log", "server-1.log"]


def test_one_script_is_worker_or_server_as_it_is_told(tmp_path: Path) -> None:
    """No launcher: a server by 'echelon serve', one by the script itself, a worker by the script with arguments."""
    endpoints = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    listed = ",".join(endpoints)
    write(tmp_path / "talk.py", INIT.replace("init()", f"init(pservers='{listed}')") + "ask('leave'); print('left')\n")
    server = {"TRAINING_ROLE": "PSERVER", "PADDLE_CURRENT_ENDPOINT": endpoints[1]}
    started = [
        start("serve", "--endpoint", endpoints[0], "--pservers", listed, cwd=tmp_path),
        start_python("talk.py", cwd=tmp_path, **server),
        start_python("talk.py", cwd=tmp_path),
    ]
    told = [finish(process) for process in started]
    assert [(end.code, end.err) for end in told] == [(0, "")] * 3
    assert [end.out for end in told] == [
        f"echelon: server 0 of 2 is ready at {endpoints[0]}\n",
        f"echelon: server 1 of 2 is ready at {endpoints[1]}\n",
        "left\n",
    ]


@pytest.mark.usefixtures("warm")
def test_next_job_goes_on_from_state_of_stopped_job(tmp_path: Path) -> None:
    write(
        tmp_path / "talk.py",
        TALK + "if not os.path.exists('up'): note('up', role.session); time.sleep(600)\n"
        "note('known', known); ask('leave')\n",
    )
    job = start("run", "--servers", 1, "talk.py", cwd=tmp_path)
    until((tmp_path / "up").exists, "the worker")
    job.send_signal(signal.SIGINT)
    stopped = finish(job)
    lines = stopped.err.splitlines()
    assert gone(tmp_path)
    assert stopped.code == 128 + signal.SIGINT
    state = tmp_path / "log" / f"servers-{(tmp_path / 'up').read_text()}"
    assert lines[0] == "echelon: stopped by SIGINT; no process is left"
    assert lines[1] == f"echelon: the servers' state is in {state}; to go on from it, add --state {state}"
    end = echelon("run", "--servers", 1, "--state", state, "talk.py", cwd=tmp_path)
    assert end.code == 0, end.err
    assert (tmp_path / "known").read_text() == str([(True, (tmp_path / "up").read_text())])
    assert state.exists()
