"""The table of ``log_device_placement`` names the ranks that really hold each parameter, in every layout."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import torch
from harness import run
from torch import nn

import echelon
from echelon import Log
from echelon.strategy.annotations.annotate import annotate, pipeline, split, stage
from echelon.zoo.sample import sample

ROW = re.compile(r"^echelon: (\(the rest\)|\S+)\s+([\d |]+?)\s{2,}[\d: |]+?\s{2,}(.+)$")

LENET = {"image_size": 8}
BERT = {"num_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "vocab_size": 90}
T5 = {"vocab_size": 64, "max_seq_length": 8}

#: By name: the model, its settings, marks, strategy, words that must be in the table.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "lenet, stages": ("lenet", LENET, {"": pipeline(2, stages=2)}, {}, ("(the rest)  1      0:1          stage 1",)),
    "bert, stages by cost, tied": ("bert_tiny", BERT, {"": pipeline(2, stages=2)}, {}, ("stages 0 and 1",)),
    "bert, stages by hand, tied": (
        "bert_tiny",
        BERT,
        {"embeddings": stage(0), "layers.0": stage(0), "layers.1": stage(1), "": pipeline(2)},
        {},
        ("embeddings.words  0 1    0:0 0:1      stages 0 and 1",),
    ),
    "lenet, split": ("lenet", LENET, {"head": split("row")}, {}, ("split row over 2 (bias whole)", "replicated")),
    "lenet, shard 1": ("lenet", LENET, {}, {"shard": 1}, ("replicated, optimizer state in 2 parts (shard 1)",)),
    "lenet, shard 3": ("lenet", LENET, {}, {"shard": 3}, ("0 | 1  0:0 | 0:1    in 2 parts (shard 3)",)),
    "experts": ("t5_moe_tiny", T5, {}, {}, ("split auto over 2 (gate.weight whole)",)),
}


def placed(name: str) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Return what this rank prints, and the shape of every parameter that it really has."""
    kind, values, marks, strategy, _ = CASES[name]
    torch.manual_seed(0)
    made = sample(kind, {**values, "batch_size": 4}, batch=4)
    model: nn.Module = made.model
    if name == "experts":
        marks = dict(made.resolved.model.split)
    annotate(model, marks)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        engine = echelon.distribute(
            model,
            loss=made.loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            sample=made.batch,
            strategy=echelon.Strategy.from_dict(strategy),
            log=Log(placement=True, progress=False),
        )
    assert engine._parts is not None
    level = engine.plan.shard.level if engine.plan.shard else 0
    held = engine._parts.local_state.parameters if level == 3 else dict(_real(model))
    shapes = {name: tuple(value.shape) for name, value in held.items() if value.numel()}
    engine.close()
    return said.getvalue(), shapes


def _real(model: nn.Module) -> list[tuple[str, Any]]:
    from torch._subclasses.fake_tensor import FakeTensor

    return [(name, value) for name, value in model.named_parameters() if not isinstance(value.data, FakeTensor)]


def all_cases() -> dict[str, tuple[str, dict[str, tuple[int, ...]]]]:
    echelon.init(device="cpu")
    return {name: placed(name) for name in CASES}


def rows_of(table: str) -> dict[str, tuple[set[int], str]]:
    found = filter(None, map(ROW.match, table.splitlines()))
    return {row[1]: ({int(rank) for rank in row[2].split() if rank != "|"}, row[3]) for row in found}


def row_for(parameter: str, rows: dict[str, tuple[set[int], str]]) -> set[int]:
    """Return the ranks of the row that names the parameter most closely."""
    around = [name for name in rows if parameter == name or parameter.startswith(f"{name}.")]
    assert around or "(the rest)" in rows, f"{parameter} is in no row"
    return rows[max(around, key=len) if around else "(the rest)"][0]


def test_the_table_names_the_ranks_that_hold_each_parameter() -> None:
    by_rank = run(all_cases, ranks=2)
    for name, (*_, words) in CASES.items():
        table, _ = by_rank[0][name]
        rows = rows_of(table)
        everything = {parameter for ranks in by_rank for parameter in ranks[name][1]}
        for parameter in everything:
            holders = {rank for rank in range(2) if parameter in by_rank[rank][name][1]}
            assert row_for(parameter, rows) == holders, (name, parameter, table)
        assert all(word in table for word in words), (name, table)
        if "stages" in name:
            assert "replicated" not in table, (name, table)
