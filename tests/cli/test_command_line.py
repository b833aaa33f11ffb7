"""The command line: names, spellings and mistakes, all answered before torch is imported."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.observability.runlog.run_directory import note_elsewhere

#: Runs each of many commands in one process that can import neither torch nor pydantic, which take 2 and 0.1 s.
REFUSING = """
import contextlib, io, json, sys

class NothingSlow:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "pydantic"):
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, NothingSlow())
from echelon.cli import main

found = {}
for name, words in json.load(sys.stdin).items():
    sys.argv, out, err, code = ["echelon", *words], io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
    found[name] = [code, out.getvalue(), err.getvalue()]
print(json.dumps(found))
"""

#: Pattern of an error of a command: the whole of stderr, after "echelon: ".
MISTAKES = {
    "run": "missing argument 'SCRIPT'; usage: echelon run [OPTIONS] SCRIPT [ARGS]...",
    "run --procs two train.py": "--procs two: expected a whole number",
    "run --grace=soon train.py": "--grace soon: expected a number",
    "run --procs": "--procs needs a value",
    "run --prcs 2 train.py": "no option '--prcs' for 'echelon run'; did you mean '--procs'?",
    "run --servers a:1,b:2 train.py": (
        "--servers a:1,b:2: expected a number; endpoints are named by --pservers HOST:PORT,... and --trainers N"
    ),
    "--vrsion": "no option '--vrsion' for 'echelon'; did you mean '--version'?",
    "launch train.py": "no command 'launch'; here it is 'echelon run'",
    "rnu": "no command 'rnu'; did you mean 'run'?",
    "completion tcsh": "completion tcsh: unknown shell; known: bash, fish, zsh",
    "doctor --jsn x": "no option '--jsn' for 'echelon doctor'; did you mean '--json'?",
    "submit slurm --procs 2 train.py": (
        "no option '--procs' for 'echelon submit slurm'; it is one of 'echelon run': give it as --run '--procs ...'"
    ),
    # values and files, refused before anything heavy is imported
    "run --procs 0 train.py": "--procs 0: expected 1 or more",
    "run trian.py": "no script at 'trian.py'; did you mean 'train.py'?",
    "run --gpus x train.py": "--gpus 'x' is neither a count (4) nor a list (0,1,3)",
    "run --on_stall no train.py": "--on-stall 'no' is neither end nor wait",
    "run --plan none.json train.py": "plan 'none.json': there is no such file; 'echelon plan --save' writes one",
    "run --nnodes 2 train.py": (
        "a job on 2 hosts needs a rendezvous address; give every host the same --master HOST:PORT, where HOST is one "
        "of them"
    ),
    "run --timeline 9:1 train.py": (
        "--timeline '9:1': steps count from 1, and the first comes before the last; write 5:10"
    ),
    "doctor --procs 0": "--procs 0: expected 1 or more",
    "verify trian.py": "no script at 'trian.py'; did you mean 'train.py'?",
    "verify --steps 0 train.py": "--steps 0 compares nothing; give 1 or more",
    "verify --procs 0 train.py": "--procs 0: expected 1 or more",
    "memory trian.py": "MODEL: no file at 'trian.py'; did you mean 'train.py'?",
    "memory zoo:bert_base --stages 0": "--stages 0: expected 1 or more",
    "memory zoo:bert_base --batch_size 0": "--batch-size 0: expected 1 or more",
    "submit k8s --image x --nnodes 2- train.py": "--nnodes '2-' is neither a number of hosts (4) nor a range (2:8)",
    "memory zoo:bert_base --amp fp8": "--amp fp8: expected bf16, fp16 or off",
    "memory zoo:bert_base --shard 4": "--shard 4: expected 0, 1, 2 or 3",
    "plan trian.py:make": "MODEL: no file at 'trian.py'; did you mean 'train.py'?",
    "plan zoo:bert_base": "--cluster is missing; write --cluster 4x8xH100, a .yaml file, or --cluster here",
    "plan zoo:bert_base --cluster 1x8xH10": (
        "cluster '1x8xH10': there is no device 'H10' in the catalogue; did you mean 'H100'?"
    ),
    "plan --explain none.json": "plan 'none.json': there is no such file; 'echelon plan --save' writes one",
    "explain shrad=3": "Strategy has no option 'shrad'; did you mean 'shard'?",
    "explain none.yaml": "no strategy file at 'none.yaml'",
    "explain --model none.py:make": "--model: no file at 'none.py'",
    "export nowhere out.safetensors": "no checkpoint at nowhere: there is no such directory; check the path",
    "export nowhere out.parquet": "no checkpoint at nowhere: there is no such directory; check the path",
    "export logs out --format onnx": "--format onnx: expected file or hf",
    "timeline nowhere": "'nowhere' does not exist; name the log directory of a run (by default the newest in 'runs')",
    "report nowhere": "'nowhere' does not exist; name the log directory of a run (by default the newest in 'runs')",
    "watch train.py": "'train.py' is a file; name the log directory of a run (by default the newest in 'runs')",
    "timeline empty": "there is no timeline in 'empty'; record one by 'echelon run --timeline ...'",
    "timeline logs": "there is no timeline in 'logs', and none in '{here}/empty', where this run has written its log; "
    "record one by 'echelon run --timeline ...'",
    "tokenize none.txt --tokenizer t.json --out x": "no file at none.txt; check the path",
    "tokenize . --tokenizer none.json --out x": "--tokenizer none.json: there is no such file or directory; give a "
    "tokenizer.json",
    "tokenize . --tokenizer . --out x --documents all": "--documents all: expected file, blank or line",
    "fetch-data none.yaml": "'none.yaml' cannot be read: No such file or directory; check the path",
    "bench --procs 0": "--procs 0: expected 1 or more",
    "train --procs 0 --model_name lenet": "--procs 0: expected 1 or more",
    "train --model_nam lenet": (
        "there is no parameter 'model_nam' for inception_resnet_v2 on 'mock'; did you mean 'model_name'?"
    ),
    "train --model_name resnet50": (
        "there is no model 'resnet50'; the nearest are resnet_v1_50, resnet_v2_50, resnet_v1_101 "
        "(see 'echelon zoo list'; one of your own is file.py:Name)"
    ),
    "serve": "--endpoint is missing; give --endpoint HOST:PORT, and --pservers if there are several servers",
    # options of other launchers
    "run --nproc_per_node 2 train.py --lr 1": (
        "--nproc_per_node is torchrun's: write 'echelon run --procs 2 train.py --lr 1'"
    ),
    "run --nnodes=2 --nproc-per-node=4 --node_rank 1 --master_addr a --master_port 12 train.py": (
        "--nproc-per-node, --master_addr, --master_port are torchrun's: "
        "write 'echelon run --master a:12 --procs 4 --nnodes=2 --node-rank 1 train.py'"
    ),
    "run --standalone --nproc_per_node gpu train.py": (
        "--standalone, --nproc_per_node are torchrun's: write 'echelon run train.py'; --standalone is not needed"
    ),
    "run --rdzv_endpoint a:1 --rdzv_id 7 --nnodes 1:2 train.py": (
        "--rdzv_endpoint, --rdzv_id are torchrun's: "
        "write 'echelon run --master a:1 --nnodes 1:2 train.py'; --rdzv_id is not needed"
    ),
    "run --num_processes 8 --num_machines 2 --machine_rank 0 --main_process_ip a --mixed_precision bf16 train.py": (
        "--num_processes, --num_machines, --machine_rank, --main_process_ip, --mixed_precision are accelerate's: "
        "write 'echelon run --master a:29500 --procs 4 --nnodes 2 --node-rank 0 train.py'; "
        "--mixed_precision is set in the script here: Strategy(amp=...)"
    ),
    "run --num_gpus 2 --num_nodes 3 --include a:0,1 train.py": (
        "--num_gpus, --num_nodes, --include are deepspeed's: write 'echelon run --procs 2 --nnodes 3 train.py'; "
        "--include is --hosts a:8,b:8 here, and --gpus 0,2 for GPUs"
    ),
    "run --ips a,b --gpus 0,1 --log_dir x train.py": (
        "--ips is fleetrun's: write 'echelon run --nnodes 2 --master a:29500 --gpus 0,1 --log-dir x train.py'"
    ),
    "run --worker_num 2 --server_num 1 train.py": (
        "--worker_num, --server_num are fleetrun's: write 'echelon run --workers 2 --servers 1 train.py'"
    ),
    # options of submit after the script: nothing is submitted
    "submit k8s --image x train.py --dry-run": (
        "--dry-run stands after the script and goes to train.py; options of 'echelon submit k8s' come before it: "
        "'echelon submit k8s --dry-run train.py' (one of the script's own goes behind '--': 'train.py -- --dry-run')"
    ),
    "submit slurm declares.py --dry_run": (
        "--dry_run stands after the script and goes to declares.py; options of 'echelon submit slurm' come before "
        "it: 'echelon submit slurm --dry_run declares.py' "
        "(one of the script's own goes behind '--': 'declares.py -- --dry_run')"
    ),
    "submit slurm train.py --nodes=2": (
        "--nodes=2 stands after the script and goes to train.py; options of 'echelon submit slurm' come before it: "
        "'echelon submit slurm --nodes=2 train.py' "
        "(one of the script's own goes behind '--': 'train.py -- --nodes=2')"
    ),
    "submit slurm train.py --nnodes 2": (
        "--nnodes 2 stands after the script and goes to train.py; options of 'echelon submit slurm' come before it: "
        "'echelon submit slurm --nnodes 2 train.py' "
        "(one of the script's own goes behind '--': 'train.py -- --nnodes 2')"
    ),
}

#: Options by an earlier name: today's, and a part of all that is printed.
EARLIER = {
    "plan zoo:bert_base --batch 0 --cluster V100": ("--batch is called --global-batch", "--global-batch 0: expected 1"),
    "memory zoo:bert_base --batch=0": ("--batch is called --batch-size", "--batch-size 0: expected 1 or more"),
    "memory zoo:bert_base --merge 0": ("--merge is called --gradient-merge", "--gradient-merge 0: expected 1 or more"),
    "explain --ranks 0": ("--ranks is called --procs", "--procs 0: expected"),
    "submit slurm --dry-run --nodes 3 train.py": ("--nodes is called --nnodes", "#SBATCH --nodes=3"),
    "submit k8s --dry-run --image x --hosts 3 train.py": ("--hosts is called --nnodes", "parallelism: 3"),
    "doctor --json nowhere/x.json": ("--json is called --save", "--save nowhere/x.json: there is no directory"),
    "fetch-data none.yaml --workers 2": ("--workers is called --parts", "'none.yaml' cannot be read"),
}

OF_THE_ZOO = (
    "zoo show lenett",
    "zoo copy lenett",
    "plan zoo:lenett",
    "memory zoo:lenett,a=1",
    "train --dataset_name digitz",
)

#: Commands that succeed, and a part of what they print.
FINE = {
    "--version": "echelon 0.",
    "version": "(torch ",
    "-h": "completion",
    "run -h": "usage: echelon run",
    "submit k8s -h": "usage: echelon submit k8s",
    "zoo list -h": "usage: echelon zoo list",
    "submit slurm --dry_run --log_dir here declares.py --nnodes 2": "declares.py --nnodes 2",
    "submit slurm --dry-run train.py -- --nnodes 2": "train.py -- --nnodes 2",
    "completion bash": "complete -o default -F _echelon_completion echelon",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    made = tmp_path_factory.mktemp("commands")
    (made / "train.py").write_text("import sys; print('given', sys.argv[1:])\n")
    (made / "declares.py").write_text("parser.add_argument('--nnodes'); parser.add_argument('--dry-run')\n")
    (made / "empty").mkdir()
    (made / "logs").mkdir()
    note_elsewhere(made / "logs", made / "empty")
    return made


@pytest.fixture(scope="module")
def answers(place):
    """The answers to all commands of this file, given without torch."""
    words = {each: each.split() for each in (*MISTAKES, *EARLIER, *FINE, *OF_THE_ZOO)}
    ended = subprocess.run(
        [sys.executable, "-c", REFUSING],
        cwd=place,
        input=json.dumps(words),
        env=_environment(COLUMNS="200"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("words", MISTAKES)
def test_mistake_is_one_line_without_torch(answers, place, words):
    assert answers[words] == [2, "", f"echelon: {MISTAKES[words]}\n".replace("{here}", str(place))]


@pytest.mark.parametrize("words", OF_THE_ZOO[:-1])
def test_model_that_the_zoo_has_not_is_told_without_torch(answers, words):
    code, out, err = answers[words]
    assert (code, out) == (2, "")
    assert err.startswith("echelon: there is no model 'lenett'; the nearest are lenet, ")


def test_data_set_that_is_not_there_is_told_without_torch(answers):
    code, out, err = answers["train --dataset_name digitz"]
    assert (code, out) == (2, "")
    assert err.startswith("echelon: there is no data set 'digitz'; did you mean 'digits'? known: adult, ")


@pytest.mark.parametrize("words", EARLIER)
def test_earlier_name_of_an_option_works_with_a_line(answers, words):
    code, out, err = answers[words]
    told, rest = EARLIER[words]
    assert isinstance(code, int)
    assert err.startswith(f"echelon: {told} now\n")
    assert rest in out + err.partition("\n")[2]


@pytest.mark.parametrize("words", FINE)
def test_command_needs_no_torch(answers, words):
    code, out, err = answers[words]
    assert (code or 0, err) == (0, "")
    assert FINE[words].lower() in out.lower()


def test_summaries_are_whole_at_any_width(answers, place):
    assert "..." not in answers["-h"][1].partition("Commands:")[2].replace("(--procs ...)", "")
    lines = _echelon(place, "-h", COLUMNS="70").stdout.splitlines()
    assert max(map(len, lines)) <= 70 < max(map(len, answers["-h"][1].splitlines()))
    assert not any(line.endswith("...") for line in lines[1:])


def test_options_after_the_script_are_told(place):
    told = _echelon(place, "run", "--log_dir", "log", "train.py", "--procs", "2", "--lr", "1")
    assert (told.returncode, told.stdout) == (0, "given ['--procs', '2', '--lr', '1']\n")
    assert told.stderr.startswith(
        "echelon: --procs 2 stands after the script and goes to train.py; options of 'echelon"
    )


def test_completion_in_bash(place):
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("there is no bash here")
    (place / "echelon").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m echelon "$@"\n')
    (place / "echelon").chmod(0o755)
    asked = {
        "ver": "verify version", "run --pro": "--procs", "run --log_": "--log-dir", "zoo s": "show",
        "run train.py --pro": "", "doctor --node": "--node-rank",
    }  # fmt: skip
    script = ["source <(echelon completion bash)"]
    for words in asked:
        script += [f"COMP_WORDS=(echelon {words}); COMP_CWORD={len(words.split())}", "_echelon_completion"]
        script += ['echo "${COMPREPLY[*]}"']
    path = f"{place}:{os.environ['PATH']}"
    ended = subprocess.run(
        [shell, "-c", "\n".join(script)],
        cwd=place,
        env=_environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert dict(zip(asked, ended.stdout.splitlines(), strict=True)) == asked


def _echelon(place: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "echelon", *words],
        cwd=place,
        env=_environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _environment(**variables: str) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    strangers = ("PADDLE_", "SLURM_", "ECHELON_", "RANK", "WORLD_SIZE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(strangers)}
    return inherited | {"PYTHONPATH": root} | variables
