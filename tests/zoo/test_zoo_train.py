"""The train command as a whole: what a run is made of, that it goes on, and that mistakes cost nothing."""

from __future__ import annotations

import json
import os
import runpy
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import finish, here, start
from harness import run
from training import train_here

from echelon.base.errors import UsageError
from echelon.cli.launcher_options import launcher_options
from echelon.optim import FTRL, LAMB, LARS
from echelon.planner import Cluster
from echelon.tools.plan_report.model_source import find_source
from echelon.tools.plan_report.plan_options import PlanOptions
from echelon.zoo import all_datasets, all_models
from echelon.zoo.copy_script import script
from echelon.zoo.entry import Request
from echelon.zoo.sample import sample
from echelon.zoo.tasks import TASKS, pretraining, span, tokens
from echelon.zoo.train.optimizers import make_optimizer, make_schedule, stretch
from echelon.zoo.train.parameter_table import markdown
from echelon.zoo.train.resolve import resolve
from echelon.zoo.train.strategies import make_strategy, requested_strategy
from echelon.zoo.train.train_arguments import sort_words
from echelon.zoo.zoo_tables import list_zoo, show_zoo_entry

LENET = ("--model_name", "lenet", "--dataset_name", "digits", "--image_size", "8", "--batch_size", "32")


def trained(words: tuple[str, ...], directory: str) -> dict[str, Any]:
    """The last line, on the rank that says it."""
    lines = train_here(words, directory).splitlines()
    return dict(json.loads(lines[-1])) if lines and lines[-1].startswith("{") else {}


def last_line(out: str) -> dict[str, Any]:
    return dict(json.loads(out.splitlines()[-1]))


def resolved_with(*words: str) -> Any:
    return resolve(sort_words(words, launcher_options()))


# ---- the command ----


def test_a_killed_run_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    words = (*LENET, "--stop_at_step", "40", "--log_loss_every_n_iters", "1", "--save_checkpoints_steps", "4")
    whole = run(trained, (*words, "--output_dir", "whole"), str(tmp_path), ranks=1)[0]
    process = start("train", *words, "--output_dir", "cut", cwd=tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 9/"):
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    kept = sorted(path.name for path in (tmp_path / "cut" / "checkpoints").glob("step-*"))
    assert kept
    assert "step-00000040" not in kept
    out = run(train_here, (*words, "--output_dir", "cut"), str(tmp_path), ranks=1)[0]
    assert "resumed from" in out
    found = last_line(out)
    assert found["steps"] == 40
    # the launcher gave its rank more threads than the harness does, and sums in another order
    assert found["final_loss"] == pytest.approx(whole["final_loss"], rel=1e-4)
    assert found["test_loss"] == pytest.approx(whole["test_loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--model_name", "lenett"), "echelon: there is no model 'lenett'; the nearest are lenet, "),
        ((*LENET, "--dgc", "--lars"), "echelon: lars and dgc do not combine"),
        ((*LENET, "--compile", "--stages", "2"), "echelon: --compile does not go with --stages"),
        ((*LENET, "--procs", "0"), "echelon: --procs 0: expected"),
    ],
)
def test_a_mistake_costs_no_process(words: tuple[str, ...], line: str, tmp_path: Path) -> None:
    ended = finish(start("train", *words, cwd=tmp_path))
    assert ended.code == 2
    assert ended.err.startswith(line)
    assert len(ended.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_rank_that_finds_no_data_says_so_and_the_command_fails(tmp_path: Path) -> None:
    ended = finish(start("train", "--model_name", "lenet", "--dataset_name", "mnist", cwd=tmp_path))
    assert ended.code == 1
    assert "say where it is with --dataset_dir" in ended.first_line


def test_fresh_forgets_what_an_earlier_run_left_and_nothing_else(tmp_path: Path) -> None:
    words = (*LENET, "--stop_at_step", "2", "--output_dir", "out")
    first = run(trained, words, str(tmp_path), ranks=1)[0]
    (tmp_path / "out" / "notes.txt").write_text("mine")
    again = run(trained, (*words[:-3], "4", *words[-2:]), str(tmp_path), ranks=1)[0]
    fresh = run(trained, (*words, "--fresh"), str(tmp_path), ranks=1)[0]
    assert (first["steps"], again["steps"], fresh["steps"]) == (2, 4, 2)
    assert fresh["final_loss"] == pytest.approx(first["final_loss"], rel=1e-6)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_fresh_forgets_nothing_for_a_command_that_is_wrong(tmp_path: Path) -> None:
    kept = tmp_path / "out" / "checkpoints" / "step-1"
    kept.mkdir(parents=True)
    ended = here("train", *LENET, "--output_dir", "out", "--fresh", "--procs", "0", cwd=tmp_path)
    assert ended.err.startswith("echelon: --procs 0: expected")
    assert kept.is_dir()


def test_a_run_that_is_over_is_judged_again_and_trains_no_more(tmp_path: Path) -> None:
    words = (*LENET, "--stop_at_step", "3", "--output_dir", "out")
    first, again = (run(trained, words, str(tmp_path), ranks=1)[0] for _ in range(2))
    assert again["steps"] == 3
    assert again["final_loss"] is None
    assert again["test_loss"] == pytest.approx(first["test_loss"], rel=1e-6)


@pytest.mark.parametrize(
    "layout", [("--stages", "2"), ("--split", "model"), ("--split", "2"), ("--shard", "3"), ("--seed", "0")]
)
def test_layouts_give_the_numbers_of_one_process(
    layout: tuple[str, ...], tmp_path: Path, alone: dict[str, Any]
) -> None:
    whole = layout[0] in ("--stages", "--split")  # one copy of the model, which gets the whole batch
    batch = ("--batch_size", "32" if whole else "16")
    found = run(trained, (*LENET[:-2], *batch, *BRIEF, *layout), str(tmp_path), ranks=2)[0]
    for name in ("final_loss", "test_loss", "accuracy"):
        assert found[name] == pytest.approx(alone[name], rel=2e-5), name


BRIEF = ("--stop_at_step", "6", "--dropout", "0")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(trained, (*LENET, *BRIEF), str(tmp_path_factory.mktemp("alone")), ranks=1)[0]


# ---- the zoo itself ----


def test_every_model_and_data_set_of_the_list_is_there() -> None:
    models = (
        "lenet cifarnet alexnet vgg_11 vgg_16 vgg_19 resnet_v1_18 resnet_v1_34 resnet_v1_50 resnet_v1_101 "
        "resnet_v1_152 resnet_v2_18 resnet_v2_34 resnet_v2_50 resnet_v2_101 resnet_v2_152 inception_v1 "
        "inception_v2 inception_v3 inception_v4 inception_resnet_v2 mobilenet_v1 mobilenet_v2 vit bert_tiny "
        "bert_mini bert_small bert_medium bert_base bert_large gpt t5_moe large_scale_classification wide_deep "
        "deepfm dlrm word2vec toy"
    )
    data_sets = (
        "mock digits mnist cifar10 flowers image_folder imagenet tar_shards text squad glue masked_lm wiki criteo csv "
        "parquet adult word_pairs pairs"
    )
    wanted = models.split(" ")
    assert not set(wanted) - set(all_models())
    assert not set(data_sets.split(" ")) - set(all_datasets())
    text, data = list_zoo(as_json=False), json.loads(list_zoo(as_json=True))
    assert all(f" {name} " in text for name in wanted)
    assert set(data["models"]) == set(all_models())


@pytest.mark.parametrize("name", sorted(all_models()))
def test_an_entry_fits_the_rest(name: str) -> None:
    """Tasks are known, defaults are parameters, the mock data set feeds each of its tasks."""
    entry = all_models()[name]
    found = resolved_with("--model_name", name)
    assert all(task in TASKS for tasks in entry.tasks.values() for task in tasks)
    assert not (set(entry.defaults) | set(entry.tiny) | set(entry.counted)) - set(found.values)
    assert found.dataset.name == "mock"
    assert set(entry.tasks) == {"pretrain", "finetune"}
    assert all(task in found.dataset.tasks for tasks in entry.tasks.values() for task in tasks)


def test_show_says_what_a_model_costs() -> None:
    found = json.loads(show_zoo_entry("lenet", as_json=True))
    # by hand: 28 x 28 x 25 x 32, 14 x 14 x 25 x 32 x 64, 64 x 49 x 1024, 1024 x 10
    assert found["multiply_adds"] == 627_200 + 10_035_200 + 3_211_264 + 10_240
    assert found["parameters"] == 3_274_634
    text = show_zoo_entry("lenet", as_json=False)
    assert "3,274,634" in text
    assert "--dropout" in text
    assert "feeds" in show_zoo_entry("digits", as_json=False)
    with pytest.raises(UsageError, match="there is no model 'lenot'; the nearest are lenet, "):
        show_zoo_entry("lenot", as_json=False)


@pytest.mark.parametrize(
    "name", ["lenet", "resnet_v1_50", "bert_tiny", "t5_moe_tiny", "wide_deep", "inception_v4", "toy"]
)
def test_a_copied_model_is_the_same_model(name: str, tmp_path: Path) -> None:
    """Its script stands alone, and what it builds draws the same weights under the same names."""
    path = tmp_path / "copied.py"
    path.write_text(script(name))
    assert "registry" not in path.read_text()
    torch.manual_seed(3)
    copied = runpy.run_path(str(path))["make_model"]().state_dict()
    torch.manual_seed(3)
    ours = sample(name).model.state_dict()
    assert list(copied) == list(ours)
    assert all(torch.equal(copied[key], ours[key]) for key in ours)


def test_a_copied_script_trains_as_the_command_does(tmp_path: Path) -> None:
    source = script("toy").replace("'stop_at_step': 100", "'stop_at_step': 5")
    (tmp_path / "toy.py").write_text(source)
    ended = run(_run_script, str(tmp_path / "toy.py"), str(tmp_path), ranks=1)[0]
    fixed = ("--learning_rate_decay_type", "fixed")  # the script has no schedule
    ours = run(trained, ("--model_name", "toy", "--stop_at_step", "5", *fixed), str(tmp_path), ranks=1)[0]
    assert ended["loss"] == pytest.approx(ours["test_loss"], rel=1e-5)


def _run_script(path: str, directory: str) -> dict[str, float]:
    import ast
    import contextlib
    import io

    os.chdir(directory)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(path, run_name="__main__")
    return dict(ast.literal_eval(next(line for line in said.getvalue().splitlines() if line.startswith("{"))))


# ---- its parts ----


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("adadelta", torch.optim.Adadelta, {"rho": 0.95, "eps": 1e-8}),
        ("adagrad", torch.optim.Adagrad, {"initial_accumulator_value": 0.1, "eps": 1e-8}),
        ("adam", torch.optim.Adam, {"betas": (0.9, 0.999), "eps": 1e-8}),
        ("adamw", torch.optim.AdamW, {"betas": (0.9, 0.999), "eps": 1e-8}),
        ("ftrl", FTRL, {"lr_power": -0.5, "initial_accumulator": 0.1, "l1": 0.0, "l2": 0.0}),
        ("lamb", LAMB, {"betas": (0.9, 0.999), "eps": 1e-6}),
        ("lars", LARS, {"momentum": 0.9}),
        ("momentum", torch.optim.SGD, {"momentum": 0.9}),
        ("rmsprop", torch.optim.RMSprop, {"alpha": 0.9, "momentum": 0.9, "eps": 1.0}),
        ("sgd", torch.optim.SGD, {"momentum": 0}),
    ],
)
def test_optimizers_are_made_as_their_parameters_say(name: str, kind: type, expected: dict[str, Any]) -> None:
    values = {p: v.value for p, v in resolved_with("--model_name", "toy").values.items()}
    values |= {"optimizer": name, "learning_rate": 0.3, "weight_decay": 0.01}
    made = make_optimizer(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)), Request(values, "x"))
    assert type(made) is kind
    assert {key: made.param_groups[0][key] for key in expected} == expected
    assert all(group["lr"] == 0.3 for group in made.param_groups)
    if name != "ftrl":  # the matrix decays; bias and norm do not
        assert [(len(group["params"]), group["weight_decay"]) for group in made.param_groups] == [(1, 0.01), (3, 0.0)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--learning_rate_decay_type", "fixed"), [1.0] * 5),
        (
            (
                "--learning_rate_decay_type",
                "exponential",
                "--learning_rate_decay_factor",
                "0.5",
                "--num_epochs_per_decay",
                "1.5",
            ),
            [1, 1, 1, 0.5, 0.5, 0.5, 0.25],
        ),
        (("--learning_rate_decay_type", "polynomial", "--end_learning_rate", "0.2"), [1, 0.92, 0.84, 0.76, 0.68]),
        (("--decay_scheme", "luong5"), [1, 1, 1, 1, 1, 0.5, 0.25, 0.125, 0.0625, 0.03125]),
        (("--warmup_steps", "2", "--learning_rate_decay_type", "fixed"), [0.01, 0.1, 1, 1]),
    ],
)
def test_the_rate_follows_its_parameters(words: tuple[str, ...], expected: list[float]) -> None:
    """Ten steps in all, two an epoch."""
    found = resolved_with("--model_name", "toy", "--learning_rate", "1", *words)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = make_schedule(optimizer, found.request)
    stretch(schedule, found.request, total_steps=10, steps_per_epoch=2)
    rates = []
    for _ in expected:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def test_the_strategy_has_what_other_parameters_ask_of_it() -> None:
    found = resolved_with("--model_name", "resnet_v1_18", "--max_gradient_norm", "2", "--recompute")
    strategy, notices = make_strategy(found, torch.device("cpu"))
    assert strategy.clip == 2.0
    assert strategy.recompute is not None
    assert strategy.recompute.checkpoints == found.model.recompute  # type: ignore[union-attr]
    assert strategy.amp is None
    assert "ignored on this CPU" in notices[0]
    advised, notices = make_strategy(resolved_with("--model_name", "bert_tiny", "--auto"), torch.device("cpu"))
    assert advised.auto is not None  # the norm that BERT advises gives way to the plan
    assert advised.clip is None
    assert "max_gradient_norm 1.0 is ignored" in notices[0]
    with pytest.raises(UsageError, match="clip and auto do not combine"):
        requested_strategy(resolved_with("--model_name", "bert_tiny", "--auto", "--max_gradient_norm", "2"))
    with pytest.raises(UsageError, match="set the same value"):
        requested_strategy(resolved_with("--model_name", "toy", "--max_gradient_norm", "2", "--clip", "1"))


def test_losses_are_means_over_samples_however_the_batch_is_cut() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 5, 7), torch.randint(7, (4, 5))
    labels[0, 1:] = labels[2] = -100  # one sequence with a single word, one with none
    each = [tokens(logits[i : i + 1], labels[i : i + 1]) for i in range(4)]
    assert tokens(logits, labels) == pytest.approx(float(torch.stack(each).mean()), rel=1e-6)
    assert each[2] == 0
    log = torch.log_softmax(logits[0, 0].double(), 0)[labels[0, 0]]
    assert each[0] == pytest.approx(-float(log), rel=1e-5)
    follows, after = torch.randn(4, 2), torch.randint(2, (4,))
    parts = [
        pretraining((logits[i : i + 1], follows[i : i + 1]), (labels[i : i + 1], after[i : i + 1])) for i in range(4)
    ]
    assert pretraining((logits, follows), (labels, after)) == pytest.approx(float(torch.stack(parts).mean()), rel=1e-6)
    ends = torch.randint(5, (4, 2))
    assert span(logits[..., :2], ends) == pytest.approx(
        float(torch.stack([span(logits[i : i + 1, :, :2], ends[i : i + 1]) for i in range(4)]).mean()), rel=1e-6
    )


def test_the_table_in_the_docs_is_the_commands_own() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "zoo.md").read_text(encoding="utf-8")
    assert markdown() in page, "make it anew with: python -m echelon.zoo.train.parameter_table"


def test_a_plan_is_found_for_a_model_of_the_zoo() -> None:
    cluster = Cluster.parse("1x2xA100")
    source = find_source(PlanOptions(model="zoo:lenet,image_size=8", cluster="1x2xA100", batch=64), cluster)
    assert source.model is not None
    assert sum(p.numel() for p in source.model.parameters()) == 325_514
    with pytest.raises(UsageError, match="is no setting; write zoo:NAME,setting=value"):
        find_source(PlanOptions(model="zoo:lenet,image_size", cluster="1x2xA100", batch=64), cluster)
