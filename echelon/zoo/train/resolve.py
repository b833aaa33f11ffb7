"""Resolve command-line arguments and a config file to the checked parameters of a run, each with its origin."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from echelon.base.config import describe, fits
from echelon.base.errors import UsageError, nearest
from echelon.strategy import strategy_files
from echelon.strategy.command_line import put
from echelon.zoo import registry
from echelon.zoo.entry import OWN_RUNNER, Data, Dataset, Model, Request, Setting
from echelon.zoo.entry_names import DATASETS, MODELS
from echelon.zoo.train.parameters import PARAMETERS
from echelon.zoo.train.train_arguments import STRATEGY_OPTIONS, TrainArguments

DEFAULT, FLAG = "default", "flag"


@dataclass(frozen=True)
class ResolvedValue:
    value: Any
    origin: str


@dataclass(frozen=True)
class TrainConfig:
    """All parameters of a run.

    values:   values by parameter name, each with its origin
    strategy: options of the Strategy, as plain values
    launch:   options of the launcher
    """

    model: Model
    dataset: Dataset
    values: Mapping[str, ResolvedValue]
    strategy: Mapping[str, Any]
    launch: Mapping[str, str | bool] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.values[name].value

    def is_user_set(self, name: str) -> bool:
        """Return True if the user set the parameter, by flag or file."""
        return self.values[name].origin not in (DEFAULT, "model", "data set")

    @property
    def task(self) -> str:
        """The requested task, or else the first task of the model for which the data set provides batches."""
        able = self.model.tasks.get(self["task_type"], ())
        both = [task for task in able if task in self.dataset.tasks]
        requested = self["task"]
        if requested is not None and requested not in both:
            raise UsageError(f"--task {requested}: {self._pair} can learn {_listed(both)}")
        if not both:
            fed = _listed(self.dataset.tasks)
            raise UsageError(
                f"{self.model.name} ({self['task_type']}) learns {_listed(able)}; data set '{self.dataset.name}' is "
                f"for {fed}; choose another data set (see 'echelon zoo list')"
            )
        return str(requested or both[0])

    @property
    def request(self) -> Request:
        return Request({name: value.value for name, value in self.values.items()}, self.task)

    @property
    def _pair(self) -> str:
        return f"{self.model.name} on '{self.dataset.name}'"

    def with_value(self, name: str, value: Any) -> TrainConfig:
        """Return a copy with another value of a parameter, of the same origin."""
        return replace(self, values={**self.values, name: ResolvedValue(value, self.values[name].origin)})

    def with_data(self, data: Data) -> TrainConfig:
        """Return a copy with the facts of the data set; raise UsageError if one differs from a value of the user."""
        values = dict(self.values)
        for name, fact in data.facts.items():
            if name in values and self.is_user_set(name) and values[name].value != fact:
                value = values[name]
                raise UsageError(
                    f"{name} is {value.value} ({value.origin}), but data set '{self.dataset.name}' has {fact}; "
                    f"leave {name} out, or choose the data that goes with it"
                )
            if name in values:
                values[name] = ResolvedValue(fact, "data set")
        return replace(self, values=values)


def resolve(words: TrainArguments) -> TrainConfig:
    """Resolve the parameters of a run.

    The order of precedence is: flags, the config file, defaults of the data set, of the model, and common defaults.
    """
    flags = dict(words.run)
    path = flags.pop("config", None)
    from_file = _read(path) if isinstance(path, str) else {}
    strategy, launch, written = _sorted_file(from_file, words)
    model, dataset = _chosen(flags, written)
    settings = _settings(model, dataset)
    values = {name: ResolvedValue(setting.default, DEFAULT) for name, setting in settings.items()}
    values |= {name: ResolvedValue(value, "model") for name, value in model.defaults.items()}
    values |= {name: ResolvedValue(value, "data set") for name, value in dataset.defaults.items()}
    for given, origin in ((written, str(path)), (flags, FLAG)):
        for name, text in given.items():
            values[name] = ResolvedValue(_typed(settings, name, text, model, dataset), origin)
    resolved = TrainConfig(model, dataset, values, strategy, launch)
    if resolved.is_user_set("num_epochs") and not resolved.is_user_set("stop_at_step"):
        values["stop_at_step"] = ResolvedValue(0, "num_epochs")  # the default of 100 steps must not limit the epochs
    _check(resolved)
    _check_given(resolved, settings)
    return resolved


def with_sizes(resolved: TrainConfig, sizes: Mapping[str, Any], origin: str) -> TrainConfig:
    """Return a copy with the model sizes of a file beside the weights; raise UsageError if the user set others."""
    values = dict(resolved.values)
    for name, size in sizes.items():
        if name not in values:
            continue
        if resolved.is_user_set(name) and values[name].value != size:
            raise UsageError(
                f"{name} is {values[name].value} ({values[name].origin}), but {origin} says {size}; leave one out"
            )
        values[name] = ResolvedValue(size, origin)
    return replace(resolved, values=values)


def _read(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise UsageError(f"--config: no file at '{path}'")
    return strategy_files.read(path)


def _sorted_file(
    given: Mapping[str, Any], words: TrainArguments
) -> tuple[dict[str, Any], dict[str, str | bool], dict[str, Any]]:
    """Return strategy options, launcher options and the rest of the file; flags override the first two."""
    from echelon.cli.launcher_options import launcher_options

    own = {name.replace("-", "_"): value for name, value in given.items()}
    strategy = {name: own.pop(name) for name in list(own) if name in STRATEGY_OPTIONS}
    launch = {name: own.pop(name) for name in list(own) if name in launcher_options()}
    stated = words.run.get("strategy", own.pop("strategy", None))
    if isinstance(stated, Mapping):
        strategy = {**stated, **strategy}
    elif stated is not None:
        strategy = {**strategy_files.read(str(stated)), **strategy}
    for name, value in words.strategy.items():
        put(strategy, name.split("."), True if value is True else strategy_files.parse_value(str(value), f"--{name}"))
    texts = {name: value if isinstance(value, bool) else str(value) for name, value in launch.items()}
    return strategy, {**texts, **words.launch}, own


def _chosen(flags: Mapping[str, Any], written: Mapping[str, Any]) -> tuple[Model, Dataset]:
    """Return the model and the data set, which determine the other parameters."""

    def given_or_default(name: str) -> Any:
        return flags.get(name, written.get(name))

    runner = given_or_default("runner_name")
    if runner is not None and runner not in registry.RUNNERS:
        raise UsageError(f"there is no runner '{runner}'{nearest(str(runner), registry.RUNNERS)}")
    default = registry.RUNNERS[runner] if runner else _common()["model_name"].default
    model_name = str(given_or_default("model_name") or default)
    dataset_name = str(given_or_default("dataset_name") or _common()["dataset_name"].default)
    _require_names([*written, *flags], model_name, dataset_name)
    model = registry.model(model_name)
    if runner is not None and model.runner not in (runner, OWN_RUNNER):
        raise UsageError(
            f"--runner_name {runner} has no model '{model.name}', which is of runner '{model.runner}'; "
            "leave --runner_name out, the model's name is enough"
        )
    return model, registry.dataset(dataset_name)


def _require_names(names: Collection[str], model: str, dataset: str) -> None:
    """Raise UsageError for a misspelt common parameter before the registry imports the models, and with them torch."""
    common = _common().keys()
    if model not in MODELS or dataset not in DATASETS or common >= set(names):
        return
    known = common | registry.setting_names()
    for name in names:
        near = nearest(name, common)
        if name not in known and near == nearest(name, known):  # no parameter of any model or data set is nearer
            raise _unknown(name, model, dataset, near)


def _common() -> dict[str, Setting]:
    return {parameter.name: parameter for parameter in PARAMETERS}


def _settings(model: Model, dataset: Dataset) -> dict[str, Setting]:
    """Return all parameters of a run; if model and data set have one of the same name, the model's is used."""
    return {**_common(), **{own.name: own for own in (*dataset.settings, *model.settings)}}


def _typed(settings: Mapping[str, Setting], name: str, given: Any, model: Model, dataset: Dataset) -> Any:
    if name not in settings:
        raise _unknown(name, model.name, dataset.name, nearest(name, settings))
    kind = settings[name].type
    tried = [given] if not isinstance(given, str) else [_parsed(given, name), given]
    if kind is list and isinstance(given, str):
        tried = [_parsed(text, name) for text in (given, f"[{given}]")]
    for value in tried:
        if fits(value, kind):
            return float(value) if kind is float else value
    if fits(str(given), kind):  # a number for a text parameter, such as loss_scale: 128 in a file
        return str(given)
    raise UsageError(f"--{name} {given}: expected {describe(kind)}")


def _unknown(name: str, model: str, dataset: str, near: str) -> UsageError:
    return UsageError(f"there is no parameter '{name}' for {model} on '{dataset}'{near}")


def _parsed(text: str, name: str) -> Any:
    """Parse text as a number, a bool or None, or return it unchanged; YAML alone would read 1e-3 as text."""
    if text in ("True", "False", "None", "none"):
        return {"True": True, "False": False}.get(text)
    try:
        return (
            float(text) if "e" in text.lower() and text[:1].isdigit() else strategy_files.parse_value(text, f"--{name}")
        )
    except (ValueError, UsageError):
        return text


def _check_given(resolved: TrainConfig, settings: Mapping[str, Setting]) -> None:
    missing = [name for name, each in settings.items() if each.required and not resolved.is_user_set(name)]
    if missing:
        raise UsageError(f"--{missing[0]} is missing: {settings[missing[0]].meaning}, which has no default; give it")


def _check(resolved: TrainConfig) -> None:
    """Raise UsageError for errors that can be found without data and devices."""
    _ = resolved.task
    for name, least in _LEAST.items():
        value = resolved[name]
        if value is not None and value < least:
            raise UsageError(f"--{name} {value}: must be {least} or more")
    weights = resolved["ckpt_file_name"]
    is_found = weights and (resolved["model_dir"] or Path(weights).exists())
    has_own = resolved.model.pretrained and not weights
    if resolved["task_type"] == "finetune" and not is_found and not has_own:
        raise UsageError(
            "--task_type finetune begins with trained weights: give --model_dir and --ckpt_file_name, or pretrain"
        )
    scale = resolved["loss_scale"]
    if scale != "dynamic":
        try:
            assert float(scale) > 0
        except (ValueError, AssertionError):
            raise UsageError(f"--loss_scale {scale}: expected a number above 0, or dynamic") from None


_LEAST: dict[str, float] = {
    "average": 1,
    "stages": 1,
    "micro_batches": 1,
    "batch_size": 1,
    "num_classes": 1,
    "num_epochs": 1,
    "num_sample_per_epoch": 1,
    "shuffle_buffer_size": 1,
    "num_parallel_batches": 1,
    "prefetch_buffer_size": 1,
    "num_preprocessing_threads": 0,
    "stop_at_step": 0,
    "log_loss_every_n_iters": 0,
    "profile_every_n_iters": 0,
    "profile_at_task": 0,
    "save_checkpoints_steps": 0,
    "keep_checkpoint_max": 1,
    "eval_every_n_iters": 0,
    "early_stop_patience": 1,
    "warmup_steps": 0,
    "weight_decay": 0,
    "learning_rate": 0,
    "end_learning_rate": 0,
    "num_epochs_per_decay": 0,
    "max_gradient_norm": 0,
}


def _listed(names: Any) -> str:
    return " or ".join(f"'{name}'" for name in names) or "nothing"
