"""For the site: the list of every message that Echelon can end with, read from the source, under its class and room."""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent.parent.parent / "echelon"
MARK = "<!-- every message -->"
BUILT_IN = {name for name, each in vars(builtins).items() if isinstance(each, type) and issubclass(each, BaseException)}
FILLED_IN = re.compile(r"\{[^}]*\}")
Functions = dict[str, list[ast.expr]]


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    if page.file.src_uri != "errors.md":
        return markdown
    return markdown.replace(MARK, listed(PACKAGE.rglob("*.py")))


def listed(paths: Iterable[Path]) -> str:
    trees = {path: ast.parse(path.read_text()) for path in sorted(paths)}
    kinds, answers = _kinds(trees.values()), _answers(trees.values())
    rooms: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path, tree in trees.items():
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        rooms[room] += [found for found in messages(tree, kinds, answers) if found not in rooms[room]]
    return "\n\n".join(
        f"### {room}\n\n" + "\n".join(f"- *{kind}*: {_escaped(text)}" for kind, text in sorted(set(found)))
        for room, found in rooms.items()
        if found
    )


def messages(tree: ast.AST, kinds: set[str], answers: Functions) -> Iterator[tuple[str, str]]:
    """(class, text) of every error that is made with a text of its own, raised there or by who asked for it; what is
    filled in stands in braces."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            for kind in (each.id for each in _either(node.func) if isinstance(each, ast.Name)):
                texts = _texts(node.args[0], answers) if kind in kinds else []
                yield from ((kind, text) for text in texts if " " in text and FILLED_IN.sub("", text).strip(" :"))


def _kinds(trees: Iterable[ast.AST]) -> set[str]:
    """The names of the errors that are Echelon's own."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found: set[str] = set()
    while more := {name for name, above in bases.items() if above & (found | BUILT_IN)} - found:
        found |= more
    return found


def _answers(trees: Iterable[ast.AST]) -> Functions:
    """What functions return, by their names: some make the text of an error."""
    found: Functions = defaultdict(list)
    for tree in trees:
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            returned = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
            found[function.name] += [value for value in returned if value is not None]
    return found


def _either(node: ast.expr) -> list[ast.expr]:
    return [*_either(node.body), *_either(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def _texts(node: ast.expr, answers: Functions) -> list[str]:
    """All that it can be, where it is written out or asked of a function."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return [_text(each) for answer in answers.get(node.func.id, []) for each in _either(answer)]
    return [_text(each) for each in _either(node)]


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.JoinedStr):
        return "".join(_part(part) for part in node.values)
    return ""


def _part(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue):
        named = part.value
        return "{" + (named.id if isinstance(named, ast.Name) else "...") + "}"
    return str(part.value) if isinstance(part, ast.Constant) else ""


def _escaped(text: str) -> str:
    text = " ".join(text.split())
    return text.replace("\\", "\\\\").replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_").replace("|", r"\|")
