"""For the site: the list of every message that Echelon can end with, read from the source, under its class and room."""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent.parent.parent / "echelon"
MARK = "<!-- every message -->"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    return markdown.replace(MARK, listed()) if page.file.src_uri == "errors.md" else markdown


def listed() -> str:
    rooms: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        rooms[room] += [found for found in messages(path.read_text()) if found not in rooms[room]]
    return "\n\n".join(
        f"### {room}\n\n" + "\n".join(f"- *{kind}*: {_escaped(text)}" for kind, text in sorted(found))
        for room, found in rooms.items()
        if found
    )


def messages(source: str) -> Iterator[tuple[str, str]]:
    """(class, text) of every error that is raised with a text of its own; what is filled in stands in braces."""
    for node in ast.walk(ast.parse(source)):
        raised = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(raised, ast.Call) and isinstance(raised.func, ast.Name) and raised.args:
            text = _text(raised.args[0])
            if " " in text and not hasattr(builtins, raised.func.id):
                yield raised.func.id, text


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
    return text.replace("\\", "\\\\").replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_").replace("|", r"\|")
