"""Rules of style that a program can see: names of classes, files and tests, first words, words that are not used."""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from imports import PACKAGE

#: A docstring begins with none of these.
NOT_FIRST = {"What", "Who", "Where", "Whether", "How", "Of", "Those", "As", "Whoever", "Whose", "Which", "Why"}
#: A function's docstring begins with an imperative, so not with these either; a property's may.
NO_IMPERATIVE = {
    *("The", "A", "An", "This", "That", "These", "Its", "Their", "All", "Each", "Every", "One", "Both", "Some", "It"),
    *("From", "In", "For", "By", "With", "Without", "To", "On", "At", "Into", "Within", "Between", "Among", "Around"),
    *("When", "If", "Not", "No", "So", "Only", "Until", "Before", "After", "While", "They", "None", "Nothing"),
    *("Returns", "Raises"),
}
#: Prose speaks of processes, ranks, objects and user code.
PEOPLE = re.compile(r"\b(he|his|him|himself|nobody|somebody|whoever|whomever|everybody|anybody)\b")
#: Folders beside the package whose docstrings and comments follow the same rules.
BESIDE = ("tests", "examples", "benchmarks")
VAGUE_FILES = {"files.py", "show.py", "command.py", "words.py", "utils.py", "helpers.py", "common.py", "misc.py"}
LONGEST_TEST_NAME = 60
#: Words that no name in the package contains: the field has another one for each.
PRIVATE_WORDS = {
    *("told", "untold", "mine", "judged", "heed", "heeded", "tally", "courier", "company", "holdings", "addends"),
    *("cargo", "deed", "loans", "outlook", "nobody", "somebody", "anybody", "everybody", "whoever", "strangers"),
    *("story", "quickened", "foretell", "hunt", "tailor", "muster", "roster", "keeper", "council", "court"),
    *("witness", "lineup", "crew", "furnish", "likeness"),
}

parse = functools.cache(ast.parse)  # several tests read each module
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def read_sources(folder: str) -> dict[Path, str]:
    root = PACKAGE.parent
    return {path.relative_to(root): path.read_text("utf-8") for path in sorted((root / folder).rglob("*.py"))}


def find_docstrings(sources: dict[Path, str]) -> list[tuple[str, Documented, str]]:
    """Return the place, the node and the text of every docstring."""
    found = []
    for path, source in sources.items():
        for node in ast.walk(parse(source)):
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                found.append((f"{path}:{getattr(node, 'lineno', 1)}", node, text))
    return found


@pytest.fixture(scope="module")
def sources() -> dict[Path, str]:
    return read_sources(PACKAGE.name)


@pytest.fixture(scope="module")
def docstrings(sources: dict[Path, str]) -> list[tuple[str, Documented, str]]:
    return find_docstrings(sources)


def first_word(text: str) -> str:
    return text.split(maxsplit=1)[0].strip(",:;.")


def is_property(node: Documented) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ()))


def test_class_names_are_unique(sources: dict[Path, str]) -> None:
    defined = re.compile(r"^ *class (\w+)[(:]", re.MULTILINE)
    names = Counter(name for source in sources.values() for name in defined.findall(source))
    assert [name for name, count in names.items() if count > 1] == []


def test_file_names_say_something(sources: dict[Path, str]) -> None:
    assert [str(path) for path in sources if path.name in VAGUE_FILES] == []


def test_docstrings_begin_with_a_plain_word(docstrings: list[tuple[str, Documented, str]]) -> None:
    assert [f"{at}: {text.splitlines()[0]}" for at, _, text in docstrings if first_word(text) in NOT_FIRST] == []


def test_docstrings_of_functions_begin_with_a_verb(docstrings: list[tuple[str, Documented, str]]) -> None:
    functions = [
        (at, text)
        for at, node, text in docstrings
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node)
    ]
    assert [f"{at}: {text.splitlines()[0]}" for at, text in functions if first_word(text) in NO_IMPERATIVE] == []


def test_docstrings_speak_of_no_people(docstrings: list[tuple[str, Documented, str]]) -> None:
    assert [f"{at}: {match[0]}" for at, _, text in docstrings if (match := PEOPLE.search(text))] == []


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_comments_speak_of_no_people(sources: dict[Path, str]) -> None:
    found = [
        f"{path}:{line}: {text}"
        for path, source in sources.items()
        for line, text in comments(source)
        if PEOPLE.search(text)
    ]
    assert found == []


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the constant strings of a module that are no docstrings: messages, lines of logs and help."""
    tree = parse(source)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node.lineno, node.value


def test_messages_speak_of_no_people(sources: dict[Path, str]) -> None:
    texts = [(f"{path}:{line}", text) for path, source in sources.items() for line, text in strings(source)]
    texts += [(str(path), path.read_text("utf-8")) for path in PACKAGE.rglob("*.j2")]
    prose = [(at, text.replace("He et al.", "").lower()) for at, text in texts]
    assert [f"{at}: {match[0]}" for at, text in prose if (match := PEOPLE.search(text))] == []


@pytest.mark.parametrize("folder", BESIDE)
def test_prose_beside_the_package_is_plain(folder: str) -> None:
    sources = read_sources(folder)
    texts = [(at, text) for at, _, text in find_docstrings(sources)]
    texts += [
        (f"{path}:{line}", text.lstrip("#: "))
        for path, source in sources.items()
        for line, text in comments(source)
        if text.strip("#: ")
    ]
    assert [f"{at}: {text}" for at, text in texts if first_word(text) in NOT_FIRST or PEOPLE.search(text)] == []


def test_names_of_tests_are_short() -> None:
    tests = (PACKAGE.parent / "tests").rglob("test_*.py")
    names = [(path.name, name) for path in tests for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))]
    assert [place for place in names if len(place[1]) > LONGEST_TEST_NAME] == []


def test_names_of_tests_speak_of_no_people() -> None:
    tests = (PACKAGE.parent / "tests").rglob("test_*.py")
    names = [name for path in tests for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))]
    assert [name for name in names if PEOPLE.search(name.replace("_", " "))] == []


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the names of variables, attributes, parameters, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def test_names_are_words_of_the_field(sources: dict[Path, str]) -> None:
    named = [(f"{path}:{line}", name) for path, source in sources.items() for line, name in names_in(parse(source))]
    assert [f"{at}: {name}" for at, name in named if PRIVATE_WORDS & set(re.findall("[a-z]+", name.lower()))] == []


def test_commit_subjects_name_an_area() -> None:
    """``area: imperative``, at most 72 characters, in commits since the rule was made."""
    command = ["git", "log", "--no-merges", "--since=2026-11-18T12:00:00Z", "--format=%s"]
    subjects = subprocess.run(
        command, cwd=PACKAGE.parent, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    assert [line for line in subjects if not re.fullmatch(r"[a-z][a-z_ ,-]*: .+", line) or len(line) > 72] == []
