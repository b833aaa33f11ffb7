"""Puts the simulated clock, threads and disk in the place of the real ones, for the code of Echelon.

``time`` and ``threading`` are replaced in the modules of Echelon and in ``concurrent.futures``, which they wait with;
functions of ``os`` and ``open`` everywhere, because pathlib and shutil call them. Outside a life all of them pass
through to the real ones.
"""

from __future__ import annotations

import builtins
import concurrent.futures._base as futures
import contextlib
import inspect
import io
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from scheduler import Scheduler, SimulatedProcess, activate, active, is_active
from simulated_disk import SimulatedDisk
from simulated_threading import ThreadingModule, TimeModule

_THREADING, _TIME = ThreadingModule(), TimeModule()
_FUNCTIONS: dict[Any, Any] = {
    time.monotonic: TimeModule.monotonic,
    time.perf_counter: TimeModule.perf_counter,
    time.time: TimeModule.time,
    time.sleep: TimeModule.sleep,
}
_disk: list[SimulatedDisk] = []
Change = tuple[Any, str, Any, Any]


def _simulated(value: Any) -> Any:
    """Return the simulated form of a module or function; None if it has none."""
    if value is threading:
        return _THREADING
    if value is time:
        return _TIME
    if inspect.isbuiltin(value):
        return _FUNCTIONS.get(value)
    return None


def _changes_of(module: Any) -> Iterator[Change]:
    for name, value in list(vars(module).items()):
        if (other := _simulated(value)) is not None:
            yield module, name, value, other
        elif inspect.isfunction(value):
            yield from _changed_defaults(value)
        elif inspect.isclass(value) and value.__module__ == module.__name__:
            for member in list(vars(value).values()):
                if inspect.isfunction(member):
                    yield from _changed_defaults(member)


def _changed_defaults(function: Any) -> Iterator[Change]:
    """Yield the change of a function with a clock among the defaults of its parameters."""
    keywords = function.__kwdefaults__
    if keywords and any(_simulated(value) for value in keywords.values()):
        yield function, "__kwdefaults__", keywords, {name: _simulated(v) or v for name, v in keywords.items()}
    defaults = function.__defaults__
    if defaults and any(_simulated(value) for value in defaults):
        yield function, "__defaults__", defaults, tuple(_simulated(v) or v for v in defaults)


def _on_disk(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        return getattr(_disk[-1], name)(*args, **more) if _disk else real(*args, **more)

    return call


def _changes_of_system() -> Iterator[Change]:
    for name in (
        "open",
        "close",
        "write",
        "writev",
        "pwrite",
        "fsync",
        "ftruncate",
        "rename",
        "unlink",
        "mkdir",
        "rmdir",
    ):
        yield os, name, getattr(os, name), _on_disk(name, getattr(os, name))
    for name, same in (("fdatasync", "fsync"), ("replace", "rename"), ("remove", "unlink")):
        yield os, name, getattr(os, name), _on_disk(same, getattr(os, name))
    for module in (io, builtins):
        yield module, "open", module.open, _on_disk("open_stream", module.open)
    yield os, "getpid", os.getpid, _of_process("pid", os.getpid)
    yield os, "getppid", os.getppid, _of_process("parent", os.getppid)
    yield socket, "gethostname", socket.gethostname, _of_process("host", socket.gethostname)


def _of_process(field: str, real: Callable[[], Any]) -> Callable[[], Any]:
    def call() -> Any:
        process = active().current.process if is_active() else None
        return real() if process is None else getattr(process, field)

    return call


@contextlib.contextmanager
def simulated_system(*more: Change) -> Iterator[None]:
    """Put the simulated modules and functions in place inside the context. Code must be imported before.

    more:  further changes: an object, the name of its attribute, the present value, the simulated value
    """
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("echelon") and m is not None]
    changes = [change for module in [*modules, futures] for change in _changes_of(module)]
    changes += [*_changes_of_system(), *more]
    for owner, name, _, other in changes:
        setattr(owner, name, other)
    try:
        yield
    finally:
        for owner, name, real, _ in reversed(changes):
            setattr(owner, name, real)


@contextlib.contextmanager
def alive(
    scheduler: Scheduler, disk: SimulatedDisk, *per_process: tuple[Any, str, Callable[[], Any]]
) -> Iterator[None]:
    """Make a life's scheduler and disk the present ones inside the context.

    per_process: globals of which each process has its own: module, name, function that makes the first value
    """

    def exchange(old: SimulatedProcess | None, new: SimulatedProcess | None) -> None:
        for module, name, make in per_process:
            if old is not None:
                old.module_globals[module, name] = getattr(module, name)
            if new is not None:
                known = new.module_globals
                setattr(module, name, known[module, name] if (module, name) in known else make())

    real = [(module, name, getattr(module, name)) for module, name, _ in per_process]
    scheduler.on_switch = exchange
    activate(scheduler)
    _disk[:] = [disk]
    try:
        yield
    finally:
        _disk.clear()
        activate(None)
        for module, name, value in real:
            setattr(module, name, value)
