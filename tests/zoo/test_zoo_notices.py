"""Parameters that have no effect are said to have none, and what depends on the number of ranks is said before them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from harness import run
from training import train_here

from echelon.base.errors import UsageError
from echelon.cli.commands.train import help_text
from echelon.cli.launcher_options import launcher_options
from echelon.data import Repeated
from echelon.zoo.train.hooks.hooks import named_hooks
from echelon.zoo.train.parameters import DEFAULT_HOOKS, PARAMETERS
from echelon.zoo.train.rank_checks import check_ranks
from echelon.zoo.train.resolve import TrainConfig, resolve
from echelon.zoo.train.restore.model_dir import named_file
from echelon.zoo.train.run import resolved_lines
from echelon.zoo.train.strategies import make_strategy, requested_strategy
from echelon.zoo.train.train_arguments import sort_words
from echelon.zoo.train.unused_parameters import overruled_decay, unused_loss_scale, unused_shuffle_buffer
from echelon.zoo.zoo_tables import list_zoo

CPU = torch.device("cpu")


def resolved(*words: str) -> TrainConfig:
    return resolve(sort_words(["--model_name", "lenet", *words], launcher_options()))


# ---- parameters without effect ----


def test_loss_scale_is_used_by_fp16_and_said_elsewhere() -> None:
    for scale, expected in (("128", 128.0), ("dynamic", "dynamic")):
        amp = requested_strategy(resolved("--amp", "fp16", "--loss_scale", scale)).amp
        assert (amp.dtype, amp.loss_scale) == ("fp16", expected)  # type: ignore[union-attr]
        asked = resolved("--amp", "fp16", "--loss_scale", scale)
        assert not list(unused_loss_scale(asked, requested_strategy(asked)))
    dotted = requested_strategy(resolved("--amp.dtype", "fp16", "--amp.growth", "4", "--loss_scale", "8")).amp
    assert (dotted.loss_scale, dotted.growth) == (8.0, 4.0)  # type: ignore[union-attr]
    left_alone = requested_strategy(resolved("--amp", "fp16")).amp
    assert left_alone.loss_scale is None  # type: ignore[union-attr]
    _, said = make_strategy(resolved("--amp", "bf16", "--loss_scale", "128"), CPU)
    assert said == ["loss_scale: bf16 needs none, so 128 is not used; --amp fp16 uses it"]
    for words in ((), ("--use_fp16", "false"), ("--auto",)):
        _, said = make_strategy(resolved(*words, "--loss_scale", "128"), CPU)
        assert "so 128 is not used; --amp fp16" in said[-1], words
    for words in ((), ("--loss_scale", "1.0")):  # a scale of 1 is none
        assert not any("loss_scale" in line for line in make_strategy(resolved(*words), CPU)[1])
    with pytest.raises(UsageError, match=r"--loss_scale and --amp\.loss_scale set the same value"):
        requested_strategy(resolved("--amp.dtype", "fp16", "--amp.loss_scale", "2", "--loss_scale", "4"))


def test_shuffle_buffer_and_decay_type_say_who_wins() -> None:
    asked, columns = resolved("--shuffle_buffer_size", "64"), (torch.zeros(4),)
    assert list(unused_shuffle_buffer(asked, columns)) == [
        "shuffle_buffer_size: 'mock' is shuffled as a whole, so 64 is not used; it is for streams"
    ]
    assert not list(unused_shuffle_buffer(asked, iter([])))
    assert not list(unused_shuffle_buffer(resolved(), Repeated(columns, 8)))
    both = resolved("--decay_scheme", "luong5", "--learning_rate_decay_type", "fixed")
    assert list(overruled_decay(both)) == [
        "decay_scheme: luong5 is used, and learning_rate_decay_type fixed is not; give one of them"
    ]
    assert not list(overruled_decay(resolved("--decay_scheme", "luong5")))


# ---- what is printed ----


def test_run_prints_chosen_parameters_and_one_line_for_the_rest(tmp_path: Path) -> None:
    lines = resolved_lines(resolved("--batch-size", "8"), tmp_path)
    assert "  batch_size                  8  (flag)" in lines
    assert not any("adadelta_rho" in line for line in lines)
    assert re.fullmatch(r"  \d+ others have their defaults: .*run\.json, 'echelon train --help' has them", lines[-1])


def test_help_shows_hooks_as_they_are_taken_and_any_case_is() -> None:
    assert f"[{DEFAULT_HOOKS}]" in help_text().replace("\n      ", "")
    assert list(named_hooks(resolved("--hooks", DEFAULT_HOOKS.lower()).request)) == DEFAULT_HOOKS.split(",")


def test_every_parameter_is_taken_with_dashes() -> None:
    for parameter in PARAMETERS:
        dashed = f"--{parameter.name.replace('_', '-')}"
        assert sort_words([f"{dashed}=1"], launcher_options()).run == {parameter.name: "1"}
    for name in launcher_options():
        assert sort_words([f"--{name}=1"], launcher_options()).launch == {name: "1"}


def test_the_list_has_each_model_once_by_family_and_size() -> None:
    names = [line.split()[0] for line in list_zoo(as_json=False).splitlines() if line.startswith("    ")]
    assert len(names) == len(set(names))
    assert "vit" not in names
    for family in (
        ["bert_tiny", "bert_mini", "bert_small", "bert_medium", "bert_base", "bert_large"],
        ["gpt_tiny", "gpt", "gpt_medium", "gpt_large", "gpt_xl"],
        ["resnet_v1_18", "resnet_v1_34", "resnet_v1_50", "resnet_v1_101", "resnet_v1_152", "resnet_v2_18"],
        ["t5_moe_tiny", "t5_moe"],
    ):
        first = names.index(family[0])
        assert names[first : first + len(family)] == family


# ---- before ranks start ----


@pytest.mark.parametrize(
    ("words", "ranks", "line"),
    [
        (("--stages", "2"), 3, r"one copy of the model takes 2 ranks \(2 stages\), and 3 is not a multiple"),
        (("--average", "2"), 2, "a slice of 2 ranks was asked for, but the marks fill only 1"),
        (("--marks", "layers.0=stage(0);hidden=stage(1)"), 3, "takes 2 ranks"),
        (("--profile_every_n_iters", "2", "--profile_at_task", "7"), 2, "this job has 2 ranks; give one from 0 to 1"),
    ],
)
def test_what_does_not_fit_the_ranks_is_refused_first(words: tuple[str, ...], ranks: int, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        check_ranks(resolved(*words), ranks)
    for fitting in (("--stages", "2"), ("--split", "head"), ("--average", "2", "--stages", "2"), ()):
        check_ranks(resolved(*fitting), 4)


def test_a_weights_path_is_taken_below_the_folder_or_whole(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    path = tmp_path / "base" / "model.pt"
    path.write_bytes(b"")
    folder = ("--model_dir", str(tmp_path / "base"))
    for words in ((*folder, "--ckpt_file_name", "model.pt"), (*folder, "--ckpt_file_name", str(path))):
        assert named_file(resolved("--task_type", "finetune", *words).request, "ckpt_file_name") == path
    alone = resolved("--task_type", "finetune", "--ckpt_file_name", str(path))
    assert named_file(alone.request, "ckpt_file_name") == path
    with pytest.raises(UsageError, match=r"there is no 'other\.pt' in '.*base'; it holds model\.pt"):
        named_file(resolved(*folder, "--ckpt_file_name", "other.pt").request, "ckpt_file_name")
    with pytest.raises(UsageError, match="begins with trained weights"):
        resolved("--task_type", "finetune", "--ckpt_file_name", "nowhere.pt")


def refused(words: tuple[str, ...], directory: str) -> str:
    with pytest.raises(UsageError) as caught:
        train_here(words, directory)
    return str(caught.value)


def test_batch_norm_over_one_sample_is_one_line(tmp_path: Path) -> None:
    words = ("--model_name", "large_scale_classification", "--num_classes", "9", "--feature_size", "8", "--hidden", "8")
    line = run(refused, (*words, "--batch_size", "1", "--stop_at_step", "1"), str(tmp_path), ranks=1)[0]
    assert line.startswith("--batch_size 1: batch norm needs two values of a channel")
    assert "\n" not in line
