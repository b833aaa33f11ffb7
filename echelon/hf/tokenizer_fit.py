"""Compares the tokenizer of a model's directory with the model's vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def tokenizer_misfit(folder: Path, words: int) -> str | None:
    """Return a line if the directory's tokenizer has ids that the model has no row for; None if it fits, or is absent.

    words: rows of the model's embedding
    """
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        last = max(_ids(content), default=-1)
    except (OSError, ValueError, TypeError, AttributeError, KeyError):  # transformers will say what it cannot read
        return None
    if last < words:
        return None
    return (
        f"hf: the tokenizer in {folder} has ids up to {last}, and the model {words} words; it is the tokenizer of "
        "another model, and larger ids will fail"
    )


def _ids(content: dict[str, Any]) -> Iterator[int]:
    vocabulary = content["model"].get("vocab") or {}
    yield len(vocabulary) - 1 if isinstance(vocabulary, list) else max(vocabulary.values(), default=-1)
    yield from (token["id"] for token in content.get("added_tokens") or ())
