"""Read the imports between the packages of Echelon from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "echelon"


@dataclass(frozen=True)
class Import:
    """One import of a module of Echelon by another.

    kind:  ``import`` when the importing module is loaded, ``lazy`` inside a function, ``type`` for the type checker
    """

    source: str
    target: str
    kind: str

    @property
    def packages(self) -> tuple[str, str]:
        return package_of(self.source), package_of(self.target)


def package_of(module: str) -> str:
    """Return the top-level package of a module; the root package counts as ``api``, its ``__main__`` as ``cli``."""
    parts = module.split(".")
    if len(parts) == 1:
        return "api"
    return "cli" if parts[1] == "__main__" else parts[1]


def all_imports() -> list[Import]:
    """Return every import between modules of Echelon."""
    modules = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    found = []
    for module, path in modules.items():
        for target, kind in _targets(ast.parse(path.read_text(encoding="utf-8")), "import"):
            name = target if target in modules else target.rpartition(".")[0]
            if name in modules:
                found.append(Import(module, name, kind))
    return found


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _targets(node: ast.AST, kind: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        yield from ((name.name, kind) for name in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from ((f"{node.module}.{name.name}", kind) for name in node.names)
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _targets(child, "type")
        for child in node.orelse:
            yield from _targets(child, kind)
    else:
        inside = "lazy" if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) else kind
        for child in ast.iter_child_nodes(node):
            yield from _targets(child, inside)
