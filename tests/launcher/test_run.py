"""``echelon run``: what each rank finds, where its words go, and how the job ends."""

import contextlib
import io
import json
import os
import pty
import random
import runpy
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import harness
import pytest
from command import LIMIT, echelon, finish, processes_with, start, start_fresh, until, write

SUM = """
import echelon, torch, torch.distributed as dist
echelon.init()
mine = torch.arange(1.0, 5.0)[echelon.rank()::echelon.world_size()].sum()
if echelon.world_size() > 1:
    dist.all_reduce(mine)
print(f"the sum is {mine.item():g} on {echelon.world_size()}")
"""


def test_second_job_in_a_log_directory_is_refused(tmp_path):
    write(
        tmp_path / "wait.py",
        "import pathlib, time\n"
        "pathlib.Path('begun').touch()\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.05)\n",
    )
    write(tmp_path / "any.py", "")
    first = start("run", "--procs", 1, "wait.py", cwd=tmp_path)
    until((tmp_path / "begun").exists, "the first job")
    jobs = [start("run", "--procs", 1, *words, "any.py", cwd=tmp_path) for words in (["--share-log-dir"], [])]
    mixing, second = map(finish, jobs)
    told = f" on host {socket.gethostname()} writes its logs and records there, too; "
    assert (mixing.code, second.code) == (0, 2)
    assert told + "logs and records of both jobs will be mixed" in mixing.err
    assert second.err.count("\n") == 1
    assert told + "give this job another --log-dir, or --share-log-dir to mix" in second.err
    (tmp_path / "go").touch()
    end = finish(first)
    assert (end.code, end.err) == (0, "")
    assert not (tmp_path / "log" / ".launcher").exists()


def test_each_rank_finds_its_place_its_arguments_and_its_log(tmp_path):
    write(
        tmp_path / "look.py",
        "import json, os, sys\n"
        "names = json.dumps({'argv': sys.argv, 'path': sys.path[0]} | dict(os.environ))\n"
        "open(f\"found-{os.environ['RANK']}.json\", 'w').write(names)\n"
        "print('words of rank', os.environ['RANK'])\n"
        "print('complaint of rank', os.environ['RANK'], file=sys.stderr)\n",
    )
    (tmp_path / "out").mkdir()
    write(tmp_path / "out" / "rank-7.log", "of an earlier, larger job")
    write(tmp_path / "out" / "rank-1.log", "of an earlier job")

    words = ("--procs", 2, "--log-dir", "out", "look.py", "--", "--procs", "9", "a$$b")
    end = finish(start_fresh("run", *words, cwd=tmp_path))

    assert end.code == 0, end.err
    assert (end.out, end.err) == ("words of rank 0\n", "complaint of rank 0\n")
    logs = {log.name: set(log.read_text().splitlines()) for log in (tmp_path / "out").iterdir()}
    assert logs == {f"rank-{n}.log": {f"words of rank {n}", f"complaint of rank {n}"} for n in range(2)}
    found = [json.loads((tmp_path / f"found-{n}.json").read_text()) for n in range(2)]
    for rank, env in enumerate(found):
        assert env["argv"] == ["look.py", "--procs", "9", "a$$b"]
        assert env["path"] == str(tmp_path)
        assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == (str(rank), "2", str(rank))
        assert (env["PADDLE_TRAINER_ID"], env["PADDLE_TRAINERS_NUM"]) == (str(rank), "2")
        assert env["PADDLE_NUM_TRAINERS"] == "1"  # hosts
        assert env["PADDLE_TRAINER_ENDPOINTS"].split(",")[rank] == env["PADDLE_CURRENT_ENDPOINT"]
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert env["ECHELON_LOG_DIR"] == str(tmp_path / "out")
        assert int(env["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert len(set(found[0]["PADDLE_TRAINER_ENDPOINTS"].split(","))) == 2


def test_a_module_runs_as_main_and_its_children_find_it(tmp_path):
    (tmp_path / "pack").mkdir()
    write(tmp_path / "pack" / "__init__.py", "")
    write(
        tmp_path / "pack" / "work.py",
        "import multiprocessing, sys\n"
        "def square(x): return x * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(square, [3]), sys.argv[1:])\n",
    )
    end = echelon("run", "-m", "pack.work", "--x", cwd=tmp_path)
    assert (end.code, end.out) == (0, "[9] ['--x']\n"), end.err


def test_rank_0_keeps_the_terminal_and_its_log(tmp_path):
    write(
        tmp_path / "tty.py",
        "import os, sys\n"
        "print('a terminal:', sys.stdout.isatty(), sys.__stdout__.isatty())\n"
        "sys.__stdout__.write('only seen\\n')\n"
        "sys.stdout.buffer.write(b'bytes\\n')\n",
    )
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "echelon", "run", "--procs", "2", "--log-dir", "log", "tty.py"]
    assert subprocess.run(words, cwd=tmp_path, stdout=theirs, check=False, timeout=LIMIT).returncode == 0
    seen = ""
    while "only seen" not in seen:  # a terminal hands on line by line
        seen += os.read(ours, 4096).decode()
    os.close(ours)
    os.close(theirs)
    assert "a terminal: True True" in seen
    assert "only seen" in seen
    assert (tmp_path / "log" / "rank-0.log").read_text() == "a terminal: True True\nbytes\n"
    assert (tmp_path / "log" / "rank-1.log").read_text().startswith("a terminal: False False\n")


ENDINGS = {
    "raise ValueError('two\\nlines')": ("raised ValueError: two lines", 1),
    "sys.exit(7)": ("failed with exit code 7", 7),
    "os.kill(os.getpid(), signal.SIGKILL)": ("was killed by SIGKILL", 128 + signal.SIGKILL),
    "raise errors.UsageError('use something else')": ("raised UsageError: use something else (fail.py:4)", 1),
}


@pytest.mark.parametrize("statement", ENDINGS)
def test_first_failing_rank_is_named_and_its_exit_code_passed_on(tmp_path, statement):
    how, code = ENDINGS[statement]
    imports = "from echelon import errors" if "errors" in statement else "pass"
    write(
        tmp_path / "fail.py",
        "import os, signal, sys, time\nprint(os.getpid(), flush=True)\n"
        f"def inner():\n    {imports}; {statement}\n"
        "if os.environ['RANK'] == '2': inner()\n"
        "time.sleep(600)\n",
    )
    end = echelon("run", "--procs", 3, "fail.py", cwd=tmp_path)
    log = tmp_path / "log" / "rank-2.log"
    pid = log.read_text().split()[0]
    assert end.first_line == f"echelon: rank 2 of 3 (host {socket.gethostname()}, pid {pid}) {how}"
    assert end.err.splitlines()[-1] == f"echelon: its log is {log}"
    assert end.code == code
    if "ValueError" in statement:
        trace = "\n".join(end.err.splitlines()[1:-1])
        assert trace.startswith('Traceback (most recent call last):\n  File "fail.py", line 5, in <module>\n')
        assert "echelon/launcher" not in trace
        assert "runpy" not in trace
        assert trace in log.read_text()
    else:
        assert len(end.err.splitlines()) == 2
    if "UsageError" in statement:
        assert log.read_text() == f"{pid}\nechelon: use something else (fail.py:4)\n"


def test_traceback_option_shows_it_and_error_stays_explained(tmp_path):
    """The traceback is shown if asked for, and the error still counts as explained: it causes no restart."""
    write(tmp_path / "fail.py", "from echelon.base.environment import whole_number\nwhole_number({}, 'X')\n")
    end = echelon("run", "--traceback", "--max-restarts", 1, "fail.py", cwd=tmp_path)
    first, *trace = end.err.splitlines()
    assert first.endswith("(fail.py:2)")
    assert trace[:2] == ["Traceback (most recent call last):", '  File "fail.py", line 2, in <module>']
    assert "echelon/base/environment.py" in end.err
    assert "restart" not in end.err  # it would come again
    assert end.code == 1


@pytest.mark.usefixtures("warm")
def test_a_killed_rank_is_blamed_not_those_that_lost_it(tmp_path):
    """Rank 0's Gloo error comes at once and is an exception; rank 1's end is silent. Rank 1 is the cause."""
    write(
        tmp_path / "killed.py",
        SUM + "import os\nif echelon.rank() == 1: os.kill(os.getpid(), 9)\ndist.all_reduce(mine)\n",
    )
    end = echelon("run", "--procs", 2, "killed.py", cwd=tmp_path)
    assert " rank 1 of 2 " in end.first_line
    assert end.first_line.endswith("was killed by SIGKILL")
    assert end.code == 128 + signal.SIGKILL
    assert "Traceback" not in end.err  # rank 0's is in its log only


@pytest.mark.usefixtures("warm")
def test_restart_begins_anew_collectives_work_before_and_after(tmp_path):
    write(
        tmp_path / "again.py",
        SUM + "import os\n"
        "if echelon.rank() == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os.kill(os.getpid(), 9)\n"
        "dist.all_reduce(mine)\n"
        "print('done')\n",
    )
    end = echelon("run", "--procs", 2, "--max-restarts", 3, "again.py", cwd=tmp_path)
    assert end.code == 0, end.err
    line = "echelon: restarting all ranks (restart 1 of 3) because rank 1 was killed by SIGKILL"
    assert end.err.splitlines() == [line]
    assert end.out.splitlines() == ["the sum is 10 on 2"] * 2 + ["done"]
    log = (tmp_path / "log" / "rank-1.log").read_text().splitlines()
    assert log == ["the sum is 10 on 2", "----- restart 1 -----", "the sum is 10 on 2", "done"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_launcher_leaves_no_process(tmp_path, number):
    """Neither ranks nor the stubborn children of ranks, even when the launcher is killed outright."""
    marker = f"marker-{uuid.uuid4().hex}"
    write(
        tmp_path / "stubborn.py",
        "import os, signal, time\n"
        "signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN)\n"
        "open(f'up-{os.getpid()}', 'w'); time.sleep(600)\n",
    )
    write(
        tmp_path / "sleep.py",
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, 'stubborn.py', sys.argv[1]])\n"
        "time.sleep(600)\n",
    )
    launcher = start("run", "--procs", 2, "sleep.py", marker, cwd=tmp_path)
    until(lambda: len(list(tmp_path.glob("up-*"))) == 2, "both ranks' children")
    assert len(processes_with(marker)) == 4  # two ranks, their children
    launcher.send_signal(number)
    if number == signal.SIGKILL:
        until(lambda: not processes_with(marker), "the end of all processes")
        launcher.communicate()
    else:
        end = finish(launcher)
        assert not processes_with(marker)
        assert end.code == 128 + number
        assert end.err.splitlines() == [f"echelon: stopped by {number.name}; no process is left"]


@pytest.mark.usefixtures("warm")
def test_hostile_bytes_at_the_jobs_port_do_not_disturb_it(tmp_path):
    write(
        tmp_path / "steady.py",
        "import os, pathlib, time\n" + SUM + "if echelon.rank() == 0:\n"
        "    pathlib.Path('part').write_text(os.environ['MASTER_PORT']); os.rename('part', 'port')\n"
        "while not os.path.exists('thrown'): time.sleep(0.05)\n"
        "dist.all_reduce(mine)\n"
        "dist.new_group(); dist.barrier()\n"
        "print('ended well', mine.item())\n",
    )
    job = start("run", "--procs", 2, "steady.py", cwd=tmp_path)
    until((tmp_path / "port").exists, "the job's port")
    port, noise = int((tmp_path / "port").read_text()), random.Random(7)
    for size in (1, 5, 64, 4096, 100_000) * 4:
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)) as intruder:
            intruder.sendall(noise.randbytes(size))
    (tmp_path / "thrown").touch()
    end = finish(job)
    assert end.code == 0, end.err
    assert end.out.endswith("ended well 20.0\n")


@pytest.mark.usefixtures("warm")
def test_nothing_listens_beyond_loopback_on_one_host(tmp_path):
    """A plain torch script too: its store is served by the launcher, its Gloo bound to loopback."""
    write(
        tmp_path / "plain.py",
        "import os, time, torch.distributed as dist\n"
        "dist.init_process_group('gloo'); dist.barrier()\n"
        "open(f\"up-{dist.get_rank()}\", 'w').write(f'{os.getpid()} {os.getppid()}')\n"
        "while not os.path.exists('seen'): time.sleep(0.05)\n"
        "dist.destroy_process_group()\n",
    )
    job = start("run", "--procs", 2, "plain.py", cwd=tmp_path)
    until(lambda: len([up for up in tmp_path.glob("up-*") if up.read_text()]) == 2, "both ranks")
    pids = {int(pid) for up in tmp_path.glob("up-*") for pid in up.read_text().split()}
    addresses = {address for pid in pids for address in listening(pid)}
    (tmp_path / "seen").touch()
    end = finish(job)
    assert end.code == 0, end.err
    assert addresses == {"0100007F"}  # 127.0.0.1 as the kernel writes it


def listening(pid: int) -> list[str]:
    """The addresses on which this process accepts connections."""
    sockets = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed while we look
            sockets.add(os.readlink(fd))
    found = []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1].rpartition(":")[0])
    return found


def torchrun(script: Path) -> str:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    end = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=LIMIT)
    assert end.returncode == 0, end.stderr
    return end.stdout


def by_variables(script: Path, *ranks: dict[str, str]) -> list[str]:
    outputs = harness.run(told_by, script, ranks, ranks=len(ranks))
    return [line for output in outputs for line in output.splitlines()]


def told_by(script: Path, ranks: tuple[dict[str, str], ...]) -> str:
    """Return the output of the script on a rank with these variables of its place and no others."""
    mine = ranks[int(os.environ.get("RANK", "0"))]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(mine)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue()


def test_same_script_reaches_the_same_sum_under_every_launcher(tmp_path):
    script = write(tmp_path / "sum.py", SUM)
    job = str(random.randrange(10**9))
    slurm = [
        {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n), "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": job,
         "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"} for n in range(2)
    ]  # fmt: skip
    open_mpi = [
        {"OMPI_COMM_WORLD_RANK": str(n), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": str(n),
         "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": job + "-mpi"} for n in range(2)
    ]  # fmt: skip
    assert by_variables(script, {}) == ["the sum is 10 on 1"]
    assert torchrun(script).replace("\n", "") == "the sum is 10 on 2" * 2  # torchrun lets their lines run together
    assert by_variables(script, *slurm) == ["the sum is 10 on 2"] * 2
    assert by_variables(script, *open_mpi) == ["the sum is 10 on 2"] * 2
