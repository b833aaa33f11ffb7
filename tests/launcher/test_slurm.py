"""Slurm. There is none here: small programs by the names of sbatch, srun and scontrol do what these do to a job.

``sbatch`` runs the batch script in the background, ``srun`` starts one process a node with what Slurm tells it, passes
USR1 on and ends with the highest code, ``scontrol requeue`` starts the script again. Of the second run srun only tells
what it was given: the same words start the same launchers, and each takes seconds.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command import finish, here, start, until, write
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.base.environment import expand_hosts, port_for
from echelon.base.errors import UsageError
from echelon.launcher.run_options import RunOptions
from echelon.launcher.schedulers.slurm import SlurmSubmission, needs_srun, read_slurm_step, script

SBATCH = """
import os, re, subprocess, sys
script = sys.argv[-1]
text = open(script).read()
job = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NUM_NODES": re.search(r"#SBATCH --nodes=(\\d+)", text)[1]}
job["SLURM_JOB_NODELIST"] = f"127.0.0.[1-{job['SLURM_JOB_NUM_NODES']}]"
console = open(re.search(r"#SBATCH --output=(.*)", text)[1].replace("%j", "4242"), "a")
batch = subprocess.Popen(["bash", script], env=os.environ | job, stdin=subprocess.DEVNULL,
                         stdout=console, stderr=console, start_new_session=True)
with open(".batch", "w") as file:
    file.write(f"{batch.pid} {script}")
os.rename(".batch", "batch")
print("4242;cluster")
"""
SCONTROL = """
import subprocess, sys
assert sys.argv[1:] == ["requeue", "4242"]
open("requeued", "w").close()
subprocess.run(["sbatch", open("batch").read().split(" ", 1)[1]], stdout=subprocess.DEVNULL)
"""
SRUN = """
import json, os, signal, subprocess, sys
call = "second" if os.path.exists("requeued") else "first"
with open("part", "w") as file:
    json.dump([sys.argv[1:], sorted(name for name in os.environ if name.startswith("SLURM_"))], file)
os.rename("part", call)
if call == "second":
    sys.exit()
options = [word for word in sys.argv[1:] if word.startswith("--")][:6]
command = sys.argv[1:][next(n for n, word in enumerate(sys.argv[1:]) if not word.startswith("--")):]
count = next(option.split("=")[1] for option in options if option.startswith("--ntasks="))
step = {"SLURM_STEP_NUM_TASKS": count, "SLURM_STEP_NUM_NODES": count, "SLURM_STEP_NODELIST": f"127.0.0.[1-{count}]",
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{count})", "SLURM_LOCALID": "0"}
tasks = []
signal.signal(signal.SIGUSR1, lambda number, frame: [task.send_signal(number) for task in tasks])
signal.signal(signal.SIGTERM, lambda number, frame: [task.kill() for task in tasks])
for node in range(int(count)):
    own = {"SLURM_NODEID": str(node), "SLURM_PROCID": str(node)}
    tasks.append(subprocess.Popen(command, env=os.environ | step | own))
sys.exit(max(task.wait() % 256 for task in tasks))
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        write(tmp_path / name, f"#!{sys.executable} -S\n{text}").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith(("ECHELON_", "SLURM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield tmp_path
    if (tmp_path / "batch").exists():
        with contextlib.suppress(ProcessLookupError):  # it has ended, unless the test has failed
            os.killpg(int((tmp_path / "batch").read_text().split()[0]), signal.SIGKILL)


def test_a_job_that_must_go_saves_is_queued_again_and_ends(cluster):
    write(
        cluster / "train.py",
        "import json, os, signal, sys, time\n"
        "def leave(*_): open(f'saved-{rank}', 'w').close(); sys.exit(75)\n"
        "rank = os.environ['RANK']\n"
        "found = [sys.argv[1:], os.environ['WORLD_SIZE'], os.environ['GROUP_RANK'], os.environ['MASTER_ADDR']]\n"
        "json.dump(found, open(f'found-{rank}', 'w'))\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "open(os.path.join(os.environ['ECHELON_LEAVE_MARK'], 'rank-' + rank), 'w').close()\n"
        "open(f'up-{rank}', 'w').close()\n"
        "time.sleep(100)\n",
    )
    words = ["--nnodes", 2, "--run", "--procs 1 --join-timeout 50", "train.py", "--lr", "0.1", "it's $(x)"]
    told = here("submit", "slurm", *words, cwd=cluster)
    assert told.code == 0, told
    script, console = (cluster / "runs" / "train-1" / name for name in ("train.sbatch", "slurm-4242.log"))
    assert told.out == f"echelon: submitted as job 4242; its console will be {console}, its script is {script}\n"
    until(lambda: len(list(cluster.glob("up-*"))) == 2, "both ranks")
    batch = int((cluster / "batch").read_text().split()[0])
    os.kill(batch, signal.SIGUSR1)
    until((cluster / "second").exists, "the second run")
    assert len(list(cluster.glob("saved-*"))) == 2
    for rank in range(2):
        found = json.loads((cluster / f"found-{rank}").read_text())
        assert found[:3] == [["--lr", "0.1", "it's $(x)"], "2", str(rank)]
    assert json.loads((cluster / "second").read_text()) == json.loads((cluster / "first").read_text())
    assert "echelon: saved; job 4242 goes back into the queue\n" in console.read_text()
    until(lambda: not alive(int((cluster / "batch").read_text().split()[0])), "the end of the batch script")


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_run_in_batch_script_calls_srun_with_command_and_secret(cluster):
    """Return the arguments given to srun, from an srun that only prints them."""
    tell = "import json, os, sys\njson.dump([sys.argv[1:], os.environ['ECHELON_TOKEN']], open('called', 'w'))\n"
    write(cluster / "srun", f"#!{sys.executable} -S\n{tell}")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_PER_TASK": "4"}
    words = ["run", "--log-dir", "log", "--max-restarts", 1, "any.py", "--lr", "it's"]
    end = finish(start(*words, cwd=cluster, **job))
    assert end.code == 0, end
    called, token = json.loads((cluster / "called").read_text())
    asked = ["--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0"]
    assert called == [*asked, "--cpus-per-task=4", sys.executable, "-m", "echelon", *map(str, words)]
    assert re.fullmatch("[0-9a-f]{32}", token)


NOTHING = RunOptions("train.py")
TASK = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "3", "SLURM_NODEID": "1", "SLURM_JOB_ID": "7"}
TASK |= {"SLURM_STEP_NODELIST": "gpu[08-10]-ib"}


def test_srun_task_finds_its_job_unless_options_say_otherwise():
    where = f"gpu08-ib:{port_for('7')}"
    assert read_slurm_step(NOTHING, TASK) == {"nnodes": 3, "node_rank": 1, "master": where}
    elastic = read_slurm_step(replace(NOTHING, nnodes="1:3"), TASK)
    assert elastic == {"nnodes": "1:3", "node_rank": 1, "master": f"{where},{where.replace('08', '09')}"}
    for by_hand in ({"nnodes": "1"}, {"master": "h:1"}, {"hosts": "a,b"}, {"servers": 1}):
        assert read_slurm_step(replace(NOTHING, **by_hand), TASK) == {}
        assert needs_srun(replace(NOTHING, **by_hand), {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}) == 0
    assert read_slurm_step(NOTHING, TASK | {"ECHELON_LOG_DIR": "/l"}) == {}  # a rank that starts a job of its own
    assert read_slurm_step(NOTHING, {}) == {}
    assert needs_srun(NOTHING, {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}) == 3
    assert needs_srun(NOTHING, TASK) == needs_srun(NOTHING, {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}) == 0


def test_several_tasks_on_a_node_are_refused():
    with pytest.raises(UsageError, match=r"^srun started 24 tasks on 3 nodes, .* use srun --ntasks-per-node=1$"):
        read_slurm_step(NOTHING, TASK | {"SLURM_STEP_NUM_TASKS": "24"})


def test_lists_of_hosts_with_suffixes_and_several_brackets():
    assert expand_hosts("a[1-2]b[08-09]c,login,x[3,7]") == ["a1b08c", "a1b09c", "a2b08c", "a2b09c", "login", "x3", "x7"]
    assert expand_hosts("n[9-11]-ib.example") == ["n9-ib.example", "n10-ib.example", "n11-ib.example"]


PLAIN = {"script": "t.py", "nodes": 2}


def test_options_become_lines_for_sbatch():
    asked = {"gpus": 8, "time": "8:00:00", "partition": "p", "account": "a", "options": ["qos=high", "exclusive"]}
    lines = script(SlurmSubmission(**(PLAIN | asked | {"run": "--nnodes 1:2", "requeue": False}))).splitlines()
    found = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    wanted = [
        "--job-name=t",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--time=8:00:00",
        "--partition=p",
    ]
    assert found[:7] == [*wanted, "--account=a"]
    assert found[-5:] == ["--signal=B:USR1@120", "--qos=high", "--exclusive", "--no-requeue", "--no-kill"]
    assert not any("scontrol" in line for line in lines)


def test_script_with_special_words_passes_them_through_bash(tmp_path):
    """One bash for all of them: it would take a start for each."""
    found = []

    @settings(max_examples=40, deadline=None, database=None)
    @given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1, max_size=4))
    def collect(words):
        found.append(words)

    collect()
    found.append(["it's", '"', "$(touch oops)", "`x`", "\n#SBATCH --nodes=9\n", "\\", "ü€", "", "-x", "*"])
    body = []
    for words in found:
        text = script(SlurmSubmission(**(PLAIN | {"args": words})))
        assert text.split("set -u")[0] == script(SlurmSubmission(**PLAIN)).split("set -u")[0]
        command = text[text.index("\nsrun ") : text.index(" &\nstep=")]
        body.append(f'srun() {{ printf \'%s\\0\' "$#" "${{@:$#-{len(words) - 1}}}"; }}\n{command}\n')
    write(tmp_path / "all.sh", "".join(body))
    told = subprocess.run(["bash", "-u", "all.sh"], cwd=tmp_path, capture_output=True, check=True).stdout.decode()
    parts = iter(told.split("\0"))
    for words in found:
        next(parts)
        assert [next(parts) for _ in words] == words
    assert not (tmp_path / "oops").exists()
    write(tmp_path / "one.sh", script(SlurmSubmission(**(PLAIN | {"args": found[-1]}))))
    assert subprocess.run(["bash", "-n", "one.sh"], cwd=tmp_path, check=False).returncode == 0


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"partition": "p\n#SBATCH --x"}, "--partition 'p\\n#SBATCH --x' has characters that a line of sbatch options"),
        ({"account": 'a"b'}, "--account 'a\"b' has characters that a line of sbatch options cannot hold"),
        ({"options": ["Q=1"]}, "--option 'Q=1' is not KEY=VALUE of an option of sbatch, such as --option qos=high"),
        ({"time": "soon"}, "--time 'soon' is no time limit; write 8:00:00, or 2-12:00 for days and hours"),
        ({"name": "../x"}, "--name '../x' is not a valid job name; use letters, digits, dots and dashes"),
        ({"nodes": 0}, "--nnodes 0: expected 1 or more"),
        ({"run": "'"}, "--run ''' cannot be read: No closing quotation"),
    ],
)
def test_mistakes_are_one_line(changed, line):
    with pytest.raises(UsageError) as caught:
        script(SlurmSubmission(**(PLAIN | changed)))
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_without_sbatch_the_script_is_there_and_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    end = here("submit", "slurm", "train.py", cwd=tmp_path)
    path = tmp_path / "runs" / "train-1" / "train.sbatch"
    assert end.err == f"echelon: there is no sbatch on this host; submit the script {path} on a host that has it\n"
    assert end.code == 1
    assert shlex.join(["train.py"]) in path.read_text()
    assert not stat.S_IMODE(path.stat().st_mode) & 0o022
    shown = here("submit", "slurm", "--dry-run", "train.py", cwd=tmp_path).out
    assert shown == path.read_text().replace("/runs/train-1", "/runs/train-2"), "the next job gets the next directory"
    assert not (tmp_path / "runs" / "train-2").exists()
