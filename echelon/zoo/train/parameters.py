"""The parameters of ``echelon train`` that all models and data sets share, with the names of earlier systems.

The table in docs/zoo.md is generated from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from echelon.zoo.entry import Setting

DEFAULT_HOOKS = "StopAtStepHook,ProfilerHook,LoggingTensorHook"


@dataclass(frozen=True, kw_only=True)
class TrainParameter(Setting):
    group: str


def _group(name: str, *rows: tuple[Any, ...]) -> list[TrainParameter]:
    """Return the parameters of a group, from rows of (name, default, meaning) or (name, default, meaning, type)."""
    return [
        TrainParameter(group=name, **dict(zip(("name", "default", "meaning", "kind"), row, strict=False)))
        for row in rows
    ]


Decay = Literal["fixed", "exponential", "polynomial"]
Luong = Literal["luong234", "luong5", "luong10"]
Optimizer = Literal["adadelta", "adagrad", "adam", "adamw", "ftrl", "lamb", "lars", "momentum", "rmsprop", "sgd"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]

PARAMETERS: tuple[TrainParameter, ...] = (
    *_group(
        "job",
        ("runner_name", None, "the model's family; for a check only, since a model's name is enough", str | None),
        (
            "model_name",
            "inception_resnet_v2",
            "one of 'echelon zoo list', timm:NAME, hf:NAME, or your own file.py:Name",
        ),
        (
            "task_type",
            "pretrain",
            "finetune begins with the weights of model_dir/ckpt_file_name",
            Literal["pretrain", "finetune"],
        ),
        ("task", None, "what to learn, where model and data set leave a choice", str | None),
        ("seed", 0, "seed of weights, order and augmentation"),
        ("output_dir", None, "where checkpoints and metrics go; runs/MODEL-DATASET by default", str | None),
        ("fresh", False, "forget what an earlier run left in output_dir; else training goes on from there"),
    ),
    *_group(
        "cluster",
        ("average", 1, "devices of a slice: of one copy of the model"),
        ("stages", 1, "cut the model into so many stages of a pipeline, by cost"),
        ("micro_batches", 4, "micro-batches of a step in a pipeline"),
        ("schedule", "1f1b", "schedule of the pipeline", Schedule),
        (
            "split",
            None,
            "ranks that share each layer: --split 2; or modules: 'head,layers.*.mlp', 'model': as the model advises",
            str | None,
        ),
        ("marks", None, "marks by module name: 'layers.0-11=stage(0);head=split()', or a mapping in the file", Any),
        (
            "strategy",
            None,
            "a strategy's file; each of its options is also a flag: --amp bf16 --shard 3",
            str | None,
        ),
    ),
    *_group(
        "dataset",
        ("dataset_name", "mock", "one of 'echelon zoo list', or your own file.py:Name"),
        ("dataset_dir", None, "a path, or a URL to fetch from", str | None),
        ("file_pattern", None, "which files of dataset_dir", str | None),
        ("num_sample_per_epoch", None, "samples of an epoch; by default all there are", int | None),
        ("num_classes", 1001, "labels; the data set's own number, where it has one"),
    ),
    *_group(
        "input",
        ("preprocessing_name", None, "by default the model's own", str | None),
        (
            "shuffle_buffer_size",
            1024,
            "for streams, in samples; other data is shuffled as a whole, and a line says so",
        ),
        ("num_parallel_batches", 8, "batches in work at once"),
        ("prefetch_buffer_size", 32, "batches ready ahead, over all workers"),
        (
            "num_preprocessing_threads",
            16,
            "processes that read and preprocess, over all ranks of a host; at most its cores",
        ),
        ("datasets_use_caching", False, "keep the input in memory as it is read, before preprocessing"),
    ),
    *_group(
        "model",
        (
            "loss_name",
            "example",
            "'example': the mean over examples of the task's loss; or label_smoothing; or your own file.py:name",
        ),
        ("num_epochs", 100, "epochs to train, unless stop_at_step comes first"),
        ("weight_decay", 0.00004, "added to gradients (decoupled for adamw, lamb and lars); not for biases and norms"),
        ("batch_size", 32, "samples of a step of each replica"),
        (
            "hooks",
            DEFAULT_HOOKS,
            "names, separated by commas; others by import path: package.module:Class or file.py:Class",
        ),
        ("max_gradient_norm", None, "largest norm of gradients, to which they are clipped", float | None),
        ("print_model_statistics", False, "a table of layers: shapes, parameters, multiply-adds"),
    ),
    *_group(
        "learning rate",
        ("learning_rate", 0.01, ""),
        ("end_learning_rate", 0.0001, "smallest rate of any decay"),
        ("learning_rate_decay_type", "exponential", "", Decay),
        ("learning_rate_decay_factor", 0.94, "factor of exponential decay"),
        ("num_epochs_per_decay", 2.0, "epochs between two decays"),
        (
            "decay_scheme",
            None,
            "in place of the type: halve 4, 5 or 10 times over the last third, half, half",
            Luong | None,
        ),
        ("warmup_steps", 0, ""),
        ("warmup_scheme", "t2t", "from a hundredth of the rate exponentially, or linear", Literal["t2t", "linear"]),
    ),
    *_group(
        "optimizer",
        ("optimizer", "rmsprop", "", Optimizer),
        ("adadelta_rho", 0.95, ""),
        ("adagrad_initial_accumulator_value", 0.1, ""),
        ("adam_beta1", 0.9, "beta1 of adam, adamw and lamb"),
        ("adam_beta2", 0.999, "beta2 of adam, adamw and lamb"),
        (
            "opt_epsilon",
            None,
            "by default 1.0 for rmsprop, as its users know it, else 1e-8",
            float | None,
        ),
        ("ftrl_learning_rate_power", -0.5, ""),
        ("ftrl_initial_accumulator_value", 0.1, ""),
        ("ftrl_l1", 0.0, ""),
        ("ftrl_l2", 0.0, ""),
        ("momentum", 0.9, "momentum of the optimizers momentum and lars"),
        ("rmsprop_momentum", 0.9, ""),
        ("rmsprop_decay", 0.9, ""),
    ),
    *_group(
        "restore",
        ("model_dir", None, "the folder of the weights to begin with", str | None),
        (
            "ckpt_file_name",
            None,
            "their file or checkpoint, in model_dir or as a path of its own: one of Echelon, .safetensors, .pt, .bin",
            str | None,
        ),
        ("model_config_file_name", None, "the model's config.json in model_dir: its sizes", str | None),
        ("vocab_file_name", None, "the vocabulary (vocab.txt) in model_dir", str | None),
    ),
    *_group(
        "log",
        ("stop_at_step", 100, "0: train all epochs, as where num_epochs is asked for and this is not"),
        ("log_loss_every_n_iters", 10, ""),
        ("profile_every_n_iters", 0, "a timeline every so many steps; 0: none"),
        ("profile_at_task", None, "of this rank alone, with its operators; by default of all on one clock", int | None),
        ("log_device_placement", False, "print which module is on which devices"),
        ("save_checkpoints_steps", 0, "a checkpoint every so many steps, and at the end; 0: at the end only"),
        ("keep_checkpoint_max", 3, "how many of them to keep"),
        ("eval_every_n_iters", 0, "evaluate every so many steps (EvaluationHook); 0: at the end only"),
        ("early_stop_patience", 3, "EarlyStopHook: evaluations without a better loss before it stops"),
        ("tensorboard", False, "write TensorBoard files too"),
    ),
    *_group(
        "speed",
        ("use_fp16", True, "16-bit arithmetic: bf16 where the GPU has it, else fp16; on a CPU off, and it says so"),
        ("loss_scale", "1.0", "of fp16: a number, or dynamic; bf16 needs none, and a line says so"),
        ("compile", False, "true or false insists; left out, a GPU's run compiles repeated blocks, or the model"),
    ),
)
