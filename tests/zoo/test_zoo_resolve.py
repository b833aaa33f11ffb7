"""From words and files to a run: every value with its origin, and one line for every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from echelon.base.errors import UsageError
from echelon.cli.launcher_options import launcher_options
from echelon.zoo import registry
from echelon.zoo.entry import Data, Request
from echelon.zoo.entry_names import DATASETS, MODELS
from echelon.zoo.train.model_marks import mark
from echelon.zoo.train.parameters import PARAMETERS
from echelon.zoo.train.resolve import TrainConfig, resolve, with_sizes
from echelon.zoo.train.train_arguments import sort_words


def resolved(*words: str) -> TrainConfig:
    return resolve(sort_words(words, launcher_options()))


def origins(found: TrainConfig, *names: str) -> dict[str, tuple[Any, str]]:
    return {name: (found.values[name].value, found.values[name].origin) for name in names}


def test_setting_names_read_from_source_are_those_registered() -> None:
    entries = (*registry.all_models().values(), *registry.all_datasets().values())
    registered = {setting.name for entry in entries for setting in entry.settings}
    assert registered <= registry.setting_names()


@pytest.mark.parametrize(("name", "meant"), [("bach_size", "batch_size"), ("vocab_sise", "vocab_size")])
def test_a_misspelt_parameter_names_the_nearest(name: str, meant: str) -> None:
    """The first is found without the model, the second is one of the model's own."""
    with pytest.raises(UsageError, match=f"no parameter '{name}' for bert_tiny on 'mock'; did you mean '{meant}'"):
        resolved("--model_name", "bert_tiny", f"--{name}", "3")


def test_a_flag_beats_the_file_and_the_file_beats_the_model(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"model_name": "lenet", "batch_size": 16, "momentum": 0.8, "learning_rate": "1e-3"}))
    found = resolved("--config", str(file), "--batch-size", "8")
    assert origins(found, "batch_size", "momentum", "learning_rate", "optimizer", "adadelta_rho") == {
        "batch_size": (8, "flag"),
        "momentum": (0.8, str(file)),
        "learning_rate": (0.001, str(file)),
        "optimizer": ("momentum", "model"),
        "adadelta_rho": (0.95, "default"),
    }


def test_num_epochs_replaces_the_default_stop_at_step() -> None:
    """The default limit of 100 steps does not hold where a number of epochs is given."""
    assert resolved("--model_name", "lenet")["stop_at_step"] == 100
    assert resolved("--model_name", "lenet", "--num_epochs", "3")["stop_at_step"] == 0
    assert resolved("--model_name", "lenet", "--num_epochs", "3", "--stop_at_step", "5")["stop_at_step"] == 5


def test_values_are_read_as_their_types_say() -> None:
    found = resolved(
        "--model_name=lenet", "--learning_rate", "1e-2", "--fresh", "--use_fp16=False", "--warmup_steps", "7"
    )
    assert [found[name] for name in ("learning_rate", "fresh", "use_fp16", "warmup_steps")] == [0.01, True, False, 7]


def test_words_go_to_launcher_strategy_and_run() -> None:
    words = sort_words(
        ["--procs", "2", "--amp", "--localsgd.k_steps", "4", "--model_name", "lenet", "--log-dir=out", "--fresh"],
        launcher_options(),
    )
    assert words.launch == {"procs": "2", "log_dir": "out"}
    assert words.strategy == {"amp": True, "localsgd.k_steps": "4"}
    assert words.run == {"model_name": "lenet", "fresh": True}
    assert sort_words(words.again(), {}).run == words.run


def test_a_file_may_hold_strategy_marks_and_launching(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump({"model_name": "lenet", "procs": 2, "strategy": {"amp": "bf16", "shard": 1}, "shard": 2})
    )
    found = resolved("--config", str(file), "--amp.dtype", "fp16")
    assert found.strategy == {"amp": {"dtype": "fp16"}, "shard": 2}
    assert found.launch == {"procs": "2"}


def test_num_classes_comes_from_data_and_other_flag_is_refused() -> None:
    """The data set gives the number of classes, and a flag with another number is refused."""
    data = Data(train=[], facts={"num_classes": 10})
    assert origins(resolved("--model_name", "resnet_v1_18").with_data(data), "num_classes") == {
        "num_classes": (10, "data set")
    }
    with pytest.raises(UsageError, match=r"num_classes is 7 \(flag\), but data set 'mock' has 10; leave"):
        resolved("--model_name", "resnet_v1_18", "--num_classes", "7").with_data(data)


def test_sizes_beside_weights_count_and_other_flags_are_refused() -> None:
    """Sizes in the file beside the weights count, and a flag with another size is refused."""
    found = resolved("--model_name", "bert_tiny", "--num_layers", "2")
    assert with_sizes(found, {"hidden_size": 96}, "config.json")["hidden_size"] == 96
    with pytest.raises(UsageError, match=r"num_layers is 2 \(flag\), but config.json says 12; leave one out"):
        with_sizes(found, {"num_layers": 12}, "config.json")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--model_name", "resnet_50"], r"there is no model 'resnet_50'; the nearest are resnet_\S+, \S+, \S+ \(see"),
        (["--dataset_name", "mnits"], "there is no data set 'mnits'; did you mean 'mnist'. known: "),
        (
            ["--model_name", "lenet", "--lerning_rate", "1"],
            "no parameter 'lerning_rate' for lenet on 'mock'; did you",
        ),
        (["--model_name", "lenet", "--batch_size", "many"], "--batch_size many: expected int"),
        (["--model_name", "lenet", "--batch_size", "0"], "--batch_size 0: must be 1 or more"),
        (["--model_name", "lenet", "--optimizer", "adm"], "--optimizer adm: expected 'adadelta', 'adagrad'"),
        (["--runner_name", "imags"], "there is no runner 'imags'; did you mean 'images'?"),
        (["--runner_name", "images", "--model_name", "bert_tiny"], "--runner_name images has no model 'bert_tiny'"),
        (
            ["--model_name", "lenet", "--task_type", "finetune"],
            "begins with trained weights: give --model_dir",
        ),
        (["--model_name", "lenet", "--task", "click"], "--task click: lenet on 'mock' can learn 'classify_images'"),
        (
            ["--model_name", "bert_tiny", "--dataset_name", "digits"],
            r"\(pretrain\) learns 'masked_lm'; data set",
        ),
        (["--model_name", "lenet", "--loss_scale", "much"], "--loss_scale much: expected a number above 0, or dynamic"),
        (["lenet"], "'lenet' is no parameter; write --name value"),
        (["--batch_size", "1", "--batch_size", "2"], "--batch_size is given twice, as 1 and 2; keep one"),
        (["--config", "nowhere.yaml"], "--config: no file at 'nowhere.yaml'"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], line: str) -> None:
    with pytest.raises(UsageError, match=line) as caught:
        resolved(*words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("marks", "line"),
    [
        ("head=spilt()", "there is no mark 'spilt'; did you mean 'split'?"),
        ("head=__import__('os')", "there is no mark '__import__'"),
        ("head=split(how=open('x'))", "is no mark; write stage"),
        ("head=stage(first=1)", "unexpected keyword"),
        ("haed=split()", "haed"),
    ],
)
def test_marks_are_read_and_never_run(marks: str, line: str) -> None:
    found = resolved("--model_name", "lenet", "--marks", marks)
    with pytest.raises(UsageError, match=line):
        mark(found.model.build(found.request), found.model, found.request)


def test_every_parameter_of_the_seed_is_there_with_its_default() -> None:
    """The table of names and defaults that earlier users know."""
    own = {parameter.name: parameter.default for parameter in PARAMETERS}
    seed = {
        "average": 1, "dataset_name": "mock", "dataset_dir": None, "file_pattern": None, "num_sample_per_epoch": None,
        "num_classes": 1001, "preprocessing_name": None, "shuffle_buffer_size": 1024, "num_parallel_batches": 8,
        "prefetch_buffer_size": 32, "num_preprocessing_threads": 16, "datasets_use_caching": False,
        "model_name": "inception_resnet_v2", "loss_name": "example", "num_epochs": 100, "weight_decay": 0.00004,
        "batch_size": 32, "hooks": "StopAtStepHook,ProfilerHook,LoggingTensorHook", "max_gradient_norm": None,
        "warmup_steps": 0, "warmup_scheme": "t2t", "decay_scheme": None, "num_epochs_per_decay": 2.0,
        "learning_rate_decay_factor": 0.94, "learning_rate_decay_type": "exponential", "learning_rate": 0.01,
        "end_learning_rate": 0.0001, "optimizer": "rmsprop", "adadelta_rho": 0.95,
        "adagrad_initial_accumulator_value": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.999,
        "ftrl_learning_rate_power": -0.5, "ftrl_initial_accumulator_value": 0.1, "ftrl_l1": 0.0, "ftrl_l2": 0.0,
        "momentum": 0.9, "rmsprop_momentum": 0.9, "rmsprop_decay": 0.9, "model_dir": None, "ckpt_file_name": None,
        "model_config_file_name": None, "vocab_file_name": None, "stop_at_step": 100, "log_loss_every_n_iters": 10,
        "profile_every_n_iters": 0, "log_device_placement": False,
        "print_model_statistics": False, "use_fp16": True, "loss_scale": "1.0", "task_type": "pretrain",
    }  # fmt: skip
    assert {name: own.get(name, "missing") for name in seed} == seed
    assert "runner_name" in own
    assert own["profile_at_task"] is None, "it was 0; a timeline is of all ranks now, unless one is named"
    assert isinstance(resolved("--model_name", "lenet").request, Request)


def test_names_that_are_known_without_imports_are_all_names():
    assert (set(registry.all_models()), set(registry.all_datasets())) == (MODELS, DATASETS)
