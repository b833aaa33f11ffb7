"""``echelon run`` answers a mistake with one line, exit code 2, and a remedy."""

import re
import socket

import pytest
import torch
from command import echelon, finish, here, start_fresh, write

from echelon.base.environment import PADDLE_HOSTS
from echelon.base.errors import UsageError
from echelon.launcher import job as jobs
from echelon.launcher.run_options import RunOptions


def check(program="train.py", args=(), **options):
    return jobs.check(RunOptions(program, list(args), **({"max_restarts": 0} | options)))


@pytest.fixture(autouse=True)
def _a_directory_with_a_script(tmp_path, monkeypatch):
    write(tmp_path / "train.py", "print('never')")
    monkeypatch.chdir(tmp_path)


COMMANDS = {
    "run --prcs 2 train.py": "no option '--prcs' for 'echelon run'; did you mean '--procs'?",
    "run --procs 0 train.py": "--procs 0: expected 1 or more",
    "run": "missing argument 'script'; usage: echelon run [OPTIONS] script [ARGS]...",
    "rnu train.py": "no command 'rnu'; did you mean 'run'?",
}


@pytest.mark.parametrize("words", COMMANDS)
def test_the_command_says_it_in_one_line(tmp_path, words):
    end = here(*words.split(), cwd=tmp_path)
    assert (end.code, end.out, end.err.replace("SCRIPT", "script")) == (2, "", f"echelon: {COMMANDS[words]}\n")


def test_a_process_of_its_own_says_the_same(tmp_path):
    words = "run --procs 0 train.py"
    assert finish(start_fresh(*words.split(), cwd=tmp_path)) == here(*words.split(), cwd=tmp_path)


MISTAKES = [
    ({"program": "trian.py"}, r"no script at 'trian.py'; did you mean 'train.py'\?"),
    ({"program": "nowhere.thing", "module": True}, "-m nowhere.thing: no module of that name"),
    ({"nnodes": "2"}, "a job on 2 hosts needs a rendezvous address; give every host the same --master HOST:PORT"),
    ({"nnodes": "0"}, "--nnodes 0: expected"),
    ({"nnodes": "2", "node_rank": 2, "master": "127.0.0.1:1"}, "--node-rank 2 does not fit --nnodes 2"),
    ({"nnodes": "2", "master": "somewhere"}, "--master 'somewhere' is not HOST:PORT"),
    ({"nnodes": "2-8"}, r"--nnodes '2-8' is neither a number of hosts \(4\) nor a range \(2:8\)"),
    ({"nnodes": "8:2"}, "--nnodes 8:2 begins above its end"),
    ({"nnodes": "2", "master": "127.0.0.1:1,127.0.0.1:1"}, "names an address twice"),
    ({"nnodes": "2", "master": "10.9.8.7:1"}, "needs a shared secret; export ECHELON_TOKEN="),
    ({"host_timeout": 1.0}, "--host-timeout 1 would take hosts for lost that only had a busy moment"),
    ({"grace": -1.0}, "--grace -1 is no time to wait"),
    ({"copies": -1}, "--copies -1: expected"),
    ({"on_stall": "cry"}, "--on-stall 'cry' is neither end nor wait"),
    ({"max_restarts": -1}, "--max-restarts -1: expected"),
    ({"log_dir": "train.py"}, "--log-dir 'train.py' cannot be used"),
    ({"gpus": "two"}, "--gpus 'two' is neither a count"),
    ({"gpus": "0"}, "for GPU zero alone write '--gpus 0,'"),
    ({"gpus": "0,0"}, "names a GPU twice"),
]


@pytest.mark.parametrize(("options", "line"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_refused_before_anything_starts(options, line):
    with pytest.raises(UsageError, match=line) as caught:
        check(**options)
    assert "\n" not in str(caught.value)


def test_missing_interface_is_answered_with_those_that_exist():
    with pytest.raises(UsageError, match=r"--nic 'nic9' is not a network interface here; there are: .*lo"):
        check(nic="nic9")
    assert check(nic="lo").options.nic == "lo"


def test_missing_gpus_are_answered_with_those_that_exist():
    there = torch.cuda.device_count()
    words = "is none" if there == 0 else "is one here" if there == 1 else f"are {there} here"
    with pytest.raises(UsageError, match=f"--gpus {there + 1} asks for {there + 1} GPUs, but there {words}"):
        check(gpus=str(there + 1))
    with pytest.raises(UsageError, match=f"--gpus {there}, asks for GPU {there}, but there {words}"):
        check(gpus=f"{there},")


def test_gpus_are_counted_among_the_visible_ones(monkeypatch):
    """The GPU count is the one thing replaced here: the mapping must be checked where there are none, too."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert (check(gpus="0,2").visible_gpus, check(gpus="0,2").procs) == ("4,7", 2)
    assert (check(gpus="2").visible_gpus, check(gpus="2").procs) == ("4,5", 2)
    assert (check(gpus="0,").visible_gpus, check(gpus="0,").procs) == ("4", 1)
    assert (check(gpus="0,", procs=2).visible_gpus, check(gpus="0,", procs=2).procs) == ("4", 2)
    assert (check().visible_gpus, check().procs) == (None, 3)


@pytest.mark.parametrize("name", PADDLE_HOSTS)
def test_the_number_of_hosts_may_come_from_the_environment(monkeypatch, name):
    monkeypatch.setenv(name, "3")
    assert check(master="127.0.0.1:29500").nnodes == 3
    assert check(master="127.0.0.1:29500", nnodes="2").nnodes == 2
    with pytest.raises(UsageError, match="a job on 3 hosts needs a rendezvous address"):
        check()
    monkeypatch.setenv(name, "many")
    with pytest.raises(UsageError, match=f"{name}='many': expected the number of hosts"):
        check()


def test_elastic_job_has_restarts_and_copies_by_default():
    """An elastic job has restarts and copies in memory by default; a job of fixed size has neither."""
    job = check(nnodes="2:8", master="127.0.0.1:1,127.0.0.1:2", max_restarts=None)
    assert (job.fewest, job.nnodes, job.elastic, job.max_restarts, job.copies) == (2, 8, "2:8", 3, 1)
    assert (job.master, len(job.masters)) == (("127.0.0.1", 1), 2)
    job = check(nnodes="2", master="127.0.0.1:1", max_restarts=None)
    assert (job.fewest, job.nnodes, job.elastic, job.max_restarts, job.copies) == (2, 2, None, 0, 0)


def test_only_the_two_dashes_right_after_the_script_are_dropped():
    assert check(args=["--", "--lr", "1", "--", "x"]).args == ("--lr", "1", "--", "x")


def test_a_host_without_an_address_is_named():
    with pytest.raises(UsageError, match=r"--master names the host 'no-such-host\.invalid', which has no address"):
        check(nnodes="2", master="no-such-host.invalid:29500")
    assert check(nnodes="2", master="localhost:29500").master == (socket.gethostbyname("localhost"), 29500)


@pytest.mark.usefixtures("warm")
def test_the_console_names_a_late_rank_once_for_all_that_wait(tmp_path):
    """Rank 0, whose words the console shows, is the late one: the launcher says it for the two that wait."""
    late = "import os, time\nif os.environ['RANK'] == '0': time.sleep(2.5)\nimport echelon\nechelon.init()\n"
    write(tmp_path / "late.py", late)
    end = echelon("run", "--procs", 3, "late.py", cwd=tmp_path, ECHELON_WAIT_NOTICE="0.5")
    line = r"echelon: join: rank [12] has waited \d s for rank 0 of 3 to call echelon.init\(\); it gives up after 300 s"
    assert re.fullmatch(rf"{line}; start the missing processes, or look at their logs\n", end.err), end.err
    assert end.code == 0
    logs = [(tmp_path / "log" / f"rank-{rank}.log").read_text() for rank in range(3)]
    assert [text.count("has waited") for text in logs] == [0, 1, 1]
