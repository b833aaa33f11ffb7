"""WordPiece vocabularies, as in BERT (Schuster & Nakajima 2012), with the library tokenizers."""

from __future__ import annotations

import os
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import DataError, UsageError
from echelon.zoo.datasets.tokens.token_files import read_text
from echelon.zoo.datasets.tokens.token_rows import SpecialTokens
from echelon.zoo.entry import Request, Setting

#: the first words of a trained vocabulary, in this order
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

AT_ONCE = 10_000  #: number of texts encoded in one call, which limits the memory of the library's results

SETTINGS = (
    Setting(
        name="vocab_size_to_train",
        default=2000,
        meaning="words of the vocabulary made from the text, where vocab_file_name names none",
    ),
    Setting(
        name="lower_case",
        default=None,
        meaning="take all letters for small ones; by default where the vocabulary has no capitals",
        kind=bool | None,
    ),
)


@dataclass(frozen=True)
class TokenizedTexts:
    """Tokens of many texts, concatenated: text i is tokens[begins[i]:begins[i + 1]]."""

    tokens: NDArray[np.int32]
    begins: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.begins) - 1


class WordPiece:
    """A vocabulary; the number of a word is its index in the list."""

    def __init__(self, words: Sequence[str], *, lower_case: bool) -> None:
        self.words, self.size = tuple(words), len(words)
        numbers = {word: number for number, word in enumerate(words)}
        self.pad, self.unknown, self.begin, self.end, self.mask = (numbers[word] for word in SPECIAL)
        library = _library()
        model = library.models.WordPiece(vocab=numbers, unk_token="[UNK]", max_input_chars_per_word=100)
        self._tokenizer = _tokenizer(model, lower_case=lower_case)

    @property
    def signs(self) -> SpecialTokens:
        return SpecialTokens(self.pad, self.begin, self.end, self.mask)

    @property
    def ordinary(self) -> NDArray[np.int64]:
        """The numbers of all words, without special tokens and the unused entries of BERT's lists."""
        return np.array([number for number, word in enumerate(self.words) if not _is_marker(word)], np.int64)

    def encode(self, texts: Iterable[str]) -> TokenizedTexts:
        parts, lengths = [np.zeros(0, np.int32)], []
        for some in _batches(texts, AT_ONCE):
            for one in self._tokenizer.encode_batch_fast(some, add_special_tokens=False):
                parts.append(np.array(one.ids, np.int32))
                lengths.append(len(one.ids))
        return TokenizedTexts(np.concatenate(parts), np.array([0, *accumulate(lengths)], np.int64))

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens, and the range of characters of ``text`` that each token covers (the end is exclusive)."""
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets


def vocabulary_for(request: Request, texts: Sequence[str]) -> WordPiece:
    """Return the vocabulary of ``vocab_file_name``, or else one trained on ``texts``, the same on every rank."""
    name, lower_case = request.get("vocab_file_name"), request.get("lower_case")
    if name is not None:
        words = read_vocabulary(vocabulary_path(request.get("model_dir"), name))
        return WordPiece(words, lower_case=not _has_capitals(words) if lower_case is None else lower_case)
    lower_case = True if lower_case is None else lower_case
    return WordPiece(
        train_vocabulary(texts, request.get("vocab_size_to_train", 2000), lower_case), lower_case=lower_case
    )


def vocabulary_path(model_dir: str | None, name: str) -> Path:
    """Return the path of the vocabulary file, in ``model_dir`` or else ``name`` itself; raise DataError if missing."""
    inside = Path(model_dir or "", name).expanduser()
    path = inside if inside.is_file() else Path(name).expanduser()
    if not path.is_file():
        raise DataError(
            f"--vocab_file_name {name}: no file at {inside}; give the vocab.txt that belongs to the weights"
        )
    return path


def read_vocabulary(path: Path) -> list[str]:
    words = read_text(path).rstrip("\n").split("\n")
    words = [word.rstrip("\r") for word in words]
    if missing := [word for word in SPECIAL if word not in words]:
        raise DataError(
            f"{path} has no {', '.join(missing)}; a WordPiece vocabulary has one word a line, "
            f"{', '.join(SPECIAL)} among them"
        )
    return words


def train_vocabulary(texts: Sequence[str], size: int, lower_case: bool) -> list[str]:
    """Train a WordPiece vocabulary: characters first, then merged pairs in the order of their frequency.

    The library numbers the characters inside words (##a) in the order of a hash table, which differs between processes,
    and breaks ties by number. Passed as special tokens they have fixed numbers, so all ranks get the same vocabulary.
    """
    library = _library()
    tokenizer = _tokenizer(library.models.WordPiece(unk_token="[UNK]"), lower_case=lower_case)
    alphabet = _alphabet(texts, size // 4, tokenizer.normalizer)
    if not alphabet:
        raise DataError("a vocabulary cannot be made from an empty text; check the files, or give --vocab_file_name")
    inside = [f"##{character}" for character in alphabet if character not in string.punctuation]
    if len(SPECIAL) + len(alphabet) + len(inside) > size:
        raise UsageError(f"--vocab_size_to_train {size} is too small for {len(alphabet)} characters; give 1000 or more")
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=[*SPECIAL, *inside],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    numbers: dict[str, int] = tokenizer.get_vocab()
    return sorted(numbers, key=numbers.__getitem__)


def _alphabet(texts: Iterable[str], most: int, normalizer: Any) -> list[str]:
    """Return the ``most`` most frequent characters, in the order of their codes."""
    counts: Counter[str] = Counter()
    for some in _batches(texts, AT_ONCE):
        counts.update(normalizer.normalize_str("\n".join(some)))
    counted = sorted((-count, character) for character, count in counts.items() if not character.isspace())
    return sorted(character for _, character in counted[: max(most, 1)])


def _tokenizer(model: Any, *, lower_case: bool) -> Any:
    library = _library()
    tokenizer = library.Tokenizer(model)
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _library() -> ModuleType:
    # If unset, the library warns about every worker process that is forked later, though no worker tokenizes.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            "WordPiece needs the tokenizers package, which is not installed; pip install 'echelon[text]'"
        ) from None
    return tokenizers


def _is_marker(word: str) -> bool:
    return word in SPECIAL or (word.startswith("[unused") and word.endswith("]"))


def _has_capitals(words: Iterable[str]) -> bool:
    return any(word != word.lower() for word in words if not _is_marker(word))


def _batches(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    left = iter(texts)
    while some := list(islice(left, size)):
        yield some
