"""``echelon zoo copy NAME``: write a model and its training loop into a script that the user can change."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import jinja2
import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.zoo.entry import Model, Request
from echelon.zoo.own.own_object import is_place
from echelon.zoo.train.resolve import TrainConfig, resolve
from echelon.zoo.train.train_arguments import TrainArguments

_HERE = Path(__file__).parent
_BLOCKS = "echelon.zoo.models."  #: prefix of modules whose code is copied; names from other modules are imported


def copy_model(name: str, out: str | None) -> str:
    """Write the script and return a message for the user."""
    path = Path(out or f"{name.replace(':', '_').replace('/', '_')}.py")
    if path.exists():
        raise UsageError(f"'{path}' is there already; remove it, or name another file: echelon zoo copy {name} FILE")
    path.write_text(script(name), encoding="utf-8")
    return f"{path} trains {name} as it is; try: echelon run --procs 2 {path}"


def script(name: str) -> str:
    """Return the text of the script."""
    if is_place(name):
        raise UsageError(f"'{name}' is a file of your own already; train it: echelon train --model_name {name}")
    if ":" in name:
        raise UsageError(f"'{name}' is another library's model and is not copied; see the pages of that library")
    resolved = resolve(TrainArguments(run={"model_name": name}))
    resolved = resolved.with_data(resolved.dataset.open(resolved.request))
    making = _making(resolved.model, resolved.request)
    code = CopiedSource.of(making.roots)
    template = jinja2.Template((_HERE / "copy.py.j2").read_text(encoding="utf-8"), keep_trailing_newline=True)
    text: str = template.render(
        name=name,
        about=resolved.model.about,
        imports="\n".join(sorted(code.imports)),
        definitions="\n\n\n".join(code.definitions),
        values=_values(resolved),
        task=resolved.request.task,
        call=making.call,
    )
    return text


def _values(resolved: TrainConfig) -> str:
    """Return the parameter values for the parts of the zoo that the script imports."""
    return "\n".join(f"    {name!r}: {value.value!r}," for name, value in resolved.values.items())


@dataclass(frozen=True)
class ModelConstruction:
    """The code that constructs a model: the call as source text, and the (module, name) pairs that it uses."""

    call: str
    roots: list[tuple[str, str]]


def _making(entry: Model, request: Request) -> ModelConstruction:
    """Return a call of the model's class if its arguments are plain values, else of the build function of its entry."""
    kind, call = _watched(entry, request)
    if kind.__module__.startswith(_BLOCKS) and _is_code(call):
        used = {node.id for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Name)}
        return ModelConstruction(
            call, [(kind.__module__, name) for name in sorted(used) if name in _globals(kind.__module__)]
        )
    build: Any = entry.build
    function, constants = (build.func, build.args) if isinstance(build, functools.partial) else (build, ())
    places = [_place(constant) for constant in constants]
    given = ", ".join([*(name for _, name in places), "Request(VALUES, TASK)"])
    return ModelConstruction(f"{function.__name__}({given})", [*places, (function.__module__, function.__name__)])


def _watched(entry: Model, request: Request) -> tuple[type[nn.Module], str]:
    """Return the model's class and the source of the call that constructs it, recorded while the model is built."""
    with torch.device("meta"):
        kind = type(entry.build(request))
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        original: Any = kind.__init__

        def noted(self: nn.Module, *args: Any, **named: Any) -> None:
            calls.append((args, named))
            original(self, *args, **named)

        kind.__init__ = noted  # type: ignore[method-assign]
        try:
            entry.build(request)
        finally:
            kind.__init__ = original  # type: ignore[method-assign]
    args, named = calls[0]
    given = inspect.signature(original).bind(None, *args, **named).arguments
    written = ", ".join(f"{name}={value!r}" for name, value in list(given.items())[1:])
    return kind, f"{kind.__name__}({written})"


def _is_code(call: str) -> bool:
    try:
        return bool(ast.parse(call, mode="eval"))
    except SyntaxError:  # the repr of an argument is not Python code
        return False


def _globals(module: str) -> dict[str, Any]:
    return vars(sys.modules[module])


def _place(constant: Any) -> tuple[str, str]:
    """Return the module and the name of a constant of the zoo's models."""
    for module in [name for name in sys.modules if name.startswith(_BLOCKS)]:
        for name, value in _globals(module).items():
            if value is constant:
                return module, name
    raise UsageError(
        "this model is not made from named parts, and cannot be copied; its file in echelon/zoo/models can"
    )


@dataclass
class CopiedSource:
    """The source that a class needs: definitions, in the order of their files, and imports."""

    definitions: list[str]
    imports: set[str]

    @classmethod
    def of(cls, roots: list[tuple[str, str]]) -> CopiedSource:
        result = cls([], set())
        for module, name in roots:
            result._take(module, {name})
        return result

    def _take(self, module: str, wanted: set[str]) -> None:
        """Add the definitions of ``wanted`` names and of all names they use; those of other model files come first."""
        source = inspect.getsource(sys.modules.get(module) or import_module(module))
        tree = ast.parse(source)
        defined = {name: node for node in tree.body for name in _defines(node)}
        imported = dict(pair for node in tree.body for pair in _brings(node))
        reached = _closure(wanted, defined)
        for name in sorted({used for each in reached for used in _names(defined[each])} & imported.keys()):
            self._import(name, imported[name])
        for node in dict.fromkeys(node for name, node in defined.items() if name in reached):
            text = _text(source, node)
            if text not in self.definitions:
                self.definitions.append(text)

    def _import(self, name: str, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(_BLOCKS):
            self._take(str(node.module), {name})
            return
        alias = next(alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) == name)
        shown = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
        self.imports.add(
            f"from {node.module} import {shown}" if isinstance(node, ast.ImportFrom) else f"import {shown}"
        )


def _closure(wanted: set[str], defined: dict[str, ast.stmt]) -> set[str]:
    reached: set[str] = set()
    waiting = [name for name in wanted if name in defined]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [used for used in _names(defined[name]) if used in defined]
    return reached


def _defines(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _brings(node: ast.stmt) -> Iterator[tuple[str, ast.Import | ast.ImportFrom]]:
    if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__":
        yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)


def _names(node: ast.stmt) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _text(source: str, node: ast.stmt) -> str:
    """Return the source text of a statement, including its decorators."""
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])
