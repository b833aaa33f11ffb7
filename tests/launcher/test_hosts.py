"""Several hosts: two launchers on this machine meet at a loopback port."""

import re
import socket
import threading
import time

import pytest
from command import Ended, echelon, finish, start, until, write
from harness import free_port

from echelon.base.auth_proxy import serve_store
from echelon.base.errors import PeerLost, UsageError
from echelon.base.network import answers
from echelon.launcher.job import check
from echelon.launcher.rendezvous import open_rendezvous
from echelon.launcher.rendezvous.handler import STORE_TIMEOUT
from echelon.launcher.rendezvous.messages import (
    JoinRequest,
    RendezvousHost,
    RoundMembers,
    RoundOutcome,
    check_same_nnodes,
    host_failure,
    order_elastic_hosts,
    order_hosts,
)
from echelon.launcher.rendezvous.open_rendezvous import MasterEndpoints
from echelon.launcher.rendezvous.store_client import RoundStore, StoreClient, StoreLost
from echelon.launcher.run_options import RunOptions


def host(name, *, node_rank=None, serves=False, address="10.0.0.9", hosts="3"):
    return RendezvousHost(name, name, address, (), hosts, node_rank, serves)


@pytest.mark.usefixtures("warm")
def test_hosts_are_ordered_by_node_rank_and_not_by_arrival(tmp_path):
    write(
        tmp_path / "where.py",
        "import os, torch, torch.distributed as dist, echelon\n"
        "echelon.init()\n"
        "mine = torch.tensor([10.0 ** echelon.rank()]); dist.all_reduce(mine)\n"
        "print(echelon.node_rank(), echelon.rank(), mine.item(), os.environ['PADDLE_TRAINER_ENDPOINTS'], "
        "os.environ['PADDLE_NUM_TRAINERS'])\n",
    )
    common = ["--nnodes", 2, "--master", f"127.0.0.1:{free_port()}", "--join-timeout", 30]
    cpu = {"CUDA_VISIBLE_DEVICES": ""}  # these two hosts would share their GPUs
    second = start("run", *common, "--node-rank", 1, "--procs", 1, "where.py", cwd=tmp_path, **cpu)
    first = start("run", *common, "--node-rank", 0, "--procs", 2, "where.py", cwd=tmp_path, **cpu)
    ends = finish(first), finish(second)
    assert [end.code for end in ends] == [0, 0], ends
    found = [(tmp_path / "log" / f"rank-{n}.log").read_text().split() for n in range(3)]
    assert [line[:3] for line in found] == [["0", "0", "111.0"], ["0", "1", "111.0"], ["1", "2", "111.0"]]
    assert len({line[3] for line in found}) == 1
    assert {line[4] for line in found} == {"2"}  # hosts
    assert len(set(found[0][3].split(","))) == 3
    assert ends[0].out.split() == found[0]  # rank 0 speaks at its own host
    assert ends[1].out == ""


def test_failure_on_one_host_is_named_on_both_and_restarts_both(tmp_path):
    write(
        tmp_path / "fail.py",
        "import os, time\n"
        "if os.environ['RANK'] == '1': raise KeyError(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "time.sleep(600)\n",
    )
    words = ["--nnodes", 2, "--master", f"127.0.0.1:{free_port()}", "--max-restarts", 1, "--procs", 1, "fail.py"]
    ends = [finish(launcher) for launcher in [start("run", *words, cwd=tmp_path) for _ in range(2)]]
    for end in ends:
        lines = end.err.splitlines()
        assert lines[0] == "echelon: restarting all ranks (restart 1 of 1) because rank 1 raised KeyError: '0'"
        assert lines[1].startswith("echelon: rank 1 of 2 (host ")
        assert lines[1].endswith("raised KeyError: '1'")
        assert lines[2] == "Traceback (most recent call last):"
        assert end.code == 1


def wait_lines(err: str) -> list[str]:
    """Return the lines of a launcher that waits, each once: how long it has waited depends on the machine."""
    return list(dict.fromkeys(re.sub(r"waited \d s", "waited N s", err).splitlines()))


def test_a_missing_host_is_told_after_a_bounded_wait(tmp_path):
    write(tmp_path / "any.py", "")
    words = ["--nnodes", 3, "--master", f"127.0.0.1:{free_port()}", "--join-timeout", 2, "any.py"]
    here = echelon("run", *words, cwd=tmp_path, ECHELON_WAIT_NOTICE="0.4")
    waits = "echelon: launcher: this launcher has waited N s for {}; it gives up after 2 s"
    assert wait_lines(here.err) == [
        waits.format(
            f"2 of 3 hosts to come to {words[3]} (here: {socket.gethostname()}); start the same command there"
        ),
        f"echelon: 1 of 3 hosts came to {words[3]} within 2 s ({socket.gethostname()}); "
        "start the same command on the others, or give --join-timeout",
    ]
    away = echelon("run", "--node-rank", 1, *words, cwd=tmp_path, ECHELON_WAIT_NOTICE="0.4")
    waited, gave_up = wait_lines(away.err)
    assert waited == waits.format(f"--master {words[3]} to answer; start the same command on that host")
    assert gave_up.startswith(f"echelon: 1 of 3 hosts came: --master {words[3]} has not answered for 2 s")
    assert (here.code, away.code) == (1, 1)


def test_stopping_one_host_stops_the_other(tmp_path):
    write(tmp_path / "sleep.py", "import os, time\nopen('up-' + os.environ['RANK'], 'w')\ntime.sleep(600)\n")
    words = ["--nnodes", 2, "--master", f"127.0.0.1:{free_port()}", "--procs", 1, "sleep.py"]
    stopped, other = [start("run", *words, cwd=tmp_path) for _ in range(2)]
    until(lambda: len(list(tmp_path.glob("up-*"))) == 2, "both ranks")
    stopped.terminate()
    ends = finish(stopped), finish(other)
    assert [end.code for end in ends] == [143, 143]
    assert ends[0].err == "echelon: stopped by SIGTERM; no process is left\n"
    assert ends[1].err == f"echelon: host {socket.gethostname()} was stopped by SIGTERM\n"


def test_a_launcher_that_waits_for_others_is_stopped_in_one_line(tmp_path):
    write(tmp_path / "any.py", "")
    port = free_port()
    waiting = start("run", "--nnodes", 2, "--master", f"127.0.0.1:{port}", "any.py", cwd=tmp_path)
    until(lambda: answers("127.0.0.1", port, timeout=1.0), "the launcher")
    time.sleep(0.5)
    waiting.terminate()
    assert finish(waiting) == Ended(143, "", "echelon: stopped by SIGTERM; no process is left\n")


def test_launcher_that_just_claimed_the_port_is_waited_for(tmp_path, monkeypatch):
    """On a busy machine seconds may go by until it serves there."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "any.py", "")
    port, served = free_port(), []
    options = RunOptions("any.py", procs=1, nnodes="2", master=f"127.0.0.1:{port}", join_timeout=30.0)
    with socket.socket(socket.AF_UNIX) as sign:
        sign.bind(f"\0echelon-rendezvous-{port}")

        def late():
            time.sleep(1.5)
            served.append(serve_store("127.0.0.1", port, None, STORE_TIMEOUT))

        other = threading.Thread(target=late)
        other.start()
        meeting = MasterEndpoints(check(options))()
        other.join()
    assert not meeting.serves
    meeting.store.set("key", "value")
    assert served[0][0].get("key") == b"value"


def test_launcher_alone_at_its_store_finds_the_job(tmp_path, monkeypatch):
    """A cut link has left it alone: it goes to a later place that answers, to an earlier one if a round runs there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(open_rendezvous, "ELSEWHERE", 1.0)
    write(tmp_path / "any.py", "")
    ports = free_port(), free_port()
    masters = ",".join(f"127.0.0.1:{port}" for port in ports)
    alone = MasterEndpoints(check(RunOptions("any.py", procs=1, nnodes="2", master=masters)))
    own = alone()
    assert own.serves
    assert not alone.has_moved()
    later, _ = serve_store("127.0.0.1", ports[1], None, STORE_TIMEOUT)
    with socket.socket(socket.AF_UNIX) as sign:  # of the launcher there
        sign.bind(f"\0echelon-rendezvous-{ports[1]}")
        until(alone.has_moved, "the later place")
        there = alone()
    assert (there.serves, there.where) == (False, f"127.0.0.1:{ports[1]}")
    time.sleep(1.0)
    assert not alone.has_moved()
    own.store.set("round", "3")
    own.store.set("round-3/members", "{}")
    until(alone.has_moved, "the running round at the earlier place")
    del later


def test_closed_client_ends_the_store_that_it_serves():
    store, port = serve_store("127.0.0.1", 0, None, STORE_TIMEOUT)
    client = StoreClient(store, "here", 5.0)
    board = RoundStore(client, "board/", 5.0)
    del store
    board.set("key", "value")
    assert answers("127.0.0.1", port, timeout=1.0)
    client.close()
    until(lambda: not answers("127.0.0.1", port, timeout=1.0), "the end of the store")
    with pytest.raises(StoreLost):
        board.get("key")


def test_a_port_in_use_is_one_line(tmp_path):
    write(tmp_path / "any.py", "")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        end = echelon("run", "--nnodes", 2, "--master", where, "any.py", cwd=tmp_path)
    assert end.err == (
        f"echelon: --master {where}: the port is in use on this host by another program; "
        "choose another, the same on every host\n"
    )
    assert end.code == 2


def test_order_without_node_ranks_server_first_then_by_address():
    """Without node ranks the host that serves the rendezvous comes first, the others by address."""
    cards = [host("b", address="10.0.0.2"), host("c", address="10.0.0.3", serves=True), host("a", address="10.0.0.1")]
    assert [card.name for card in order_hosts(cards)] == ["c", "a", "b"]


def test_given_node_ranks_are_kept_and_the_others_fill_the_gaps():
    cards = [host("b"), host("last", node_rank=2), host("c", serves=True)]
    assert [card.name for card in order_hosts(cards)] == ["c", "b", "last"]


def test_hosts_that_contradict_one_another_are_named():
    with pytest.raises(UsageError, match="--node-rank 1 was given on two hosts, a and b"):
        order_hosts([host("a", node_rank=1), host("b", node_rank=1), host("c")])
    with pytest.raises(UsageError, match="a says --nnodes 2, b says --nnodes 3"):
        check_same_nnodes([host("a", hosts="2"), host("b", hosts="3")])


def test_elastic_order_members_keep_places_joiners_come_last():
    """In an elastic job the hosts of the last round keep their places, and joining hosts come after them."""
    came = [
        JoinRequest(4, host("joiner", address="10.0.0.1")),
        JoinRequest(4, host("third", serves=True), place=2, number=3),
        JoinRequest(4, host("first", address="10.0.0.8"), place=0, number=3),
    ]
    assert [card.name for card in order_elastic_hosts(came)] == ["first", "third", "joiner"]


def test_launcher_messages_survive_json_and_others_are_refused():
    """Messages between launchers are JSON and come back unchanged; anything else raises PeerLost."""
    card = RendezvousHost("t", "n", "10.0.0.1", ("10.0.0.1:5",), "2:8", None, True, {"memory": "10.0.0.1:7"})
    arrival, lineup = JoinRequest(3, card, 1, 2, 1), RoundMembers((card, card), 4, 2)
    verdict = RoundOutcome(host_failure("b", "was lost", 1), True, "lost", counted=False)
    for said in (arrival, lineup, verdict):
        assert type(said).from_json(said.to_json().encode()) == said
    for text in (b"", b"[]", b"{}", b'{"round": "x"}', b'{"cause": "whim"}'):
        for kind in (JoinRequest, RoundMembers, RoundOutcome):
            with pytest.raises(PeerLost, match="the store of this job has a message from another program"):
                kind.from_json(text)
