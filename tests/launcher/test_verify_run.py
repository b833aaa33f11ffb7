"""``echelon verify`` as a command: both runs of a script, the exit code, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from command import echelon, here, write

from echelon.base.errors import UsageError
from echelon.cli.commands.verify import VerifyOptions, check_answer
from echelon.tools.verify.verify_request import VerifyRequest

SCRIPT = """
import sys
import torch, echelon
import torch.nn.functional as F

echelon.init(seed=0)

class Odd(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 + (echelon.rank() if sys.argv[1] == "odd" else 0))

model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), Odd(6, 3))
data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randint(3, (24,)))
engine = echelon.distribute(
    model, optimizer=torch.optim.AdamW(model.parameters()), loss=F.cross_entropy,
    checkpoint=echelon.Checkpoint(dir="kept", every=1),
)
print("begun")
for x, y in engine.loader(data, batch_size=4):
    engine.step(x, y)
    engine.save("saved")
print("the script went on")
"""


def test_the_layer_is_named_the_code_is_one_and_nothing_is_left(tmp_path: Path) -> None:
    write(tmp_path / "train.py", SCRIPT)
    ended = echelon("verify", "train.py", "--procs", 2, "--steps", 2, "--json", "--", "odd", cwd=tmp_path)
    assert ended.code == 1, ended.err
    found = json.loads(ended.out)  # nothing of the script's own output
    assert "begun" in ended.err
    assert "the script went on" not in ended.err
    assert (found["status"], found["ranks"], len(found["rows"])) == ("differs", 2, 2)
    assert (found["parting"]["what"], found["parting"]["where"], found["parting"]["kind"]) == ("outputs", "2", "Odd")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


ALIKE = """
import torch, echelon

echelon.init(seed=0)
model = torch.nn.Linear(4, 3)
engine = echelon.distribute(
    model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.functional.cross_entropy
)
for x, y in torch.utils.data.DataLoader([(torch.ones(4), 1)] * 8, batch_size=4):
    engine.step(x, y)
"""


def test_the_same_data_on_all_ranks_has_a_code_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "train.py", ALIKE)
    ended = echelon("verify", "train.py", "--procs", 2, "--steps", 2, cwd=tmp_path)
    assert ended.code == 3, ended.err
    assert "cannot tell: " in ended.out
    assert "same:" not in ended.out


def test_a_script_that_distributes_nothing_is_told(tmp_path: Path) -> None:
    write(tmp_path / "hello.py", "print('hello')")
    ended = echelon("verify", "hello.py", cwd=tmp_path)
    assert ended.code == 2
    assert "'hello.py' never called echelon.distribute()" in ended.err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["hello.py"]


def test_a_script_that_fails_says_so_itself(tmp_path: Path) -> None:
    write(tmp_path / "wrong.py", "raise ValueError('no data here')")
    ended = echelon("verify", "wrong.py", cwd=tmp_path)
    assert ended.code == 2
    assert "ValueError: no data here" in ended.err
    assert ended.err.splitlines()[-1] == "echelon: verify: 'wrong.py' failed on 2 processes; its output is above"
    [log] = [Path(line.partition("its log is ")[2]) for line in ended.err.splitlines() if "its log is" in line]
    assert "no data here" in log.read_text()
    assert [path.name for path in log.parent.parent.iterdir()] == ["log"]
    shutil.rmtree(log.parent.parent)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["verify", "here.py", "--steps", 0], "--steps 0 compares nothing"),
        (["verify", "here.py", "--tolerance", 0], "--tolerance 0 allows no rounding"),
        (["verify", "her.py"], "no script at 'her.py'; did you mean 'here.py'?"),
        (["verify", "here.py", "--gpus", "64"], "--gpus 64 asks for 64 GPUs"),
        (["verify", "here.py", "--step", 3], "no option '--step' for 'echelon verify'; did you mean '--steps'?"),
    ],
)
def test_mistakes_are_one_line(words: list[object], says: str, tmp_path: Path) -> None:
    write(tmp_path / "here.py", "")
    ended = here(*words, cwd=tmp_path)
    assert ended.code == 2
    assert says in ended.err
    assert ended.err.count("\n") == 1


def test_too_few_steps_are_told(tmp_path: Path) -> None:
    asked = VerifyOptions("train.py", (), False, 5, None, ())
    question = VerifyRequest(str(tmp_path), "plan", 5)
    question.note("begun", 1)
    with pytest.raises(UsageError, match=r"ended without engine.step\(\) or update\(\)"):
        check_answer(asked, question, 0, "on 2 processes")
    question.note("steps", 3)
    with pytest.raises(UsageError, match="took 3 steps on 2 processes, fewer than --steps 5; give --steps 3"):
        check_answer(asked, question, 0, "on 2 processes")
    question.answer({})
    check_answer(asked, question, 0, "on 2 processes")
    with pytest.raises(UsageError, match="failed in one process"):
        check_answer(asked, dataclasses.replace(question, role="reference"), 1, "in one process")
