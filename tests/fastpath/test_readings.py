"""Python values that a captured step may contain as constants: which ones Readings finds, and which it ignores."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from echelon.base.code_origin import is_users
from echelon.fastpath import guards
from echelon.fastpath.guards import PythonGuards

annealed = 0.5
unread = 0.5
table = {"first": [1.0, 2.0], "second": 3.0}
array = np.ones(3)
on_the_host = torch.ones(())


class Schedule:
    rate = 1.0

    def __init__(self) -> None:
        self.step = 0
        self.nobody_reads_this = 0

    @property
    def weight(self) -> float:
        return 0.1 * self.step

    @staticmethod
    def fixed() -> float:
        return helper(1.0)


@dataclass
class Settings:
    scale: float = 1.0
    parts: dict[str, float] = field(default_factory=lambda: {"a": 1.0})


@dataclass(slots=True)
class Slotted:
    scale: float = 1.0


schedule, settings, slotted = Schedule(), Settings(), Slotted()
namespace = types.SimpleNamespace(inner=types.SimpleNamespace(scale=1.0))


def helper(x: Any) -> Any:
    return x * annealed


@torch.no_grad()
def wrapped(output: Any, target: Any) -> Any:
    return helper(output)


@functools.lru_cache
def kept(x: float) -> Any:
    return helper(x)


class Table:
    def __init__(self) -> None:
        self._rows = {"a": 1.0}

    def __getitem__(self, key: str) -> float:
        return self._rows[key]


class Batches(list[int]):
    def __init__(self) -> None:
        super().__init__([1, 2])
        self.weight = 1.0


rows, batches, long = Table(), Batches(), [1.0] * 1000


def importing(output: Any, target: Any) -> Any:
    import imported_inside  # type: ignore[import-not-found]

    return output * imported_inside.weight


def keeping() -> tuple[Callable[..., Any], Callable[[], None]]:
    calls = 0

    def loss(output: Any, target: Any) -> Any:
        return output.sum() * calls

    def count() -> None:
        nonlocal calls
        calls += 1

    return loss, count


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.settings, self.rates = Settings(), [0.1, 0.2]

    def forward(self, x: Tensor) -> Tensor:
        return self._scaled(self.linear(x))

    def _scaled(self, x: Tensor) -> Tensor:
        return x * self.settings.scale * self.rates[0]  # type: ignore[no-any-return]


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.ones(4))
        self.smoothing = 0.1

    def forward(self, output: Any, target: Any) -> Any:
        return helper((output * self.weights).sum() * self.smoothing)


def plainly(output: Any, target: Any) -> Any:
    return output.sum()


def indirectly(output: Any, target: Any) -> Any:
    return [helper(part) for part in output]


def by_default(output: Any, target: Any, given: Any = settings) -> Any:
    return output * given.scale * given.parts["a"]


def marked(output: Any, target: Any) -> Any:
    return output * marked.factor  # type: ignore[attr-defined]


marked.factor = 1.0  # type: ignore[attr-defined]
of_module = sys.modules[__name__]


def set_global(name: str, value: Any) -> Callable[[], None]:
    return lambda: globals().__setitem__(name, value)


CHANGES: dict[str, tuple[Callable[..., Any], Callable[[], Any], str]] = {
    "a global": (lambda o, t: o * annealed, set_global("annealed", 0.6), "annealed"),
    "a global of a function that is called": (indirectly, set_global("annealed", 0.6), "annealed"),
    "a global that becomes a tensor": (helper, set_global("annealed", torch.ones(2)), "annealed"),
    "a table": (lambda o, t: o * table["first"][0], lambda: table["first"].__setitem__(1, 0.0), "table['first'][1]"),  # type: ignore[index, union-attr]
    "a longer table": (lambda o, t: o * table, lambda: table.update(third=0.0), "the length of table"),
    "an array": (lambda o, t: o * array, lambda: array.fill(2), "array"),
    "a tensor of the host": (lambda o, t: o * on_the_host, lambda: on_the_host.add_(1), "on_the_host"),
    "an attribute": (lambda o, t: o * schedule.step, lambda: setattr(schedule, "step", 1), "schedule.step"),
    "a property": (lambda o, t: o * schedule.weight, lambda: setattr(schedule, "step", 1), "schedule."),
    "an attribute of a class": (lambda o, t: o * Schedule.rate, lambda: setattr(Schedule, "rate", 2), "Schedule.rate"),
    "of an object's class": (lambda o, t: o * schedule.rate, lambda: setattr(Schedule, "rate", 2), "Schedule.rate"),
    "what a method calls": (lambda o, t: o * schedule.fixed(), set_global("annealed", 0.6), "annealed"),
    "an object in slots": (lambda o, t: o * slotted.scale, lambda: setattr(slotted, "scale", 2.0), "slotted.scale"),
    "another object": (lambda o, t: o * settings.scale, set_global("settings", Settings()), "settings"),
    "a namespace": (
        lambda o, t: o * namespace.inner.scale,
        lambda: setattr(namespace.inner, "scale", 2.0),
        "namespace.inner.scale",
    ),
    "a default": (by_default, lambda: settings.parts.update(a=2.0), "a default of by_default.parts['a']"),
    "an attribute of a function": (marked, lambda: setattr(marked, "factor", 2.0), "marked.factor"),
    "part of a module": (lambda o, t: o * of_module.annealed, set_global("annealed", 0.6), "annealed"),
    "what a partial holds": (functools.partial(by_default, given=settings),
                             lambda: setattr(settings, "scale", 2.0), "scale"),
    "what a decorator of torch's wraps": (wrapped, set_global("annealed", 0.6), "annealed"),
    "what a cache wraps": (lambda o, t: o * kept(1.0), set_global("annealed", 0.6), "annealed"),
    "what brackets read": (lambda o, t: o * rows["a"], lambda: rows._rows.update(a=2.0), "rows._rows['a']"),
    "an attribute of a list": (lambda o, t: o * batches.weight, lambda: setattr(batches, "weight", 2.0), "batches."),
    "an attribute by its name": (lambda o, t: o * getattr(schedule, "step"), lambda: setattr(schedule, "step", 1),  # noqa: B009
                                 "schedule.step"),
    "an entry of a long list": (lambda o, t: o * long[3], lambda: long.__setitem__(3, 2.0), "long"),
    "a bound method": (Criterion().forward, set_global("annealed", 0.6), "annealed"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value is set back after a test."""
    for name in ("annealed", "settings", "unread"):
        monkeypatch.setitem(globals(), name, globals()[name])
    monkeypatch.setitem(table, "first", [1.0, 2.0])
    monkeypatch.delitem(table, "third", raising=False)
    for holder, name in ((schedule, "step"), (Schedule, "rate"), (slotted, "scale"), (settings, "scale"),
                         (namespace.inner, "scale"), (marked, "factor")):  # fmt: skip
        monkeypatch.setattr(holder, name, getattr(holder, name))
    monkeypatch.setitem(settings.parts, "a", 1.0)
    monkeypatch.setitem(rows._rows, "a", 1.0)
    monkeypatch.setattr(batches, "weight", 1.0)
    monkeypatch.setitem(globals(), "long", [1.0] * 1000)


@pytest.mark.parametrize("what", CHANGES)
def test_what_the_loss_reads_is_watched(what: str) -> None:
    loss, change, label = CHANGES[what]
    found = PythonGuards(Model(), loss)
    assert found.changed() is None
    change()
    assert label in str(found.changed())


def test_a_closure_that_counts_is_found() -> None:
    loss, count = keeping()
    found = PythonGuards(Model(), loss)
    assert found.changed() is None
    count()
    assert found.changed() == "calls of keeping.loss"


def test_a_loss_that_is_a_module_is_watched_with_its_buffers() -> None:
    loss = Criterion()
    found = PythonGuards(Model(), loss)
    loss.smoothing = 0.2
    assert found.changed() == "the loss.smoothing"
    loss.smoothing = 0.1
    assert found.changed() is None
    loss.weights = torch.ones(4)
    assert found.changed() == "the loss._buffers['weights']"


def test_a_module_that_is_imported_inside_a_function_is_watched(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_inside.py").write_text("weight = 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importing(1.0, None)
    found = PythonGuards(Model(), importing)
    assert found.changed() is None
    sys.modules["imported_inside"].weight = 2.0  # type: ignore[attr-defined]
    assert found.changed() == "imported_inside.weight"


def test_guards_new_object_in_place_of_deleted_one_is_a_change() -> None:
    """Even at the same address, which the interpreter gives out again at once."""
    found = PythonGuards(Model(), lambda output, target: output * settings.scale)
    for _ in range(20):
        globals()["settings"] = None
        globals()["settings"] = Settings()
        assert found.changed() == "settings"


def test_what_lies_too_deep_or_is_too_long_to_be_watched_is_said() -> None:
    deep: Any = [1.0]
    for _ in range(guards.DEPTH + 1):
        deep = [deep]
    objects = [Schedule() for _ in range(guards.ITEMS + 1)]
    assert PythonGuards(Model(), lambda output, target: output * deep).too_many
    assert PythonGuards(Model(), lambda output, target: output * objects).too_many
    assert not PythonGuards(Model(), lambda output, target: output * long).too_many


def test_what_the_model_holds_is_watched() -> None:
    model = Model()
    found = PythonGuards(model, plainly)
    model.settings.scale = 2.0
    assert found.changed() == "the model.settings.scale"
    model.settings.scale = 1.0
    model.rates[0] = 0.3
    assert found.changed() == "the model.rates[0]"


def test_guards_notice_later_hooks_and_follow_existing_ones() -> None:
    """A hook that is added later is noticed, and the values that an existing one reads are followed."""
    model = Model()
    model.register_forward_hook(lambda module, inputs, output: output * annealed)
    found = PythonGuards(model, plainly)
    globals()["annealed"] = 0.7
    assert found.changed() == "annealed"
    globals()["annealed"] = 0.5
    assert found.changed() is None
    nn.Linear(1, 1).register_forward_hook(print)
    assert found.changed() is None
    for come in (model.linear.register_forward_hook, model.linear.register_full_backward_hook):
        handle = come(lambda module, inputs, output: None)
        assert found.changed() == "the number of hooks"
        handle.remove()
        assert found.changed() is None


class Drawing:
    @property
    def noise(self) -> float:
        return float(torch.rand(())) + random.random()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu", 0)

    @property
    def shape(self) -> list[int]:
        return [1, 2]


drawing = Drawing()


def test_guards_keep_random_state_and_equal_objects_are_same() -> None:
    """Properties that draw leave the random state unchanged, and equal objects count as the same."""
    model = Model()
    torch.manual_seed(0)
    random.seed(0)
    expected = float(torch.rand(())), random.random()
    torch.manual_seed(0)
    random.seed(0)
    noisy = PythonGuards(model, lambda output, target: output * drawing.noise)
    noisy.changed()
    assert (float(torch.rand(())), random.random()) == expected
    assert PythonGuards(Model(), lambda output, target: output.to(drawing.device).view(drawing.shape)).changed() is None


def test_what_no_code_names_may_change() -> None:
    found = PythonGuards(Model(), lambda output, target: output * schedule.step)
    schedule.nobody_reads_this += 1
    globals()["unread"] = 2.0
    assert found.changed() is None


def test_objects_that_libraries_made_are_watched_whole(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their attributes may be reached by other names than those in the user's code."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "some_config.py").write_text(
        "class Config:\n"
        "    def __init__(self, **known):\n        self._known = known\n"
        "    def __getattr__(self, name):\n        return self.__dict__['_known'][name]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    import some_config  # type: ignore[import-not-found]

    config = some_config.Config(scale=1.0)
    found = PythonGuards(Model(), lambda output, target: output * config.scale)
    assert found.changed() is None
    config._known["scale"] = 2.0
    assert found.changed() is not None


class Moody:
    _made = 0

    @property
    def broken(self) -> float:
        raise RuntimeError("not yet")

    @property
    def pair(self) -> tuple[float, list[float]]:
        return 1.0, table["first"]  # type: ignore[return-value]

    anew = functools.partialmethod(helper)


def test_guards_failing_or_recomputed_properties_are_no_change() -> None:
    moody = Moody()
    loss = lambda output, target: output * moody.broken * moody.pair[0] * moody.anew() * Moody.anew  # noqa: E731
    assert PythonGuards(Model(), loss).changed() is None
    assert PythonGuards(Model(), loss, of_classes=True).changed() is None


def test_of_classes_alone() -> None:
    found = PythonGuards(Model(), lambda output, target: output * Schedule.rate * schedule.step, of_classes=True)
    schedule.step = 3
    assert found.changed() is None
    Schedule.rate = 2.0
    assert found.changed() == "Schedule.rate"


def test_more_than_can_be_watched_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "MOST", 3)
    assert PythonGuards(Model(), lambda o, t: o * annealed * schedule.step * slotted.scale).too_many
    monkeypatch.setattr(guards, "MOST", 100)
    assert not PythonGuards(Model(), lambda o, t: o * annealed * schedule.step * slotted.scale).too_many


def test_only_the_users_code_is_followed() -> None:
    assert is_users(__file__)
    assert is_users("<ipython-input-1>")
    for module in (torch, np, functools, guards):
        assert not is_users(str(module.__file__))


def test_large_models_of_torch_hold_little_that_is_to_be_watched() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    found = PythonGuards(nn.TransformerEncoder(layer, 12, enable_nested_tensor=False), nn.CrossEntropyLoss())
    assert len(found._watched) < 100
