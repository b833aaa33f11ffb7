"""Models of the zoo learn real data, and learn it the same in every layout.

What is learned is read from the last line of ``echelon train``: once of the real command, else of the same words on
ranks of the harness, which start ten times as fast. Longer runs of the same are benchmarks/zoo/zoo_learning.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness import run
from serving import served
from training import train_here

from benchmarks.zoo.zoo_learning import (
    ADULT,
    DATA,
    MNIST,
    SHAKESPEARE,
    character_losses,
    easy_masked,
    here,
    split_words,
    train,
)

pytestmark = pytest.mark.timeout(600)


def needs(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not here(*names), reason=f"no {', '.join(names)} in ../shared/data or $ECHELON_TEST_DATA")


# ---- learning, by the real command ----


def test_lenet_reads_digits_on_two_processes(tmp_path: Path) -> None:
    """98.3 to 99.0 % with three seeds, in one process."""
    words = "--model_name lenet --dataset_name digits --image_size 8 --num_epochs 15 --stop_at_step 0"
    words += " --learning_rate_decay_factor 0.85"  # an epoch is 24 steps, and the model's own is for epochs of more
    assert train(f"{words} --procs 2 --batch_size 32", tmp_path)["accuracy"] >= 0.97


# ---- learning, on ranks of the harness ----


@needs(*MNIST)
def test_lenet_reads_mnist_on_two_processes(tmp_path: Path) -> None:
    """96.4 to 97.9 % with three seeds after one epoch of 8,000 images; a linear model has 85 % then, and 92 at last."""
    words = "--model_name lenet --dataset_name mnist --dataset_dir $DATA --num_epochs 1 --stop_at_step 0"
    found = on_ranks(f"{words} --batch_size 32", 2, tmp_path / "run")
    assert found["mesh"] == "replicate 2"
    assert found["steps"] == 125
    assert found["accuracy"] >= 0.95


@needs(SHAKESPEARE)
def test_gpt_learns_more_of_shakespeare_than_pairs_of_characters(tmp_path: Path) -> None:
    single, pair = character_losses((DATA / SHAKESPEARE).read_text(), 0.02)
    assert single == pytest.approx(3.376, abs=0.001)
    assert pair == pytest.approx(2.500, abs=0.001)
    words = f"--model_name gpt_tiny --dataset_name text --dataset_dir $DATA --file_pattern {SHAKESPEARE}"
    words += " --test_part 0.02 --num_layers 2 --max_seq_length 32 --batch_size 32 --stop_at_step 300"
    assert on_ranks(words, 1, tmp_path / "run")["test_loss"] < 2.3


# ---- learning, in this and that layout ----


def last_line(words: str, cwd: str) -> dict[str, Any]:
    """Return what the last line of ``echelon train WORDS`` says on the first rank, and the mesh where it names one."""
    lines = train_here(split_words(words), cwd).splitlines()
    if not lines or not lines[-1].startswith("{"):
        return {}  # the other ranks print no result
    mesh = re.search(r"mesh: (.*) \(", "\n".join(lines))
    return {"mesh": mesh and mesh[1], **json.loads(lines[-1])}


def on_ranks(words: str, ranks: int, cwd: Path) -> dict[str, Any]:
    cwd.mkdir()
    return dict(run(last_line, words, str(cwd), ranks=ranks, timeout=500)[0])


def losses(found: dict[str, Any]) -> list[float]:
    return [found["final_loss"], found["test_loss"]]


@needs(SHAKESPEARE)
def test_bert_guesses_masked_parts_of_words_by_those_around(tmp_path: Path) -> None:
    """A run this short learns which parts of words go together, and no more: the loss is 0.30 below what it is when
    only known is how often each part occurs, and three times as many guesses are right."""
    words = f"--model_name bert_tiny --dataset_name masked_lm --dataset_dir $DATA --file_pattern {SHAKESPEARE}"
    words += " --test_part 0.02 --vocab_size_to_train 160 --max_seq_length 16 --max_predictions_per_seq 2"
    words += " --hidden_size 64 --intermediate_size 128 --dropout 0 --attention_dropout 0"
    words += " --batch_size 128 --learning_rate 0.006 --warmup_steps 30 --stop_at_step 300"
    found = on_ranks(words, 1, tmp_path / "run")
    loss, accuracy = easy_masked(words)
    assert found["test_loss"] < loss - 0.2
    assert found["accuracy"] > 2 * accuracy


LAYOUTS = {
    "replicate 2": "--batch_size 32",
    "replicate 1 x stage 2": "--batch_size 64 --stages 2",
    "replicate 1 x split 2": "--batch_size 64 --split head",
}


def test_digits_losses_equal_for_replicas_stages_and_split_head(tmp_path: Path) -> None:
    """Replicas, stages and a split head learn digits with the losses of one process."""
    words = "--model_name lenet --dataset_name digits --image_size 8 --dropout 0 --stop_at_step 20"
    alone = losses(on_ranks(f"{words} --batch_size 64", 1, tmp_path / "alone"))
    assert alone[1] < 1.8  # 2.3 is where it began
    for mesh, layout in LAYOUTS.items():
        found = on_ranks(f"{words} {layout}", 2, tmp_path / mesh)
        assert found["mesh"] == mesh
        assert losses(found) == pytest.approx(alone, rel=1e-4), mesh


@needs(SHAKESPEARE)
def test_text_is_learned_alike_by_two_stages(tmp_path: Path) -> None:
    words = f"--model_name gpt_tiny --dataset_name text --dataset_dir $DATA --file_pattern {SHAKESPEARE}"
    words += " --test_part 0.005 --num_layers 2 --max_seq_length 16 --batch_size 16 --stop_at_step 15"
    alone = losses(on_ranks(words, 1, tmp_path / "alone"))
    assert alone[1] < 3.9  # 4.2 is where it began
    found = on_ranks(f"{words} --stages 2", 2, tmp_path / "stages")
    assert found["mesh"] == "replicate 1 x stage 2"
    assert losses(found) == pytest.approx(alone, rel=1e-4)


@needs(*ADULT)
def test_adult_auc_equal_for_one_process_and_server_with_workers(tmp_path: Path) -> None:
    """Incomes are predicted as well by two workers with a server as by one process."""
    words = "--model_name wide_deep --dataset_name adult --dataset_dir $DATA --num_epochs 1"
    alone = on_ranks(f"{words} --batch_size 256", 1, tmp_path / "alone")["auc"]
    assert alone >= 0.90
    found = served(last_line, f"{words} --ps sync --batch_size 128", str(tmp_path), servers=1, workers=2)[0]
    assert found["auc"] == pytest.approx(alone, abs=0.003)
