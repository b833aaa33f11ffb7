"""Jobs whose hosts come and go: several launchers on this machine meet at a loopback port. Ranks import no torch."""

import json
import os
import signal
import socket

import pytest
from command import echelon, finish, processes_with, start, until, write
from harness import free_port

from echelon.base import network
from echelon.launcher.failure import Failure
from echelon.launcher.rendezvous.handler import LauncherRendezvous
from echelon.launcher.rendezvous.messages import RendezvousConfig
from echelon.launcher.rendezvous.open_rendezvous import HomeStore
from echelon.launcher.rendezvous.participant import RendezvousParticipant

HERE = socket.gethostname()

START = """
import json, os, signal, sys, time
env = os.environ
round_, rank = env['TORCHELASTIC_RESTART_COUNT'], env['RANK']
"""
#: Leaves with 75 when it is asked to, as a script does that is distributed by Echelon.
LEAVES = """
def leave(*_):
    open(f'left-{round_}-{rank}', 'w').close()
    sys.exit(75)
signal.signal(signal.SIGTERM, leave)
open(os.path.join(env['ECHELON_LEAVE_MARK'], f'rank-{rank}'), 'w').close()
"""
#: Writes who it is in which round.
TELL = """
mine = {'who': env['WHO'], 'world': int(env['WORLD_SIZE']), 'pid': os.getpid(), 'elastic': env.get('ECHELON_ELASTIC')}
with open(f'part-{round_}-{rank}', 'w') as file:
    json.dump(mine, file)
os.rename(f'part-{round_}-{rank}', f'up-{round_}-{rank}')
"""
WAIT = "while not os.path.exists('done'): time.sleep(0.02)\n"


class Job:
    """Its launchers by name, and what their ranks wrote."""

    def __init__(self, directory, script, *options):
        write(directory / "work.py", script)
        self.directory, self.options, self.launchers = directory, [*options, "--procs", 1], {}

    def start(self, *names):
        for name in names:
            words = ["run", *self.options, "work.py", f"{self.directory}"]
            self.launchers[name] = start(*words, cwd=self.directory, WHO=name)

    def start_first(self, name, place):
        """The first to come is the one that serves the rendezvous."""
        self.start(name)
        host, port = place.split(":")
        until(lambda: network.answers(host, int(port), timeout=1.0), "the rendezvous")

    def at(self, round_, *names):
        """Wait until the ranks of this round are these hosts', in this order."""
        found = [self.directory / f"up-{round_}-{rank}" for rank in range(len(names))]
        until(lambda: all(path.exists() for path in found), f"round {round_} of {names}")
        records = [json.loads(path.read_text()) for path in found]
        assert [rank["who"] for rank in records] == list(names)
        assert {rank["world"] for rank in records} == {len(names)}
        return records

    def kill(self, name):
        launcher = self.launchers.pop(name)
        launcher.kill()
        launcher.communicate()

    def done(self):
        (self.directory / "done").touch()

    def end(self, name):
        return finish(self.launchers.pop(name))

    def nothing_left(self):
        until(lambda: not processes_with(str(self.directory)), "the end of all processes")


def at():
    return f"127.0.0.1:{free_port()}"


def test_hosts_join_and_are_lost_and_leave_and_the_others_go_on(tmp_path):
    job = Job(
        tmp_path, START + TELL + WAIT, "--nnodes", "1:3", "--master", at(), "--last-call", 0.2, "--host-timeout", 3
    )
    job.start("a")
    assert job.at(0, "a")[0]["elastic"] == "1:3"
    job.start("b")
    job.at(1, "a", "b")
    job.start("c")
    records = job.at(2, "a", "b", "c")
    job.kill("b")
    job.at(3, "a", "c")
    assert not any(os.path.exists(f"/proc/{rank['pid']}") for rank in records)
    job.launchers["c"].terminate()
    left = job.end("c")
    job.at(4, "a")
    job.done()
    end = job.end("a")
    assert (left.code, end.code) == (143, 0)
    lost = f"host {HERE} was lost (no heartbeat for 3 s; is it up?)"
    assert end.err.splitlines() == [
        f"echelon: host {HERE} joined: going on with 2 hosts (2 ranks)",
        f"echelon: host {HERE} joined: going on with 3 hosts (3 ranks)",
        f"echelon: {lost}: going on with 2 hosts (2 ranks)",
        f"echelon: host {HERE} was stopped by SIGTERM: going on with 1 host (1 rank)",
    ]
    assert left.err.splitlines()[:2] == [end.err.splitlines()[1], end.err.splitlines()[2]]
    job.nothing_left()


def test_reserve_host_replaces_lost_one_below_minimum_job_ends(tmp_path):
    """A host in reserve takes the place of one that dies; with fewer hosts than the minimum the job ends."""
    # the second must come within the time to join, however busy the machine
    options = ["--master", at(), "--join-timeout", 6, "--last-call", 0.2, "--host-timeout", 3]
    job = Job(tmp_path, START + TELL + WAIT, "--nnodes", "2:2", *options)
    job.start_first("a", options[1])
    job.start("b")
    first = job.at(0, "a", "b")
    job.start("c")
    waits = f"echelon: the job at {options[1]} has all its 2 hosts; this one waits in reserve\n"
    assert job.launchers["c"].stderr.readline() == waits
    job.kill("b")
    job.at(1, "a", "c")
    job.kill("c")
    end = job.end("a")
    assert end.code == 1
    assert end.err.splitlines()[-1] == (
        f"echelon: 1 host came to {options[1]} within 6 s ({HERE}), but --nnodes 2:2 needs 2; "
        "start the same command on others, or give --join-timeout"
    )
    assert not any(os.path.exists(f"/proc/{rank['pid']}") for rank in first)
    job.nothing_left()


LOSES_ITS_PEER = """
class PeerLost(Exception): pass
while rank == '0' and round_ == '0':
    time.sleep(0.05)
    if os.path.exists('gone'): raise PeerLost('the other rank')
"""


def test_peer_lost_with_host_blames_it_and_same_command_rejoins(tmp_path):
    """A peer lost together with its host is blamed on the host, and the same command started again replaces it."""
    options = ["--nnodes", 2, "--master", at(), "--max-restarts", 1]
    job = Job(tmp_path, START + TELL + LOSES_ITS_PEER + WAIT, *options)
    job.start_first("a", options[3])
    job.start("b")
    job.at(0, "a", "b")
    job.kill("b")
    (tmp_path / "gone").touch()
    job.start("again")
    job.at(1, "a", "again")
    job.done()
    ends = job.end("a"), job.end("again")
    assert [end.code for end in ends] == [0, 0], ends
    lost = f"host {HERE} was lost (no heartbeat for 3 s; is it up?)"
    assert ends[0].err.splitlines() == [
        f"echelon: restarting all ranks (restart 1 of 1) because {lost}",
        f"echelon: {lost}, host {HERE} joined: going on with 2 hosts (2 ranks)",
    ]


def test_rendezvous_host_dies_second_master_serves(tmp_path):
    """When the host that serves the rendezvous dies, the next address of --master serves it."""
    first, second = at(), at()
    options = ["--nnodes", "2:3", "--master", f"{first},{second}", "--last-call", 0.2, "--host-timeout", 10]
    job = Job(tmp_path, START + TELL + WAIT, *options)
    job.start_first("a", first)
    job.start("b")
    job.at(0, "a", "b")
    job.start("c")
    job.at(1, "a", "b", "c")
    job.kill("a")
    job.at(2, "b", "c")
    job.start("d")
    job.at(3, "b", "c", "d")
    job.start("e")
    assert job.launchers["e"].stderr.readline().endswith("this one waits in reserve\n")
    job.done()
    spare = job.end("e")
    assert (spare.code, spare.err) == (0, f"echelon: the job at {second} has ended and did not need this host\n")
    ends = [job.end(name) for name in "bcd"]
    assert [end.code for end in ends] == [0, 0, 0], ends
    gone = f"host {HERE} was lost (its launcher at {first} no longer answers)"
    assert ends[0].err.splitlines()[1] == f"echelon: {gone}: going on with 2 hosts (2 ranks)"
    job.nothing_left()


def test_ranks_that_can_save_get_time_when_hosts_join_or_leave(tmp_path):
    job = Job(tmp_path, START + LEAVES + TELL + WAIT, "--nnodes", "1:2", "--master", at(), "--last-call", 0.2)
    job.start("a")
    job.at(0, "a")
    job.start("b")
    job.at(1, "a", "b")
    assert (tmp_path / "left-0-0").exists()
    job.launchers["b"].terminate()
    left = job.end("b")
    job.at(2, "a")
    assert {path.name for path in tmp_path.glob("left-*")} == {"left-0-0", "left-1-0", "left-1-1"}
    job.launchers["a"].send_signal(signal.SIGUSR1)
    end = job.end("a")
    assert (left.code, end.code) == (75, 75)
    saved = "after saving; exit code 75 requests a restart"
    assert left.err.splitlines()[-1] == f"echelon: stopped by SIGTERM {saved}"
    assert end.err.splitlines()[-2:] == [
        f"echelon: host {HERE} is leaving (SIGTERM): going on with 1 host (1 rank)",
        f"echelon: stopped by SIGUSR1 {saved}",
    ]


def test_fixed_job_leaves_whole_also_when_ranks_leave_unasked(tmp_path):
    """A job of fixed size leaves on all hosts together; ranks that leave unasked end it with the same exit code."""
    job = Job(tmp_path, START + LEAVES + TELL + WAIT, "--nnodes", 2, "--master", at())
    job.start("a", "b")
    until(lambda: len(list(tmp_path.glob("up-0-*"))) == 2, "both ranks")
    job.launchers["a"].terminate()
    ends = job.end("a"), job.end("b")
    assert [end.code for end in ends] == [75, 75], ends
    assert ends[1].err == f"echelon: host {HERE} is leaving (SIGTERM)\n"
    unasked = "os.kill(os.getpid(), signal.SIGTERM)\n"
    end = echelon("run", write(tmp_path / "alone.py", START + LEAVES + unasked + WAIT), cwd=tmp_path, WHO="one")
    assert (end.code, end.err) == (75, f"echelon: host {HERE} has saved and requests a restart\n")


def test_a_second_signal_ends_the_wait_for_ranks_that_save(tmp_path):
    stubborn = "signal.signal(signal.SIGTERM, lambda *_: open('asked', 'w').close())\n"
    job = Job(tmp_path, START + LEAVES + stubborn + TELL + WAIT)
    job.start("a")
    job.at(0, "a")
    job.launchers["a"].terminate()
    until((tmp_path / "asked").exists, "the first signal at the rank")
    job.launchers["a"].terminate()
    end = job.end("a")
    assert (end.code, end.err) == (143, "echelon: stopped by SIGTERM; no process is left\n")
    job.nothing_left()


@pytest.mark.parametrize(
    ("failure", "again"),
    [
        ({"kind": "ValueError", "traceback": "Traceback ..."}, True),
        ({"kind": "UsageError"}, False),  # explained in one line: it would come again
        ({"kind": "PeerLost", "secondary": True}, True),
    ],
)
def test_what_is_explained_in_one_line_is_not_tried_again(failure, again):
    terms = RendezvousConfig(
        least=1, most=1, elastic=False, procs=1, max_restarts=1, join_timeout=5, last_call=0, host_timeout=5, grace=1
    )
    rendezvous = LauncherRendezvous(
        RendezvousParticipant(
            HomeStore(), terms, name="h", address="127.0.0.1", node_rank=None, extras=dict, say=print
        ),
        terms,
    )
    rendezvous.next_rendezvous()
    verdict = rendezvous.settle(Failure(0, 1, "h", 1, 1, 0.0, **failure))
    assert verdict.again == again
    rendezvous.depart("", goes_on=False)
