"""Jobs on hosts that are reached by ssh: a real client and a real server, on loopback."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from command import finish, here, start, until, write
from sshd import Hosts

from echelon.base.errors import UsageError
from echelon.launcher.schedulers.host_list import HostListEntry, parse_host_list
from echelon.launcher.schedulers.ssh import collect_forwarded_environment

NASTY = 'it\'s "a" $(touch oops) `x` \\ \n ü €'


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    found = Hosts(tmp_path_factory.mktemp("ssh"), ["alpha", "beta"])
    yield found
    found.close()


@pytest.fixture
def launcher(tmp_path):
    """A Python whose ``-m echelon run`` is a launcher that only tells what becomes of it, in the time it takes to."""
    return write_program(
        tmp_path / "python",
        "import os, signal, sys, time\n"
        "if '-m' not in sys.argv: os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
        "rank = sys.argv[sys.argv.index('--node-rank') + 1]\n"
        "def note(name, text):\n"  # a file that can be seen is whole
        "    with open('.' + name, 'w') as file: file.write(text)\n"
        "    os.rename('.' + name, name)\n"
        "def told(number, frame):\n"
        "    note('told-' + rank, signal.Signals(number).name)\n"
        "    sys.exit(75 if number == signal.SIGUSR1 else 128 + number)\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1): signal.signal(number, told)\n"
        "print('launcher', rank, flush=True)\n"
        "note('up-' + rank, ' '.join(sys.argv))\n"
        "time.sleep(0 if 'quick' in sys.argv else 60)\n",
    )


def write_program(path: Path, text: str) -> Path:
    write(path, f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


def test_job_on_two_hosts_gets_its_setting_and_shows_no_secret(tmp_path, hosts):
    """On two hosts a job finds its directory, arguments and environment, and no command line shows the secret."""
    write(
        tmp_path / "where.py",
        "import contextlib, json, os, sys, torch, torch.distributed as dist, echelon; from pathlib import Path\n"
        "echelon.init()\n"
        "mine = torch.tensor([10.0 ** echelon.rank()]); dist.all_reduce(mine)\n"
        "def secret_seen():\n"
        "    for path in Path('/proc').glob('[0-9]*/cmdline'):\n"
        "        with contextlib.suppress(OSError):\n"  # one that has ended since
        "            if b'not-for-ps-at-all' in path.read_bytes(): return True\n"
        "    return False\n"
        "found = [mine.item(), sys.argv[1:], os.getcwd(), os.environ['SEEN'], os.environ['NCCL_DEBUG'],\n"
        "         secret_seen(), echelon.node_rank()]\n"
        "json.dump(found, open(f'found-{echelon.rank()}', 'w'))\n"
        "print('rank', echelon.rank())\n",
    )
    words = ["--hosts", "alpha:1,beta:1", "--ssh", hosts.ssh, "--env", "SEEN=yes", "--join-timeout", 50, "where.py"]
    secret = {"ECHELON_TOKEN": "not-for-ps-at-all", "NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": ""}
    end = finish(start("run", *words, NASTY, "--lr", "0.1", cwd=tmp_path, **secret))
    assert end.code == 0, end
    for rank in range(2):
        wanted = [11.0, [NASTY, "--lr", "0.1"], str(tmp_path), "yes", "WARN", False, rank]
        assert json.loads((tmp_path / f"found-{rank}").read_text()) == wanted
    assert end.out == "rank 0\n"
    assert not (tmp_path / "oops").exists()


def test_remote_output_bears_host_name_and_signal_reaches_all(tmp_path, hosts, launcher):
    """Output of other hosts bears their name, and a signal to the command reaches every launcher."""
    command = start("run", *over(hosts, launcher), "any.py", cwd=tmp_path)
    until(lambda: len(list(tmp_path.glob("up-*"))) == 2, "both launchers")
    os.kill(command.pid, signal.SIGUSR1)
    end = finish(command)
    assert (end.code, end.err) == (75, "")
    assert sorted(end.out.splitlines()) == ["[beta] launcher 1", "launcher 0"]
    assert [(tmp_path / f"told-{n}").read_text() for n in range(2)] == ["SIGUSR1"] * 2
    first, second = [(tmp_path / f"up-{n}").read_text().split() for n in range(2)]
    assert first[1:] == ["-m", "echelon", "run", "--nnodes", "2", "--node-rank", "0", "--master", *first[9:]]
    assert first[9].startswith("127.0.0.1:")
    assert first[9:] == second[9:] == [first[9], "--procs", "2", "--max-restarts", "1", "--log-dir", "log", "any.py"]


def test_killing_the_command_ends_launchers_of_all_hosts(tmp_path, hosts, launcher):
    command = start("run", *over(hosts, launcher), "any.py", cwd=tmp_path)
    until(lambda: len(list(tmp_path.glob("up-*"))) == 2, "both launchers")
    os.kill(command.pid, signal.SIGKILL)
    finish(command)
    until(lambda: len(list(tmp_path.glob("told-*"))) == 2, "the end of both launchers")
    assert [(tmp_path / f"told-{n}").read_text() for n in range(2)] == ["SIGTERM"] * 2


def test_unreachable_host_is_one_line_and_ends_the_others(tmp_path, hosts, launcher):
    end = finish(start("run", *over(hosts, launcher, "alpha:2,nowhere:2"), "any.py", cwd=tmp_path))
    assert end.code == 1
    (line,) = end.err.splitlines()
    assert line.startswith("echelon: host nowhere cannot be reached by ssh (exit 255): ssh: connect to host 127.0.0.1")
    end = finish(start("run", *over(hosts, tmp_path / "missing"), "any.py", cwd=tmp_path))
    assert end.code == 1
    assert "echelon: host alpha could not start a launcher (exit 127): " in end.err


def test_elastic_job_goes_on_without_unreachable_host(tmp_path, hosts, launcher):
    words = over(hosts, launcher, "alpha:2,nowhere:2,beta:2")
    command = start("run", "--nnodes", "1:3", *words, "any.py", cwd=tmp_path)
    until(lambda: len(list(tmp_path.glob("up-*"))) == 2, "both launchers")
    command.terminate()
    end = finish(command)
    assert end.code == 143
    if end.err:  # the hosts that could be reached may be up before it is known that one cannot
        assert "host nowhere cannot be reached by ssh" in end.err
        assert end.err.endswith("; the job goes on without it\n")
    asked = (tmp_path / "up-2").read_text().split()
    assert asked[5] == "1:3"
    assert [place.partition(":")[0] for place in asked[9].split(",")] == ["127.0.0.1", "127.0.0.1"]
    end = finish(start("run", "--nnodes", "1:3", *words, "quick", cwd=tmp_path))
    assert end.code == 0
    assert "host nowhere cannot be reached by ssh" in end.err


def over(hosts: Hosts, python: Path, names: str = "alpha:2,beta:2") -> list[object]:
    return ["--hosts", names, "--ssh", hosts.ssh, "--remote-python", python, "--max-restarts", 1]


def test_a_hostfile_is_read_as_its_users_write_it(tmp_path):
    path = write(
        tmp_path / "hosts",
        "# the cluster\n\ngpu01 slots=8\nme@gpu02:4   # half of it\ngpu03 slots = 2 max_slots=4\ngpu04\n[fe80::1]:2\n",
    )
    found = parse_host_list(None, str(path))
    assert [(entry.name, entry.procs) for entry in found] == [
        ("gpu01", 8),
        ("me@gpu02", 4),
        ("gpu03", 2),
        ("gpu04", None),
        ("[fe80::1]", 2),
    ]
    assert [entry.address for entry in found][1::3] == ["gpu02", "fe80::1"]
    assert parse_host_list(None, str(write(path, "a\nb\na\na\n"))) == (HostListEntry("a", 3), HostListEntry("b"))
    assert parse_host_list("a:8, b:4", None) == (HostListEntry("a", 8), HostListEntry("b", 4))


MISTAKES = {
    "--hosts -oX=y,b": "--hosts names '-oX=y', which is no host; write it as name or name:processes",
    "--hosts a:0": "--hosts gives the host a no process; give it one or more, or leave it out",
    "--hosts a,a": "--hosts names 'a' twice; name each host once, with its processes: a:2",
    "--hosts ,": "--hosts names no host; name them by commas, as in --hosts a:8,b:8",
    "--hosts a,b --nnodes 3": "--nnodes 3 does not fit the 2 hosts of --hosts or --hostfile; leave --nnodes out",
    "--hosts a:2 --procs 2": "--procs and the numbers of --hosts both count processes; leave one of them out",
    "--hosts a --hostfile f": "--hosts and --hostfile both name the hosts; leave one of them out",
    "--hostfile none": "--hostfile 'none' cannot be read: No such file or directory",
    "--hosts a --env NOT_SET": "--env NOT_SET is not set here; set it, or give --env NOT_SET=VALUE",
    "--ssh ssh": "--ssh is for other hosts; name them by --hosts or --hostfile",
    "--hosts a --ssh '": "--ssh ''' cannot be read: No closing quotation",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_about_hosts_are_one_line(tmp_path, words):
    end = here("run", *words.split(), "any.py", cwd=tmp_path)
    assert (end.code, end.err) == (2, f"echelon: {MISTAKES[words]}\n")


def test_only_what_belongs_to_the_job_travels():
    env = {
        "HOME": "/me",
        "AWS_SECRET": "s",
        "PYTHONPATH": "/p",
        "ECHELON_LOG_DIR": "/l",
        "OMP_NUM_THREADS": "2",
        "X": "1",
    }
    assert collect_forwarded_environment(env, ["X", "Y=a=b"]) == {
        "PYTHONPATH": "/p",
        "OMP_NUM_THREADS": "2",
        "X": "1",
        "Y": "a=b",
    }
    with pytest.raises(UsageError):
        collect_forwarded_environment(env, ["=x"])
