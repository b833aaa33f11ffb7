"""A value that a run is given and its checkpoint overrules is said in a line; the numbers are the checkpoint's."""

from __future__ import annotations

import contextlib
import io

import torch
from harness import errors, run
from torch import nn

import echelon

DATA = torch.linspace(-1, 1, 144).reshape(48, 3), torch.linspace(0, 1, 48).reshape(48, 1)


def train(directory, until, *, lr=0.1, decay=0.0, gamma=None, batch=4, by_hand=False, data=DATA, **options):
    """Returns what it said of the checkpoint, and its weights."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        echelon.init(seed=0)
        model = nn.Linear(3, 1)
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=decay)
        engine = echelon.distribute(
            model,
            loss=nn.functional.mse_loss,
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma) if gamma else None,
            checkpoint=echelon.Checkpoint(dir=str(directory), asynchronous=False),
        )
        loader = engine.loader(data, batch_size=batch, shuffle=False, **options)
        for _ in loader.epochs(9):
            for x, y in loader:
                if by_hand:
                    optimizer.param_groups[0]["lr"] = 0.1 / (engine.steps + 1)
                engine.step(x, y)
                if engine.steps == until:
                    break
            if engine.steps == until:
                break
        engine.save()
        engine.close()
    said = [line.split("checkpoint: ", 1)[1] for line in out.getvalue().splitlines() if "checkpoint: " in line]
    return said, [value.tolist() for value in model.parameters()]


def resumed(tmp_path, first, then, ranks=1):
    """Return the messages when a run of ``first`` resumes with ``then``, and whether it ends like ``first``."""
    run(train, tmp_path / "a", 3, ranks=ranks, **first)
    again = run(train, tmp_path / "a", 6, ranks=ranks, **then)
    alone = run(train, tmp_path / "b", 6, ranks=ranks, **first)
    return again[0][0], again[0][1] == alone[0][1]


REMEDY = "; to use the new one, set it after distribute(), or begin in another directory"


def test_changed_learning_rate_is_said_and_not_used(tmp_path):
    said, same = resumed(tmp_path, {}, {"lr": 0.5})
    line = f"optimizer 'main' of group 0: lr=0.5 was given, but the checkpoint goes on with 0.1{REMEDY}"
    assert said == [line]
    assert same


def test_changed_rate_decay_and_schedule_are_said_on_two_ranks(tmp_path):
    first, then = {"gamma": 0.9}, {"gamma": 0.8, "lr": 0.5, "decay": 0.01}
    said, same = resumed(tmp_path, first, then, ranks=2)
    assert [line.split(", but")[0] for line in said] == [
        "optimizer 'main' of group 0: weight_decay=0.01 was given",
        "optimizer 'main' of group 0: lr=0.5 was given",
        "optimizer 'main' of group 1: weight_decay=0.01 was given",
        "scheduler 0: gamma=0.8 was given",
    ]
    assert same


def test_same_values_and_rates_set_by_hand_say_nothing(tmp_path):
    for number, given in enumerate([{"gamma": 0.9}, {"by_hand": True}]):
        assert resumed(tmp_path / str(number), given, given) == ([], True)


def test_changed_batch_is_said(tmp_path):
    said, _ = resumed(tmp_path, {}, {"batch": 8})
    assert said == ["it was saved with a global batch of 4; from here on it is 8"]


def test_changed_data_is_refused_until_it_is_accepted(tmp_path):
    other = DATA[0].flip(0), DATA[1]
    run(train, tmp_path, 3, ranks=2)
    for line in errors(train, tmp_path, 6, ranks=2, data=other):
        assert "the data has changed in the middle of epoch 0: it was 48 samples, checksum" in line
    said = run(train, tmp_path, 6, ranks=2, data=other, changed_data="accept")[0][0]
    assert [line.split(":")[0] for line in said] == ["the data has changed"]
    assert said[0].endswith("epoch 0 goes on from batch 3 with the new data")
