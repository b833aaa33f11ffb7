"""Mistakes in the use of an engine: one clear line each, on every rank, before any state is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import errors, run
from torch import Tensor, nn
from zoo import QUIET, sgd

import echelon
from echelon import Strategy
from echelon.base.errors import LossError, MismatchError, UsageError
from echelon.plan import make_plan

# ---- ranks, plans and models that do not fit together ----


def different_model() -> None:
    echelon.init()
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2 + echelon.rank()))
    echelon.distribute(net, loss=F.mse_loss, optimizer=sgd(net), log=QUIET)


def different_strategy() -> None:
    echelon.init()
    net = nn.Linear(3, 2)
    strategy = Strategy(gradient_merge=1 + echelon.rank())
    echelon.distribute(net, loss=F.mse_loss, optimizer=sgd(net), strategy=strategy, log=QUIET)


def test_ranks_with_different_models_are_told_where_they_differ() -> None:
    for line in errors(different_model, ranks=2):
        assert line.startswith("MismatchError: rank 1 was built differently from rank 0: ")
        assert "1.weight" in line or "1.bias" in line
        assert "[3, 3] against [2, 3]" in line or "[3] against [2]" in line


def test_different_strategies_on_ranks_error_names_difference() -> None:
    for line in errors(different_strategy, ranks=2):
        assert "gradient_merge: 2 against 1" in line


def test_a_plan_for_other_ranks_or_another_model_is_refused() -> None:
    net = nn.Linear(2, 1)
    for other, ranks, line in ((net, 4, "is for 4 ranks, this job has 1"), (nn.Linear(3, 1), 1, "another model")):
        plan = make_plan(other, {"main": sgd(other)}, Strategy(), ranks)
        with pytest.raises(UsageError, match=line):
            echelon.distribute(net, optimizer=sgd(net), plan=plan, log=QUIET)


# ---- losses that are no losses ----


def bad_loss(kind: str) -> None:
    echelon.init()
    net = nn.Linear(2, 1)
    losses = {
        "nan": lambda out: out.mean() * (float("nan") if echelon.rank() == 1 and engine.steps == 2 else 1.0),
        "vector": lambda out: out.squeeze(1),
        "number": lambda out: 3.0,
    }
    engine = echelon.distribute(net, loss=losses[kind], optimizer=sgd(net), log=QUIET)
    for _ in range(4):
        before = net.weight.detach().clone()
        try:
            engine.step(torch.ones(3, 2))
        except LossError:
            assert torch.equal(net.weight, before), "the update must not happen"
            raise


def test_a_nan_loss_names_rank_and_step_on_every_rank() -> None:
    for line in errors(bad_loss, "nan", ranks=3):
        assert line.startswith("LossError: the loss is nan at step 3 on rank 1")


def test_a_loss_that_is_not_a_scalar_names_rank_step_and_shape() -> None:
    lines = errors(bad_loss, "vector", ranks=2)
    assert lines[1].startswith("LossError: step 1, rank 1: the loss must be one number, got shape (3,)")
    assert "got float" in errors(bad_loss, "number", ranks=1)[0]


def late_nan(directory: str) -> None:
    """On a GPU a loss is read one step later: it must be checked before it is stored."""
    echelon.init()
    net = nn.Linear(2, 1)
    engine = echelon.distribute(net, loss=lambda out: out.mean() * float("nan"), optimizer=sgd(net), log=QUIET)
    engine._passes.losses.lag = 1
    engine.step(torch.ones(3, 2))
    engine.save(directory)


def test_nothing_is_saved_that_came_of_a_nan(tmp_path: Path) -> None:
    for line in errors(late_nan, str(tmp_path / "ckpt"), ranks=2):
        assert line.startswith("LossError: the loss is nan at step 1 on ranks 0, 1")
    assert not (tmp_path / "ckpt").exists()


# ---- changes behind the plan's back would let replicas drift apart ----


def thawed() -> None:
    echelon.init()
    net = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    engine = echelon.distribute(net, loss=F.mse_loss, optimizer=sgd(net), log=QUIET)
    engine.step(torch.ones(2, 2), torch.ones(2, 1))
    net[0].requires_grad_(True)
    engine.step(torch.ones(2, 2), torch.ones(2, 1))


def grown() -> None:
    echelon.init()
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = sgd(net[1])
    engine = echelon.distribute(net, loss=F.mse_loss, optimizer=optimizer, log=QUIET)
    optimizer.add_param_group({"params": list(net[0].parameters())})
    engine.step(torch.ones(2, 2), torch.ones(2, 1))


def test_parameters_that_join_after_distribute_are_refused() -> None:
    for line in errors(thawed, ranks=2):
        assert line.startswith("UsageError: '0.weight' was frozen when distribute() was called")
    for line in errors(grown, ranks=2):
        assert "more parameters after distribute()" in line


# ---- batches ----


def divided(size: int) -> tuple[int, int]:
    echelon.init()
    net = nn.Linear(2, 1)
    engine = echelon.distribute(net, loss=F.mse_loss, optimizer=sgd(net), log=QUIET)
    loader = engine.loader((torch.zeros(40, 2), torch.zeros(40, 1)), global_batch=size)
    return len(next(iter(loader))[0]), loader.global_batch


def test_global_batch_divided_or_error_names_nearest_sizes() -> None:
    """A global batch is divided over the replicas, or the error names the nearest sizes that can be."""
    assert run(divided, 12, ranks=3) == [(4, 12)] * 3
    for line in errors(divided, 16, ranks=3):
        assert line == "DataError: global_batch=16 cannot be divided over 3 replicas; 15 or 18 can"
    net = nn.Linear(2, 1)
    engine = echelon.distribute(net, loss=F.mse_loss, optimizer=sgd(net), log=QUIET)
    with pytest.raises(UsageError, match="either batch_size"):
        engine.loader((torch.zeros(4, 2),))
    with pytest.raises(UsageError, match="no option 'shufle'; did you mean 'shuffle'"):
        engine.loader((torch.zeros(4, 2),), batch_size=2, shufle=True)


# ---- slips of the pen ----


def test_unknown_options_suggest_the_nearest() -> None:
    net = nn.Linear(1, 1)
    with pytest.raises(UsageError, match="no option 'stratgy'; did you mean 'strategy'"):
        echelon.distribute(net, optimizer=sgd(net), stratgy=1)
    with pytest.raises(UsageError, match="no option 'gradient_mege'; did you mean 'gradient_merge'"):
        Strategy(gradient_mege=2)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="expected bool, 'bf16', 'fp16', Amp or None"):
        Strategy(amp="bf61")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Strategy\(gradient_merge=True\): expected the number of steps"):
        Strategy(gradient_merge=True)
    with pytest.raises(UsageError, match=r"Strategy\(clip=-1\): expected a norm above 0"):
        Strategy(clip=-1)


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match="not in the model"):
        echelon.distribute(nn.Linear(1, 1), optimizer=sgd(nn.Linear(2, 3)), log=QUIET)


def test_mismatch_is_an_echelon_error() -> None:
    assert issubclass(MismatchError, echelon.EchelonError)


# ---- a model that checkpoints with reentrant autograd finishes gradients twice ----


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = checkpoint(self.shared, x.requires_grad_(), use_reentrant=True)
        return checkpoint(self.shared, x, use_reentrant=True).mean()


def reentrant() -> None:
    echelon.init()
    net = Reentrant()
    engine = echelon.distribute(net, optimizer=sgd(net), log=QUIET)
    engine.step(torch.ones(2, 3))
    dist.barrier()


def test_gradients_that_change_after_they_were_sent_are_an_error() -> None:
    for line in errors(reentrant, ranks=2):
        assert "use_reentrant=False" in line
