"""A Strategy in the words of other frameworks: Fleet's are read, others are answered with ours, in one line."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest

import echelon
from echelon.base.errors import UsageError
from echelon.strategy import Amp, Dgc, Lars, LowMemory, ParameterServer, Recompute, Shard, Strategy

NO_DECAY = ["batch_norm", ".b_0"]

#: Spellings of Fleet's users, and the strategy each one is.
READ = [
    (
        {
            "amp": True,
            "recompute": True,
            "recompute_configs": {"checkpoints": ["layers.*"]},
            "lars": True,
            "lars_configs": {"lars_coeff": 0.01, "lars_weight_decay": 0.1, "exclude_from_weight_decay": NO_DECAY},
        },
        Strategy(
            amp=True,
            recompute=Recompute(checkpoints=("layers.*",)),
            lars=Lars(coeff=0.01, weight_decay=0.1, exclude_from_weight_decay=tuple(NO_DECAY)),
        ),
    ),
    (
        {
            "amp": True,
            "amp_configs": {
                "init_loss_scaling": 128.0,
                "incr_every_n_steps": 10,
                "incr_ratio": 4.0,
                "decr_every_n_nan_or_inf": 3,
                "decr_ratio": 0.5,
                "custom_white_list": [],
            },
        },
        Strategy(amp=Amp(dtype="fp16", init_scale=128.0, growth_interval=10, growth=4.0, backoff_after=3, backoff=0.5)),
    ),
    (
        {"amp": True, "amp_configs": {"init_loss_scaling": 64.0, "use_dynamic_loss_scaling": False}},
        Strategy(amp=Amp(dtype="fp16", loss_scale=64.0)),
    ),
    ({"amp": True, "amp_configs": {"use_pure_bf16": True}}, Strategy(amp="bf16")),
    (
        {"dgc": True, "dgc_configs": {"rampup_begin_step": 5, "rampup_step": 2, "sparsity": [0.9, 0.99]}},
        Strategy(dgc=Dgc(rampup_begin_step=5, rampup_step=2, sparsity=(0.9, 0.99))),
    ),
    ({"dgc": {"sparsity": [0.9]}}, Strategy(dgc=Dgc(sparsity=(0.9,)))),
    ({"dgc": Dgc(sparsity=[0.9])}, Strategy(dgc=Dgc(sparsity=(0.9,)))),  # type: ignore[arg-type]
    ({"lars": {"lars_coeff": 0.01}}, Strategy(lars=Lars(coeff=0.01))),
    ({"lars": False, "lars_configs": {"lars_coeff": 0.01}}, Strategy()),
    (
        {"lamb": True, "lamb_configs": {"lamb_weight_decay": 0.1}, "localsgd": False},
        Strategy.from_dict({"lamb": {"weight_decay": 0.1}}),
    ),
    (
        {"localsgd": True, "localsgd_configs": {"k_steps": 4, "begin_step": 30}},
        Strategy.from_dict({"localsgd": {"k_steps": 4, "begin_step": 30}}),
    ),
    (
        {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 2}},
        Strategy.from_dict({"adaptive_localsgd": {"init_k_steps": 2}}),
    ),
    ({"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4, "avg": True}}, Strategy(gradient_merge=4)),
    ({"gradient_merge": False, "gradient_merge_configs": {"k_steps": 4}}, Strategy()),
    ({"sharding": True}, Strategy(shard=1)),
    (
        {"sharding": True, "sharding_configs": {"stage": 2, "offload": True}},
        Strategy(shard=Shard(level=2, offload="optimizer")),
    ),
    ({"a_sync": True}, Strategy(ps="async")),
    (
        {"a_sync": True, "a_sync_configs": {"k_steps": 100}},
        Strategy(ps=ParameterServer(mode="geo", k_steps=100)),
    ),
    (
        {"nccl_comm_num": 2, "fuse_grad_size_in_MB": 16.0, "fuse_all_reduce_ops": True},
        Strategy.from_dict({"reduction": {"communicators": 2, "bucket_mb": 16.0}}),
    ),
]

#: Refused values, and the error line.
REFUSED = [
    ({"zero": 2}, "Strategy has no option 'zero'; write shard=2"),
    ({"zero_optimization": {"stage": 1}}, "Strategy has no option 'zero_optimization'; write shard=1"),
    ({"fsdp": True}, "Strategy has no option 'fsdp'; write shard=3"),
    ({"precision": "bf16"}, "Strategy has no option 'precision'; write amp=\"bf16\""),
    ({"precision": "16-mixed"}, "Strategy has no option 'precision'; write amp=\"fp16\""),
    ({"mixed_precision": "no"}, "Strategy has no option 'mixed_precision'; write amp=False"),
    ({"bf16": {"enabled": True}}, "Strategy has no option 'bf16'; write amp=\"bf16\""),
    ({"accumulate": 4}, "Strategy has no option 'accumulate'; write gradient_merge=4"),
    (
        {"gradient_accumulation_steps": 8},
        "Strategy has no option 'gradient_accumulation_steps'; write gradient_merge=8",
    ),
    ({"gradient_clipping": 0.5}, "Strategy has no option 'gradient_clipping'; write clip=0.5"),
    (
        {"activation_checkpointing": True},
        "Strategy has no option 'activation_checkpointing'; write recompute=True",
    ),
    (
        {"lars": True, "lars_configs": {"lars_coef": 0.01}},
        "Strategy.lars_configs has no option 'lars_coef'; did you mean 'lars_coeff'?",
    ),
    (
        {"lars_configs": {"lars_coeff": 0.01}},
        "Strategy.lars_configs: these are settings of 'lars', which is not True; write lars=True beside it",
    ),
    (
        {"lars": Lars(), "lars_configs": {}},
        "Strategy.lars_configs: these are settings of 'lars', which is not True; keep one of it and lars=Lars("
        "coeff=0.001, weight_decay=0.0005, eps=0.0, exclude_from_weight_decay=())",
    ),
    (
        {"amp": True, "amp_configs": {"use_pure_fp16": True}},
        "Strategy.amp_configs: 'use_pure_fp16' has no counterpart here: weights and optimizer stay in fp32; "
        "leave it out",
    ),
    (
        {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4, "avg": False}},
        "Strategy.gradient_merge_configs: avg=False adds gradients up; they are averaged here: multiply the rate "
        "instead",
    ),
    (
        {"gradient_merge": True},
        "Strategy(gradient_merge=True): expected the number of steps, as in gradient_merge=4",
    ),
    ({"sharding": True, "shard": 2}, "Strategy has both 'sharding' and 'shard', which are one option; keep one"),
    ({"dgc": {"sparsty": [0.9]}}, "Strategy.dgc has no option 'sparsty'; did you mean 'sparsity'?"),
    (
        {"dgc": {"sparsity": [1.5]}},
        "Strategy.dgc(sparsity=(1.5,)): expected parts between 0 and 1, such as (0.75, 0.9375, 0.999)",
    ),
    ({"amp": True, "amp_configs": 3}, "Strategy.amp_configs: expected options by name, got 3"),
]


@pytest.mark.parametrize("number", range(len(READ)))
def test_fleets_words_are_read_in_python_and_in_files(number: int) -> None:
    words, strategy = READ[number]
    before = copy.deepcopy(words)
    assert Strategy(**words) == strategy
    assert words == before
    if not any(dataclasses.is_dataclass(value) for value in words.values()):
        assert Strategy.from_dict(words) == strategy


@pytest.mark.parametrize(("words", "line"), REFUSED)
def test_other_words_are_answered_with_ours(words: dict[str, object], line: str) -> None:
    with pytest.raises(UsageError) as raised:
        Strategy(**words)  # type: ignore[arg-type]
    assert str(raised.value) == line


@pytest.mark.parametrize("name", ["tp", "tensor_parallel", "pp", "pipeline_configs", "sequence_parallel", "dp"])
def test_layouts_are_answered_with_marks_or_the_launcher(name: str) -> None:
    with pytest.raises(UsageError, match=rf"no option '{name}'; .*(echelon\.split|echelon\.pipeline|echelon run)"):
        Strategy(**{name: 2})  # type: ignore[arg-type]


def test_setting_an_option_afterwards_shows_the_constructor() -> None:
    strategy = Strategy(amp=True)
    with pytest.raises(
        UsageError, match=r"cannot be changed after it is made; .* Strategy\(recompute_configs=\{.*\}, \.\.\.\)"
    ):
        strategy.recompute_configs = {"checkpoints": ["layers.*"]}  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        strategy.amp = False  # type: ignore[misc]
    assert strategy == copy.deepcopy(strategy) == pickle.loads(pickle.dumps(strategy)) == Strategy(amp=True)


def test_former_name_of_an_option_warns(tmp_path: Path) -> None:
    present = Strategy(low_memory=LowMemory(reserve="8 GB"))
    with pytest.warns(FutureWarning, match="Strategy: 'lean' is now 'low_memory'"):
        assert Strategy(lean={"reserve": "8 GB"}) == present  # type: ignore[call-arg]
    (tmp_path / "old.yaml").write_text("lean:\n  reserve: 8 GB\n")
    with pytest.warns(FutureWarning, match="'lean' is now 'low_memory'"):
        assert Strategy.load(tmp_path / "old.yaml") == present
    with pytest.raises(UsageError, match="'lean' and 'low_memory' are the same option; keep 'low_memory'"):
        Strategy(lean=True, low_memory=False)  # type: ignore[call-arg]
    with pytest.warns(FutureWarning, match=r"echelon\.Lean is now echelon\.LowMemory"):
        assert echelon.Lean is LowMemory
