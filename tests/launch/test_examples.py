"""Every example does what its first lines say, on two real processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from command import echelon

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run(name: str, *args: object, cwd: Path) -> str:
    ended = echelon("run", "--procs", 2, EXAMPLES / name, *args, cwd=cwd)
    assert ended.code == 0, ended.err
    return ended.out


def test_digits_learns_and_says_where_everything_is(tmp_path: Path) -> None:
    out = run("digits.py", "--epochs", 5, "--dir", tmp_path / "run", cwd=tmp_path)
    found = re.search(r"accuracy on 297 unseen images: ([\d.]+)%", out)
    assert found
    assert float(found[1]) > 95
    assert re.search(r"speed: [\d,]+ examples/s over 120 steps on 2 processes", out)
    checkpoint = re.search(r"checkpoint: (.*)", out)
    assert checkpoint
    assert (Path(checkpoint[1]) / "index.json").exists()
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["eval_accuracy"] > 0.95


def test_adversarial_finds_the_ring(tmp_path: Path) -> None:
    out = run("adversarial.py", cwd=tmp_path)
    found = re.search(r"3000 updates on 2 processes; mean radius ([\d.]+)", out)
    assert found, out
    assert 1.7 < float(found[1]) < 2.3


def test_buckets_save_padding(tmp_path: Path) -> None:
    out = run("variable_length.py", cwd=tmp_path)
    plain, buckets = (float(value) for value in re.findall(r"padding +([\d.]+)%", out))
    assert buckets < plain / 3


def test_strategies_learn_alike_and_send_less(tmp_path: Path) -> None:
    out = run("strategies.py", cwd=tmp_path)
    found = re.findall(r"^(.*?) +accuracy +([\d.]+)% +sent by each rank in a step: ([\d.]+) kB$", out, re.MULTILINE)
    assert len(found) == 6, out
    sent = {name: float(kilobytes) for name, _, kilobytes in found}
    assert all(float(accuracy) > 94 for _, accuracy, _ in found), out
    assert sent["fp16_allreduce"] < 0.51 * sent["plain"]
    assert sent["localsgd, k = 8"] < 0.13 * sent["plain"]
    assert sent["dgc, 99 % kept back"] < 0.05 * sent["plain"]


def test_every_example_is_tested() -> None:
    tested = {"adversarial.py", "digits.py", "strategies.py", "variable_length.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested
