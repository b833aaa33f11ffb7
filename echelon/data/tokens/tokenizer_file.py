"""``TokenizerFile``: a tokenizer of the library tokenizers, by a file or by a directory of transformers."""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from echelon.base.errors import DataError, UsageError, one_line

_FILE, _CONFIG = "tokenizer.json", "tokenizer_config.json"
#: Tokens that end a document in well-known vocabularies, for tokenizers that do not say theirs.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")


class TokenizerFile(NamedTuple):
    """A tokenizer as JSON.

    vocabulary: largest token id, plus 1
    ends:       token ids by text, of all tokens
    named_end:  text of the token that ends a text according to the tokenizer's directory; None if it does not say
    """

    text: str
    vocabulary: int
    ids: dict[str, int]
    named_end: str | None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def end_id(self, end: str | None) -> int | None:
        """Return the id of the token that ends a document: ``end``, or the tokenizer's own if that is None.

        Return None for an empty ``end``; raise UsageError if the token is not known.
        """
        if end == "":
            return None
        known = [one for one in ((end,) if end else (self.named_end, *_ENDS)) if one in self.ids]
        if known:
            return self.ids[str(known[0])]
        if end:
            raise UsageError(f"--end {end} is no token of this tokenizer; name one that is, or leave it out")
        raise UsageError("the tokenizer does not say which token ends a text; give --end TOKEN, or --end '' for none")


def read_tokenizer(path: Path) -> TokenizerFile:
    """Return the tokenizer of a ``tokenizer.json``, or of a directory that transformers can read."""
    file = path / _FILE if path.is_dir() else path
    if file.is_file():
        text = file.read_text(encoding="utf-8")
    elif path.is_dir():
        text = _converted(path)
    else:
        raise DataError(f"--tokenizer {path}: there is no such file or directory; give a tokenizer.json")
    try:
        ids = make_tokenizer(text).get_vocab()
    except DataError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{file} is no tokenizer of the library tokenizers: {one_line(error)}") from None
    return TokenizerFile(text, max(ids.values(), default=-1) + 1, ids, _named_end(file.parent))


def make_tokenizer(text: str) -> Any:
    """Return the tokenizer of the library for a tokenizer's JSON."""
    try:
        import tokenizers
    except ImportError:
        raise DataError(
            "tokenizing needs the tokenizers package, which is not installed; pip install 'echelon[text]'"
        ) from None
    result = tokenizers.Tokenizer.from_str(text)
    result.no_truncation()  # a tokenizer may be stored with the settings of its last use
    result.no_padding()
    return result


def _named_end(folder: Path) -> str | None:
    try:
        named = json.loads((folder / _CONFIG).read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    named = named.get("content") if isinstance(named, dict) else named
    return named if isinstance(named, str) else None


def _converted(folder: Path) -> str:
    """Return the JSON of a tokenizer that is stored in the files of its model."""
    try:
        AutoTokenizer: Any = importlib.import_module("transformers").AutoTokenizer
    except ImportError:
        raise DataError(
            f"--tokenizer {folder} has no {_FILE}; give one, or pip install transformers, which converts other files"
        ) from None
    try:
        return str(AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str())
    except Exception as error:
        raise DataError(f"--tokenizer {folder} cannot be converted by transformers: {one_line(error)}") from None
