"""Arguments of ``distribute()`` as users of other frameworks write them, and the public names."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import nn
from zoo import QUIET, sgd

import echelon
from echelon.api.distribute import _OPTIONS
from echelon.api.public import __all__ as public_names
from echelon.base.errors import EchelonError, UsageError


def trained(*given: object, **named: object) -> list[float]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    values = [optimizer if value == "optimizer" else value for value in given]
    named = {name: optimizer if value == "optimizer" else value for name, value in named.items()}
    engine = echelon.distribute(net, *values, log=QUIET, **named)  # type: ignore[arg-type]
    loss = engine.step(torch.ones(2, 3), torch.tensor([0, 1]))
    return [float(loss), *net.weight.flatten().tolist()]


def test_arguments_without_names_mean_what_their_types_say() -> None:
    strategy = echelon.Strategy(clip=0.01)
    expected = trained(optimizer="optimizer", loss=F.cross_entropy, strategy=strategy)
    assert trained("optimizer", loss=F.cross_entropy, strategy=strategy) == expected
    assert trained("optimizer", F.cross_entropy, strategy) == expected
    assert trained(strategy, nn.CrossEntropyLoss(), "optimizer") == expected
    assert trained("optimizer", loss=F.cross_entropy) != expected


NET = nn.Linear(3, 2)
SGD = sgd(NET)
MISTAKES: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {
    "distribute() needs an optimizer; give optimizer=": ((NET,), {}),
    "two values for optimizer=, a SGD and a SGD; several go into a list": ((NET, SGD, SGD), {}),
    "two values for loss=, a function and a function; give one": ((NET, SGD, F.mse_loss), {"loss": F.mse_loss}),
    "a DataLoader without a name; leave it out, and ask the engine for its loader: engine.loader(...)": (
        (NET, SGD, torch.utils.data.DataLoader([1])),  # type: ignore[arg-type]
        {},
    ),
    "a StepLR without a name; give it by name: scheduler=": ((NET, SGD, torch.optim.lr_scheduler.StepLR(SGD, 1)), {}),
    "and it has parameters; if it is the loss, write loss=": ((NET, SGD, nn.Linear(1, 1)), {}),
    "the class SGD without a name; make one: SGD(model.parameters(), ...)": ((NET, torch.optim.SGD), {}),
    "without names it takes the model, an optimizer, a loss and a Strategy": ((NET, SGD, 3), {}),
    "give it by name: log=": ((NET, SGD, QUIET), {}),
    "'ckpt' without a name; give a path by name": ((NET, SGD, "ckpt"), {}),
    "distribute() takes one torch.nn.Module, got a list": (([NET], SGD), {}),
    "got the class Linear; make one: Linear(...)": ((nn.Linear, SGD), {}),
    "optimizer= takes torch optimizers, got 'adam'": ((NET,), {"optimizer": "adam"}),
    "optimizer= takes torch optimizers, got the class Adam": ((NET,), {"optimizer": torch.optim.Adam}),
    "got the class CrossEntropyLoss; make one: CrossEntropyLoss()": ((NET, SGD), {"loss": nn.CrossEntropyLoss}),
    "log= does not take 'runs'; write log=echelon.Log(dir=...)": ((NET, SGD), {"log": "runs"}),
    "strategy= does not take 'fsdp'; write strategy=Strategy(": ((NET, SGD), {"strategy": "fsdp"}),
    "write strategy=Strategy.from_dict(": ((NET, SGD), {"strategy": {"shard": 3}}),
    "write strategy=Strategy.load('a.yaml')": ((NET, SGD), {"strategy": "a.yaml"}),
    "checkpoint= does not take True; write checkpoint=Checkpoint(dir=...)": ((NET, SGD), {"checkpoint": True}),
    "elastic= does not take True": ((NET, SGD), {"elastic": True}),
    "cluster= does not take 2": ((NET, SGD), {"cluster": 2}),
    "plan= does not take 4": ((NET, SGD), {"plan": 4}),
}


def test_arguments_of_wrong_types_are_refused_in_one_line() -> None:
    for line, (given, named) in MISTAKES.items():
        with pytest.raises(UsageError) as caught:
            echelon.distribute(*given, **named)  # type: ignore[arg-type]
        assert line in str(caught.value)
        assert "\n" not in str(caught.value)


def saved_in_a_path(directory: str) -> None:
    for given, steps in ((Path(directory), 0), (directory, 1)):  # the second goes on from the first
        net = nn.Linear(3, 2)
        engine = echelon.distribute(net, sgd(net), F.mse_loss, checkpoint=given, log=QUIET)
        assert engine.steps == steps
        engine.step(torch.ones(2, 3), torch.ones(2, 2))
        assert engine.save(wait=True).parent == Path(directory)
        engine.close()


def test_a_path_for_checkpoint_is_its_directory(tmp_path: Path) -> None:
    run(saved_in_a_path, str(tmp_path / "ckpt"), ranks=1)


# ---- names that an interpreter completes ----

DIR = "import sys, echelon; first = dir(echelon); early = 'torch' in sys.modules; "


def test_dir_lists_the_public_names_and_imports_nothing() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", DIR + "print((first, early))"], capture_output=True, text=True, check=True
    )
    first, early = ast.literal_eval(ended.stdout)
    assert not early
    assert first == dir(echelon)  # here everything is loaded
    public = {name for name in first if not name.startswith("_")}
    assert set(public_names) < public
    assert {"data", "nn", "zoo"} < public
    assert not {"amounts", "ending", "leave", "sys", "TYPE_CHECKING"} & public
    assert all(hasattr(echelon, name) for name in first)


def test_ipython_completes_the_public_names() -> None:
    completer = pytest.importorskip("IPython.core.completer").Completer(namespace={"echelon": echelon})
    assert completer.attr_matches("echelon.dis") == ["echelon.distribute"]
    assert completer.attr_matches("echelon.nn.Mo") == ["echelon.nn.MoE"]


def test_help_names_every_parameter() -> None:
    for function, names in ((echelon.distribute, _OPTIONS), *((each, None) for each in MARKS)):
        text = inspect.getdoc(function) or ""
        for name in names or inspect.signature(function).parameters:
            assert f"\n{name}:" in text, f"{function.__name__}: {name}"
        assert ">>> " in text


MARKS = (echelon.split, echelon.pipeline, echelon.stage, echelon.cluster)


# ---- the first calls of an engine ----


class Pair(nn.Linear):
    """A model of two inputs."""

    def __init__(self) -> None:
        super().__init__(3, 2)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(a) + b


X, Y = torch.ones(4, 3), torch.zeros(4).long()
CALLS: dict[str, tuple[type[nn.Module] | None, object, Callable[[echelon.Engine], object]]] = {
    "for a batch of 1 value: cross_entropy() missing 1 required": (
        None,
        F.cross_entropy,
        lambda engine: engine.step(X),
    ),
    "takes 1 positional argument but 2 were given; write it as": (None, lambda out: out, lambda e: e.step(X, Y)),
    "with all of the batch (2 values), since distribute() was given no loss": (None, None, lambda e: e.step(X, Y)),
    "no loss function was given and the model returned a tensor of shape (4, 2)": (None, None, lambda e: e.step(X)),
    "but for its last one, the target: Pair.forward() missing": (Pair, F.cross_entropy, lambda e: e.step(X, Y)),
    "the loss does not depend on any trained parameter": (None, lambda o, y: o.detach().sum(), lambda e: e.step(X, Y)),
    "the loss that engine.step() returns has had its backward": (
        None,
        F.cross_entropy,
        lambda e: e.backward(e.step(X, Y)),
    ),
    "the engine is not the model; call engine.step(*batch)": (None, F.cross_entropy, lambda e: e(X)),
    "loader(dataset, 2) does not say which batch": (None, F.cross_entropy, lambda e: e.loader((X, Y), 2)),
    "'a.csv' is a path, not a data set": (None, F.cross_entropy, lambda e: e.loader("a.csv", batch_size=2)),
    "the batch holds numpy arrays; make tensors": (None, F.cross_entropy, lambda e: e.step(X.numpy(), Y.numpy())),
    "evaluate() takes a data set, a DataLoader or batches, got NoneType": (None, None, lambda e: e.evaluate(None)),
}


def test_mistakes_in_the_first_calls_are_one_line() -> None:
    for line, (kind, loss, call) in CALLS.items():
        net = nn.Linear(3, 2) if kind is None else kind()
        engine = echelon.distribute(net, sgd(net), loss, log=QUIET)  # type: ignore[arg-type]
        with pytest.raises(EchelonError) as caught:
            call(engine)
        assert line in str(caught.value)
        assert "\n" not in str(caught.value)


def fails_inside(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output + "a"  # type: ignore[operator]


def test_a_type_error_inside_the_loss_stays_what_it_is() -> None:
    net = nn.Linear(3, 2)
    engine = echelon.distribute(net, sgd(net), fails_inside, log=QUIET)
    with pytest.raises(TypeError, match="unsupported operand") as caught:
        engine.step(X, Y)
    assert not isinstance(caught.value, EchelonError)
