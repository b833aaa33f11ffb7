"""Refuse option names of other frameworks, with an error that names the option to use instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from echelon.base.errors import UsageError

Remedy = str | Callable[[Any], str]

_BF16, _FP16 = 'amp="bf16"', 'amp="fp16"'
_PRECISIONS = {"fp16": _FP16, "float16": _FP16, "16": _FP16} | dict.fromkeys(
    ("32", "fp32", "float32", "no", "False", "None"), "amp=False"
)


def _precision(value: Any) -> str:
    """Return the remedy for a precision of Lightning ("bf16-mixed", "16-true"), Accelerate ("no") or torch."""
    word = str(value).removeprefix("torch.").split("-", maxsplit=1)[0]
    return f"write {_PRECISIONS.get(word, _BF16)}"


def _sixteen_bits(option: str) -> Callable[[Any], str]:
    def remedy(value: Any) -> str:
        is_on = value.get("enabled", True) if isinstance(value, Mapping) else value
        return f"write {option if is_on else 'amp=False'}"

    return remedy


def _level(value: Any) -> str:
    stage = value.get("stage") if isinstance(value, Mapping) else value
    is_level = stage in (1, 2, 3) and not isinstance(stage, bool)
    return f"write shard={stage if is_level else 3}"


def _as_given(option: str, example: float) -> Callable[[Any], str]:
    def remedy(value: Any) -> str:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return f"write {option}={value if is_number else example}"

    return remedy


#: (remedy, names): the remedy is a text or a function of the given value; the names are those it applies to.
_TABLE: tuple[tuple[Remedy, str], ...] = (
    (_level, "zero zero_stage zero_optimization fsdp fsdp2 fully_shard sharded_ddp"),
    (_precision, "precision mixed_precision autocast dtype torch_dtype"),
    (_sixteen_bits(_FP16), "fp16"),
    (_sixteen_bits(_BF16), "bf16"),
    (
        _as_given("gradient_merge", 4),
        "accumulate accumulation_steps gradient_accumulation gradient_accumulation_steps accumulate_grad_batches "
        "grad_accumulation_steps grad_accum",
    ),
    (
        _as_given("clip", 1.0),
        "gradient_clipping gradient_clip_val max_grad_norm max_norm clip_grad_norm grad_clip",
    ),
    (
        "write recompute=True",
        "activation_checkpointing gradient_checkpointing activation_checkpoint use_gradient_checkpointing",
    ),
    ('write shard={"level": 3, "offload": "optimizer"}', "offload cpu_offload offload_optimizer offload_param"),
    ('write fast={"compile": True}', "compile torch_compile"),
    ("write sync_batch_norm=True", "sync_batchnorm sync_bn convert_sync_batchnorm"),
    ('write reduction={"bucket_mb": 25}', "bucket_cap_mb reduce_bucket_size"),
    (
        "write split=2, or mark the layers: echelon.annotate(model, {'head': echelon.split()})",
        "tensor_parallel tensor_parallel_configs tensor_parallel_size tp tp_size mp mp_size model_parallel",
    ),
    (
        "write stages=2, or stages=echelon.pipeline(stages=2, micro_batches=8)",
        "pipeline pipeline_configs pipeline_parallel pipeline_parallel_size pp pp_size micro_batches",
    ),
    ("mark transformer layers with echelon.split(sequence=True)", "sequence_parallel sp"),
    ("mark the mixture of experts with echelon.split()", "expert_parallel ep ep_size"),
    ("attention over parts of a sequence is not implemented", "context_parallel cp cp_size"),
    (
        "start 'echelon run --procs N', and write split= and stages=",
        "hybrid_configs parallelism_config device_mesh",
    ),
    (
        "start 'echelon run --procs N' or '--gpus N': each process is a replica",
        "dp dp_size ddp data_parallel devices num_processes nproc_per_node world_size",
    ),
    ("leave it out: parameters without a gradient are detected automatically", "find_unused_parameters static_graph"),
    (
        "leave it out, or set torch.backends.cudnn.benchmark",
        "cudnn_exhaustive_search cudnn_batchnorm_spatial_persistent conv_workspace_size_limit",
    ),
    ("leave it out: fast= and reduction= choose how a step runs", "build_strategy execution_strategy"),
    ("start 'echelon run --nnodes MIN:MAX'", "elastic"),
    ("give it to echelon.distribute()", "optimizer scheduler checkpoint log loss"),
)
_REMEDIES = {name: remedy for remedy, names in _TABLE for name in names.split()}


def refuse_other_names(given: Mapping[Any, Any], label: str) -> None:
    """Raise UsageError for the first name that belongs to another framework."""
    for name, value in given.items():
        remedy = _REMEDIES.get(name)
        if remedy is not None:
            do = remedy if isinstance(remedy, str) else remedy(value)
            raise UsageError(f"{label} has no option '{name}'; {do}")
