"""Every example does what its first lines say, on two real processes.

One is started by the command; the others run as scripts on ranks that need no fresh start (10 s a job). That
training with servers goes through the launcher is seen by test_zoo_recipes.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import sys
from pathlib import Path

import harness
import pytest
import serving
from command import echelon

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
WORDS = set(re.findall(r"\w+", "ROMEO JULIET NURSE FRIAR night love lord alas come heart stars dream rest"))


def launched(options: list[object], name: str, *args: object, cwd: Path) -> str:
    """Return the output of a job that ``echelon run`` makes of an example."""
    ended = echelon("run", *options, EXAMPLES / name, *args, cwd=cwd)
    assert ended.code == 0, ended.err
    return ended.out


def said(name: str, args: tuple[str, ...], directory: str) -> str:
    """Run an example as a script on this rank and return its output."""
    os.chdir(directory)
    sys.argv = [str(EXAMPLES / name), *args]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return out.getvalue()


def run(name: str, *args: str, cwd: Path) -> str:
    """Return the output of rank 0."""
    return harness.run(said, name, args, str(cwd), ranks=2)[0]


def served(name: str, *args: str, servers: int, cwd: Path) -> str:
    """Return the output of worker 0."""
    return serving.served(said, name, args, str(cwd), servers=servers, workers=2)[0]


@pytest.mark.usefixtures("warm")
def test_digits_learns_and_says_where_everything_is(tmp_path: Path) -> None:
    out = launched(["--procs", 2], "digits.py", "--epochs", 5, "--dir", tmp_path / "run", cwd=tmp_path)
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
    out = run("adversarial.py", "--steps", "400", cwd=tmp_path)
    found = re.search(r"800 updates on 2 processes; mean radius ([\d.]+)", out)
    assert found, out
    assert 1.7 < float(found[1]) < 2.3


def test_buckets_save_padding(tmp_path: Path) -> None:
    out = run("variable_length.py", "--epochs", "1", cwd=tmp_path)
    plain, buckets = (float(value) for value in re.findall(r"padding +([\d.]+)%", out))
    assert buckets < plain / 3


def test_strategies_learn_alike_and_send_less(tmp_path: Path) -> None:
    out = run("strategies.py", "--epochs", "8", cwd=tmp_path)
    found = re.findall(r"^(.*?) +accuracy +([\d.]+)% +sent by each rank in a step: ([\d.]+) kB$", out, re.MULTILINE)
    assert len(found) == 6, out
    sent = {name: float(kilobytes) for name, _, kilobytes in found}
    assert all(float(accuracy) > 94 for _, accuracy, _ in found), out
    assert sent["fp16_allreduce"] < 0.51 * sent["plain"]
    assert sent["localsgd, k = 8"] < 0.13 * sent["plain"]
    assert sent["dgc, 99 % kept back"] < 0.05 * sent["plain"]


def test_a_pipeline_learns_to_write(tmp_path: Path) -> None:
    out = run("pipeline.py", "--epochs", "2", cwd=tmp_path)
    found = re.match(r"([\d,]+) of ([\d,]+) weights on process 0; loss ([\d.]+)\n", out)
    assert found, out
    here, whole = (int(number.replace(",", "")) for number in found.groups()[:2])
    assert 0.45 < here / whole < 0.55
    assert float(found[3]) < 1.2  # guessing letters by how often they come gives 3.2
    assert len(set(re.findall(r"\w+", out[found.end() :])) & WORDS) > 1, out


def test_many_classes_example_learns_with_half_the_classes_each(tmp_path: Path) -> None:
    """Two processes that hold half of the classes each learn to tell all classes apart."""
    out = run("many_classes.py", cwd=tmp_path)
    assert "each of 2 processes: 120 pictures a step, 2,500 of 5,000 classes" in out
    found = re.search(r"of 5,000 unseen pictures ([\d.]+)% right, ([\d.]+)% among five", out)
    assert found, out
    assert float(found[1]) > 90
    assert float(found[2]) > 98


def test_experts_learn_what_one_dense_layer_cannot(tmp_path: Path) -> None:
    out = run("experts.py", cwd=tmp_path)
    pattern = r"^(\w+) +loss on unseen tokens ([\d.]+) +([\d,]+) weights, +([\d,]+) of them on each process$"
    found = {name: rest for name, *rest in re.findall(pattern, out, re.MULTILINE)}
    assert float(found["experts"][0]) < 0.6 * float(found["dense"][0]), out
    assert found["experts"][1:] == ["8,704", "4,416"]  # half of the experts, and the whole gate


def test_wide_and_deep_ranks_the_rich_first(tmp_path: Path) -> None:
    out = served("wide_deep.py", "--mode", "sync", servers=1, cwd=tmp_path)
    found = re.search(r"sync: AUC ([\d.]+) on 4,000 people", out)
    assert found, out
    assert float(found[1]) > 0.93


def test_deepfm_learns_on_two_servers(tmp_path: Path) -> None:
    out = served("deepfm.py", "--mode", "hybrid", servers=2, cwd=tmp_path)
    found = re.search(r"hybrid: loss ([\d.]+) -> ([\d.]+); ([\d,]+) rows on the servers", out)
    assert found, out
    assert float(found[2]) < float(found[1]) - 0.05
    assert int(found[3].replace(",", "")) > 1000


def test_words_find_their_topic(tmp_path: Path) -> None:
    out = served("word2vec.py", "--mode", "async", servers=1, cwd=tmp_path)
    found = re.search(r"async: (\d+)% of all words have a nearest neighbour of their own topic", out)
    assert found, out
    assert int(found[1]) > 90  # by chance it is 16


def test_every_example_is_tested() -> None:
    tested = {"adversarial.py", "digits.py", "strategies.py", "variable_length.py"}
    tested |= {"fluid_nccl2.py", "fluid_pservers.py"}  # test_fluid_ports.py
    tested |= {"fleet_resnet50.py"}  # tests/zoo/test_fleet_port.py
    tested |= {"train.py"}  # tests/docs/test_readme.py
    tested |= {"llama.py"}  # tests/third_party
    tested |= {"experts.py", "many_classes.py", "pipeline.py", "deepfm.py", "wide_deep.py", "word2vec.py", "auto.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_auto_finds_a_plan_says_why_and_learns(tmp_path: Path) -> None:
    out = run("auto.py", cwd=tmp_path)
    choice = r"auto: (replicate|split|stage) 2.*: predicted [\d.]+ ms a step and [\d.]+ MB on a device"
    assert re.search(choice, out), out
    assert re.search(r"predicted [\d.]+ ms a step, measured [\d.]+ ms \([+-]\d+%\)", out), out
    found = re.search(r"loss on 500 unseen words after 200 steps: ([\d.]+)", out)
    assert found, out
    assert float(found[1]) < 0.02
