"""One rank of ``echelon train``: build the model, train it, evaluate it and report the results.

    python -m echelon.zoo.train.run --model_name lenet --dataset_name digits

is the command without its launcher: one process, or a rank of torchrun, srun or mpirun.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import echelon
from echelon.base.console import say
from echelon.base.errors import UsageError
from echelon.base.formatting import text_table
from echelon.data import Loader
from echelon.engine.engine import context_of
from echelon.observability.runlog.log_files import RUN
from echelon.zoo.application import let_arrive, open_data, train_loader
from echelon.zoo.entry import Request
from echelon.zoo.tasks import TASKS, loss_of
from echelon.zoo.train.hooks import Hooks
from echelon.zoo.train.input import InputWaitTimer
from echelon.zoo.train.model_marks import mark, split_size
from echelon.zoo.train.optimizers import make_optimizer, make_schedule, stretch
from echelon.zoo.train.output_dir import forget, output_directory
from echelon.zoo.train.resolve import DEFAULT, TrainConfig, resolve, with_sizes
from echelon.zoo.train.restore import check_vocabulary, read_weights, restore, sizes
from echelon.zoo.train.statistics import show, statistics
from echelon.zoo.train.strategies import make_strategy
from echelon.zoo.train.train_arguments import sort_words
from echelon.zoo.train.unused_parameters import overruled_decay, unused_shuffle_buffer


class TrainingRun:
    """A training run on one rank; hooks get it as their ``run`` argument."""

    def __init__(self, resolved: TrainConfig) -> None:
        self.results: dict[str, Any] = {}  #: further entries of the final JSON line
        self._reason: str | None = None
        self.directory = output_directory(resolved)
        self._resolve(resolved)
        self._hooks = Hooks(self.request)
        self._build()
        self.loader = self._load()
        stretch(self._schedule, self.request, self.total_steps, self._steps_per_epoch())
        total = self.engine.total_steps = self.total_steps
        self._stopwatch = Stopwatch(self.engine.world.device, total)
        self._loss: Tensor | None = None

    # ---- the interface of hooks ----

    @property
    def steps(self) -> int:
        return self.engine.steps

    @property
    def total_steps(self) -> int | None:
        """The number of steps of the run, limited by epochs and ``stop_at_step``; None if it is not known."""
        limit: int | None = self.request["stop_at_step"] or None if self._hooks.stops_at_step else None
        whole = self.loader.total_steps
        return min(limit, whole) if limit and whole else limit or whole

    def say(self, line: str) -> None:
        context_of(self.engine).say(line)

    def stop(self, reason: str) -> None:
        """Stop the run after this step; all ranks must call this at the same step."""
        self._reason = reason

    def evaluate(self) -> dict[str, float]:
        """Return loss and metrics over the test part; empty if there is none."""
        if self.data.test is None:
            return {}
        with self._stopwatch.paused():
            return self.engine.evaluate(
                self.data.test, batch_size=self.request["batch_size"], metrics=TASKS[self.request.task].metrics
            )

    # ---- the run ----

    def train(self) -> None:
        """Train until a hook stops the run or its epochs are done."""
        self._hooks.begin(self)
        epochs = self.loader.epochs(self.request["num_epochs"])
        while self._reason is None and next(epochs, None) is not None:
            self._train_epoch()
        self.say(self._reason or f"all {self.request['num_epochs']} epochs are done")
        speed = self._stopwatch.examples_per_s()
        self._hooks.end(self)
        self._conclude(speed)

    def _train_epoch(self) -> None:
        for batch in self._waiting.around(self.loader):
            self._loss = self._step(batch)
            self._stopwatch.step(self.loader.global_batch)
            self._hooks.after_step(self, self._loss)
            if self._reason is not None:
                return

    def _step(self, batch: tuple[Any, ...]) -> Tensor:
        try:
            return self.engine.step(*batch)
        except ValueError as error:
            if "Expected more than 1 value per channel" not in str(error):
                raise
            size = self.request["batch_size"]
            raise UsageError(
                f"--batch_size {size}: batch norm needs two values of a channel to learn from, and a batch or "
                "micro-batch has one; give a larger --batch_size"
            ) from None

    def _conclude(self, speed: float | None) -> None:
        """Evaluate, save and print the results; the last line is JSON for scripts."""
        trained = None if self._loss is None else float(self._loss)
        scores = self.evaluate()
        saved = self.engine.save(wait=True)
        if speed is not None:
            self.say(self._waiting.line(speed, TASKS[self.request.task].unit))
        self.engine.close()
        if echelon.is_first_worker():
            sys.stderr.flush()
            print(final_line(self._summary(trained, scores, speed, saved)), flush=True)

    def _summary(
        self, trained: float | None, scores: Mapping[str, float], speed: float | None, saved: Path
    ) -> dict[str, Any]:
        return {
            "model": self.resolved.model.name,
            "dataset": self.resolved.dataset.name,
            "final_loss": trained,
            **{("test_loss" if name == "loss" else name): value for name, value in scores.items()},
            "examples_per_s": speed,
            "steps": self.steps,
            "checkpoint": str(saved),
            "metrics": str((self.directory / "metrics.jsonl").absolute()),
            **{name: value for name, value in self.results.items() if name != "evaluations"},  # these are in a file
        }

    # ---- building ----

    def _resolve(self, resolved: TrainConfig) -> None:
        resolved = with_sizes(resolved, sizes(resolved.request), str(resolved["model_config_file_name"]))
        self.resolved, self.data = open_data(resolved)
        self.request: Request = self.resolved.request

    def _build(self) -> None:
        request, device = self.request, echelon.device()
        model = self.resolved.model.build(request)
        news = self._restored(model)
        mark(model, self.resolved.model, request)
        let_arrive(model, self.data)
        if not any(parameter.is_meta for parameter in model.parameters()):  # their values come in distribute()
            model.to(device)
        strategy, notices = make_strategy(self.resolved, device)
        optimizer = make_optimizer(model, request)
        self._schedule = make_schedule(optimizer, request)
        self.model = model
        self._announce()
        self.engine = echelon.distribute(
            model,
            loss=loss_of(request.task, request["loss_name"], self.resolved.model.loss),
            optimizer=optimizer,
            scheduler=self._schedule,
            strategy=strategy,
            cluster=echelon.cluster(average=request["average"]) if self.resolved.is_user_set("average") else None,
            checkpoint=self._checkpoint(),
            log=self._log(),
            sample=self._two_samples() if split_size(request["split"]) else None,  # shows which layers belong together
        )
        context_of(self.engine).record.settings(recorded_settings(self.resolved))
        for line in (*news, *notices, *overruled_decay(self.resolved)):
            self.say(line)

    def _restored(self, model: nn.Module) -> list[str]:
        if self.resolved.model.pretrained and not self.request["ckpt_file_name"]:
            return [f"weights: those of {self.resolved.model.name}"]
        if self.request["task_type"] != "finetune":
            return []
        weights = read_weights(self.request)
        check_vocabulary(model, weights, self.request)
        return restore(model, weights).lines()

    def _announce(self) -> None:
        """Print parameters and data, before the engine is created, because the engine reports a resume afterwards."""
        if not echelon.is_first_worker():
            return
        for line in (*resolved_lines(self.resolved, self.directory), f"  data: {self.data.about}"):
            say(line, stdout=True)
        if self.request["print_model_statistics"]:
            found = statistics(
                self.model, self._two_samples(), make_optimizer(self.model, self.request), self.request["batch_size"]
            )
            print(show(found), flush=True)

    def _two_samples(self) -> tuple[Any, ...]:
        rows = getattr(self.data.train, "padded", self.data.train)  # a packed batch of two is mostly padding
        return next(iter(Loader(rows, batch_size=2, shuffle=False, **self.data.loader)))

    def _checkpoint(self) -> echelon.Checkpoint:
        return self._hooks.checkpoint(dir=str(self.directory / "checkpoints"), keep=self.request["keep_checkpoint_max"])

    def _log(self) -> echelon.Log:
        return self._hooks.log(
            dir=str(self.directory),
            tensorboard=self.request["tensorboard"],
            placement=self.request["log_device_placement"],
        )

    def _load(self) -> Loader:
        for line in unused_shuffle_buffer(self.resolved, self.data.train):
            self.say(line)
        loader = train_loader(self.engine, self.request, self.data, self.request["batch_size"])
        self._waiting = InputWaitTimer()
        loader.epochs(self.request["num_epochs"])  # so that the loader knows the number of steps
        return loader

    def _steps_per_epoch(self) -> int | None:
        whole = self.loader.total_steps
        return None if whole is None else whole // int(self.request["num_epochs"])


def main() -> None:
    resolved = resolve(sort_words(sys.argv[1:], {}))
    world = echelon.init(seed=resolved["seed"])
    if resolved["fresh"]:  # 'echelon train' does this itself before it starts any rank
        if world.size > 1:
            raise UsageError("--fresh is for 'echelon train'; under another launcher remove output_dir by hand")
        forget(output_directory(resolved))
    TrainingRun(resolved).train()


def resolved_lines(resolved: TrainConfig, directory: Path) -> list[str]:
    """Return one line per non-default parameter, with its origin, and one line for those with default values."""
    chosen = {name: value for name, value in resolved.values.items() if value.origin != DEFAULT}
    rows = [(name, f"{_shown(value.value)}  ({value.origin})") for name, value in chosen.items()]
    rows += [(name, f"{_shown(value)}  (strategy)") for name, value in resolved.strategy.items()]
    rest = len(resolved.values) - len(chosen)
    return [
        f"{resolved.model.name} on '{resolved.dataset.name}', task '{resolved.task}'",
        *text_table(rows, indent=2),
        f"  {rest} others have their defaults: all are in {directory / RUN}, 'echelon train --help' has them",
    ]


def recorded_settings(resolved: TrainConfig) -> dict[str, tuple[Any, str]]:
    """Return value and origin of every parameter, for run.json."""
    values = {name: (value.value, value.origin) for name, value in resolved.values.items()}
    return values | {name: (value, "strategy") for name, value in resolved.strategy.items()}


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def final_line(results: Mapping[str, Any]) -> str:
    """Return the results as one JSON object; NaN and infinity, which JSON lacks, become null."""
    return json.dumps({name: _plain(value) for name, value in results.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


WARM_UP = 10  #: first steps that are not counted: they allocate memory, select kernels and compile the model


class Stopwatch:
    def __init__(self, device: torch.device, expected_steps: int | None) -> None:
        self._device = device
        self._skipped = WARM_UP if expected_steps is None else min(WARM_UP, expected_steps // 2)
        self._seen, self._examples, self._since, self._paused = 0, 0.0, self._now(), 0.0

    def step(self, examples: float) -> None:
        self._seen += 1
        if self._seen > self._skipped:
            self._examples += examples
        elif self._seen == self._skipped:
            self._since, self._paused = self._now(), 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        begin = self._now()
        try:
            yield
        finally:
            self._paused += self._now() - begin

    def examples_per_s(self) -> float | None:
        """Return the throughput; None if no step was counted."""
        seconds = self._now() - self._since - self._paused
        return self._examples / seconds if self._examples and seconds > 0 else None

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels run asynchronously
        return time.perf_counter()


if __name__ == "__main__":
    main()
