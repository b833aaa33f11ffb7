"""Guards: all that must be equal for a replay of a captured step, because it is a constant in a CUDA graph.

StepSignature has the shapes of the batch, the weights, and the structure and plain values of the model. PythonGuards
has the Python values outside of the model that forward or the loss may read, such as an annealed weight or a flag;
these are found by following the code from forward and the loss: globals and closures that it names, functions that it
calls, and attributes of objects whose names occur in the code. Installed packages are taken to be fixed, but functions
that they wrap are followed, and all attributes of objects of their classes (a configuration) are guarded.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from echelon.base.code_origin import is_followed, is_library, is_users

DEPTH = 8  #: maximum number of references from forward or the loss to a value
MOST = 4000  #: maximum number of values; comparing so many takes a millisecond
ITEMS = 256  #: maximum items of a list or dict; a longer one is compared as a whole
LONGEST = 100_000
SMALL = 4096  #: maximum bytes of an array whose contents are compared

#: Types of values that are compared as they are.
PLAIN = (bool, int, float, complex, str, bytes, type(None))
#: The dicts in which a module registers parameters, buffers and submodules.
REGISTERS = ("_parameters", "_buffers", "_modules")

Read = Callable[[], Any]
Values = list[tuple[dict[str, Any], str, Any]]
_MISSING = object()
_BY_VALUE = (tuple, frozenset, torch.device, torch.dtype)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_VALUES = operator.methodcaller("values")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_INTERNAL = _OF_EVERY_MODULE - {"training", *REGISTERS}
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
_NO_PART_OF_A_STEP = {"__init__", "__new__", "__init_subclass__", "__del__", "__repr__", "__reduce__"}
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)


class StepSignature:
    """Values that are constants in a captured step; a step that differs in any of them must run eagerly.

    A captured step has no hooks on gradients.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        leaves, self._structure = tree_flatten(batch)
        self._leaves = [_kind(leaf) for leaf in leaves]
        self._parameters = list(model.parameters())
        self._weights = _weights(self._parameters)
        self._values = _python_values(model)
        self._structure_of_model = ModuleStructure(model, next(model.parameters()).device)

    def fits(self, batch: Any) -> bool:
        leaves, structure = tree_flatten(batch)
        return (
            structure == self._structure
            and [_kind(leaf) for leaf in leaves] == self._leaves
            and self._weights == _weights(self._parameters)
            and not on_gradients(self._parameters)
            and _are_as_they_were(self._values)
            and self._structure_of_model.is_as_it_was()
        )


def _kind(leaf: Any) -> Any:
    """Return shape, dtype and device of a tensor; type and value of anything else, which is a constant."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _weights(parameters: list[nn.Parameter]) -> tuple[list[int], list[bool]]:
    """Return the addresses of the weights, and which of them are trained."""
    try:
        places = [one.data_ptr() for one in parameters]
    except RuntimeError:  # some have no storage
        places = [place_of(one)[0] for one in parameters]
    return places, [one.requires_grad for one in parameters]


def _are_as_they_were(values: Values) -> bool:
    """Return True if all values are unchanged. Identity is checked first, for speed: there may be thousands."""
    for held, name, value in values:
        now = held.get(name, _MISSING)
        if now is not value and not same(now, value):
            return False
    return True


def _python_values(model: nn.Module) -> Values:
    """Return plain attributes of modules, which forward may read: a mode, an annealed rate."""
    return [
        (module.__dict__, name, value)
        for module in model.modules()
        for name, value in module.__dict__.items()
        if isinstance(value, PLAIN)
    ]


def on_gradients(parameters: Iterable[nn.Parameter]) -> bool:
    """Return True if one of these parameters has a Python hook on its gradient."""
    return any(one._backward_hooks or one._post_accumulate_grad_hooks for one in parameters)


class ModuleStructure:
    """The structure of a model at one moment: classes, submodules, and the tensors and objects that modules hold.

    A comparison takes some microseconds per hundred modules.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._modules = list(model.modules())
        self._own: list[dict[str, Any]] = [vars(module) for module in self._modules]
        self._parts = [one for module in self._modules for one in (module._modules, module._parameters)]
        self._buffers = [module._buffers for module in self._modules]
        self._held = [
            (own, name)
            for own in self._own
            for name, value in own.items()
            if name not in _OF_EVERY_MODULE and not isinstance(value, PLAIN)
        ]
        self._before = self._now()
        # kept alive, so that their addresses are not reused
        self._alive = [*model.parameters(), *(own[name] for own, name in self._held if self._is_of_host(own[name]))]

    def is_as_it_was(self) -> bool:
        return self._now() == self._before

    def _now(self) -> tuple[list[Any], ...]:
        return (
            list(map(type, self._modules)),
            list(map(len, self._own)),  # forward may read a new attribute by getattr()
            list(map(id, _entries(self._parts))),
            list(map(self._which, _entries(self._buffers))),
            [self._which(own.get(name)) for own, name in self._held],
        )

    def _is_of_host(self, value: Any) -> bool:
        return not isinstance(value, Tensor) or value.device != self._device

    def _which(self, value: Any) -> Any:
        """Return the identity of a value; for host tensors with the version, as their contents may be constants."""
        return place_of(value, self._is_of_host(value)) if isinstance(value, Tensor) else id(value)


def _entries(registers: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(_VALUES, registers))


def place_of(tensor: Tensor, with_version: bool = False) -> tuple[int, int]:
    """Return the tensor's address, and its version if asked for; for a tensor without storage (sparse), its id."""
    try:
        return tensor.data_ptr(), tensor._version if with_version else 0
    except RuntimeError:
        return id(tensor), 0


def same(one: Any, other: Any) -> bool:
    """Return True if two plain values are equal; NaN equals NaN.

    Values of different types are never compared with ``==``, because one of them may be a tensor.
    """
    return one is other or (type(one) is type(other) and (one == other or (is_nan(one) and is_nan(other))))


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


class PythonGuards:
    """The guarded Python values, as they are when the object is created.

    of_classes: True to guard only attributes of classes; default False
    too_many:   True if there are more values, or deeper ones, than can be guarded
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None, of_classes: bool = False) -> None:
        walk = _GuardCollector()
        with _preserve_rng():
            for name, module in model.named_modules():
                walk.model(module, name or "the model")
            walk.hooks(model)
            walk.visit(loss, "the loss", 0)
            walk.finish()
            found = [one for one in walk.found.values() if isinstance(one[-1], type) or not of_classes]
            self._watched = [(read, _noted(read()), label) for read, label, _ in found]
        self.too_many, self._runs_code = walk.cut, walk.runs_code and not of_classes

    def changed(self) -> str | None:
        """Return the name of the first value that has changed, or None."""
        with _preserve_rng() if self._runs_code else contextlib.nullcontext():
            return next((label for read, noted, label in self._watched if not _is(_noted(read()), noted)), None)


@contextlib.contextmanager
def _preserve_rng() -> Iterator[None]:
    """Save and restore the host's RNG state: user-defined properties may draw random numbers."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _noted(value: Any) -> Any:
    """Return the comparable form of a value; for CPU tensors with the version, as their contents may be constants."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return place_of(value, value.device.type == "cpu")
    if isinstance(value, np.ndarray | np.generic) and value.nbytes <= SMALL:
        return value.tobytes()
    if isinstance(value, tuple) and len(value) <= ITEMS:
        return tuple(map(_noted, value))
    return frozenset(value) if isinstance(value, set) else value


def _is(now: Any, before: Any) -> bool:
    """Return True if the values are equal, for known types, or are the same object, for any other type."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, list):  # a property may return a new list each time
        return len(now) <= ITEMS and all(isinstance(one, PLAIN) for one in now) and now == before
    return isinstance(now, (*PLAIN, *_BY_VALUE)) and same(now, before)


class _GuardCollector:
    """Collects the values to guard by walking user code and objects.

    found: for each value, a function that reads it, its name, and the object that holds it
    cut:   True if the collection is incomplete
    """

    def __init__(self) -> None:
        self.found: dict[tuple[int, Any], tuple[Read, str, Any]] = {}
        self.cut = False
        self.runs_code = False  # True if reading a value runs user code (properties)
        self._names = {"forward"}  # names in the code; forward is called without being named
        self._objects: list[tuple[Any, str, int]] = []  # objects whose attributes are looked up by these names
        self._seen: dict[int, Any] = {}  # visited objects, kept alive so that their ids are not reused

    def model(self, module: nn.Module, label: str) -> None:
        """Visit a module of the model; its weights and plain values are part of StepSignature already."""
        self._seen[id(module)] = module
        for name, value in vars(module).items():
            if name not in (*REGISTERS, *_INTERNAL) or (name in _HOOKS and value):
                self.visit(value, f"{label}.{name}", 1)
        self.visit(type(module), type(module).__name__, 0)

    def hooks(self, model: nn.Module) -> None:
        """Guard the number of hooks: a graph would not run a hook added later, and would still run a removed one."""
        every = [getattr(module, kind) for module in model.modules() for kind in (*_HOOKS, *_BACKWARD_HOOKS)]
        self._watch(model, "hooks", lambda: sum(map(len, every)), "the number of hooks", 0)

    def finish(self) -> None:
        """Look up every name in every object until no new names or objects are found."""
        done: set[tuple[int, str]] = set()
        while new := [(at, name) for at in range(len(self._objects)) for name in self._names if (at, name) not in done]:
            done.update(new)
            for at, name in new:
                self._look_up(*self._objects[at], name)

    def visit(self, value: Any, label: str, depth: int) -> None:
        if isinstance(value, (*PLAIN, Tensor)) or id(value) in self._seen:
            return
        if depth > DEPTH or self.cut:
            self.cut = True
            return
        self._seen[id(value)] = value
        self.visit(_own(value).get("__wrapped__"), label, depth)
        if isinstance(value, types.FunctionType):
            self._function(value, depth)
        elif isinstance(value, types.MethodType | functools.partial):
            self._bound(value, label, depth)
        elif isinstance(value, dict | list | tuple | deque):
            self._container(value, label, depth)
            self._instance(value, label, depth)
        elif isinstance(value, type | types.ModuleType):
            if is_followed(value):
                self._objects.append((value, value.__name__, depth))
        else:
            self._instance(value, label, depth)

    def _watch(self, holder: Any, key: Any, read: Read, label: str, depth: int) -> None:
        if (id(holder), key) not in self.found:
            self.found[id(holder), key] = read, label, holder
            self.cut |= len(self.found) > MOST
            self.visit(read(), label, depth + 1)

    def _item(self, holder: Any, key: Any, label: str, depth: int) -> None:
        self._watch(holder, key, functools.partial(_item, holder, key), label, depth)

    def _attribute(self, holder: Any, name: str, label: str, depth: int) -> None:
        self._watch(holder, name, functools.partial(_attribute, holder, name), f"{label}.{name}", depth)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        if not is_users(function.__code__.co_filename):
            return
        label = function.__qualname__.replace(".<locals>", "")
        for code in _codes(function.__code__):
            self._names.update(code.co_names, _words(code))
            for name in code.co_names:
                value = function.__globals__.get(name, sys.modules.get(name))  # the function may import a module
                if isinstance(value, _CODE):
                    self.visit(value, name, depth + 1)
                elif name in function.__globals__:
                    self._item(function.__globals__, name, name, depth)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._watch(cell, 0, functools.partial(_content, cell), f"{name} of {label}", depth)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.visit(default, f"a default of {label}", depth + 1)
        self._objects.append((function, label, depth))

    def _bound(self, value: types.MethodType | functools.partial[Any], label: str, depth: int) -> None:
        if isinstance(value, types.MethodType):
            parts: tuple[Any, ...] = value.__func__, value.__self__
        else:
            parts = value.func, value.args, value.keywords
        for part in parts:
            self.visit(part, label, depth + 1)

    def _container(self, value: Any, label: str, depth: int) -> None:
        self._watch(value, len, functools.partial(len, value), f"the length of {label}", depth)
        if len(value) > ITEMS:
            whole = _whole(value)
            self.cut |= len(whole) > LONGEST or not all(isinstance(one, PLAIN) for one in whole)
            self.found[id(value), "whole"] = functools.partial(_whole, value), label, value
            return
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            self._item(value, key, f"{label}[{key!r}]", depth)

    def _instance(self, value: Any, label: str, depth: int) -> None:
        if is_followed(type(value)):
            self._objects.append((value, label, depth))
            for kind in filter(is_followed, type(value).__mro__):
                for name, attribute in vars(kind).items():
                    if isinstance(attribute, types.FunctionType) and _is_called_unnamed(name):
                        self.visit(attribute, label, depth + 1)
        if isinstance(value, (nn.Module, *_NAMESPACES)) or not (is_followed(type(value)) or is_library(type(value))):
            for name in _own(value).keys() - _INTERNAL:
                self._attribute(value, name, label, depth)

    def _look_up(self, value: Any, label: str, depth: int, name: str) -> None:
        """Guard the attribute of this name, if the object or its class has it."""
        if not isinstance(value, type) and name in _own(value):
            self._attribute(value, name, label, depth)
        for kind in value.__mro__ if isinstance(value, type) else type(value).__mro__:
            if name in vars(kind) and is_followed(kind):
                self._class_attribute(value, kind, label, depth, name)

    def _class_attribute(self, value: Any, kind: type, label: str, depth: int, name: str) -> None:
        attribute = vars(kind)[name]
        if isinstance(attribute, property | staticmethod | classmethod | types.FunctionType):
            self.visit(getattr(attribute, "fget", getattr(attribute, "__func__", attribute)), label, depth + 1)
        self.runs_code |= isinstance(attribute, property)
        is_descriptor = isinstance(attribute, property | types.MemberDescriptorType)
        if is_descriptor and not isinstance(value, type):
            self._attribute(value, name, label, depth)
        elif not is_descriptor and not isinstance(attribute, (staticmethod, classmethod, *_CODE)):
            # Read from the class dict: attribute access through a descriptor may create a new object each time.
            self._watch(kind, name, functools.partial(_item, vars(kind), name), f"{kind.__name__}.{name}", depth)


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """Return a function's code object and those of nested functions."""
    inner = [one for const in code.co_consts if isinstance(const, types.CodeType) for one in _codes(const)]
    return [code, *inner]


def _own(value: Any) -> Mapping[str, Any]:
    """Return the attributes in the object's ``__dict__``; empty for objects with slots only."""
    return getattr(value, "__dict__", None) or {}


def _words(code: types.CodeType) -> list[str]:
    """Return strings in a function that may be attribute names, as in getattr()."""
    return [const for const in code.co_consts if isinstance(const, str) and const.isidentifier()]


def _is_called_unnamed(name: str) -> bool:
    """Return True for methods such as ``__getitem__``, which operators call without naming them."""
    return name.startswith("__") and name.endswith("__") and name not in _NO_PART_OF_A_STEP


def _whole(container: Any) -> tuple[Any, ...]:
    return tuple(dict.values(container) if isinstance(container, dict) else container)


def _attribute(holder: Any, name: str) -> Any:
    """Read an attribute; an exception of a user-defined property is ignored here, since a step will raise it."""
    try:
        return getattr(holder, name)
    except Exception:
        return _MISSING


def _item(holder: Any, key: Any) -> Any:
    """Read the raw item; a dict's user-defined ``__getitem__`` is bypassed."""
    try:
        if isinstance(holder, dict):
            return dict.__getitem__(holder, key)
        return holder[key]
    except Exception:
        return _MISSING


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING
