"""``TokenFiles``: rows of a fixed number of tokens from a tokenized corpus in mapped files."""

from __future__ import annotations

import os
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from echelon.base.errors import DataError, UsageError
from echelon.data.order import Indices
from echelon.data.seeding import Seeds
from echelon.data.tokens.megatron_index import megatron_index, megatron_shard
from echelon.data.tokens.token_head import ShardHead, TokenHead, read_head
from echelon.data.tokens.token_store import TokenShard, TokenStore, require_size

IGNORED = -100  #: target without a prediction, the default of torch's cross_entropy
_CHUNK = 2**24  # bytes


class TokenFiles(Dataset[Any]):
    """Rows of tokens, and the tokens that follow them, over all documents of a corpus one after another.

    Row i is the tokens from ``i * length`` on. Files are mapped, so that opening a corpus of any size takes as long as
    opening a small one, and ranks of one host share the memory. Fewer than ``length`` tokens at the end are left out.

    path:       directory written by ``echelon tokenize``, or a data set of Megatron-LM: its prefix, .bin or .idx
    length:     tokens of a row
    documents:  True: rows are ``echelon.nn.Packed``, cut where documents end, so that positions restart in each
                document and attention stays inside it; targets in another document are -100
    named:      True: rows are dicts with the fields of models of transformers: ``input_ids``, and ``labels``, which
                are the same tokens, since these models shift them. With ``documents``, ``position_ids`` restart in
                each document, from which these models see where attention ends, and first tokens are no labels
    part:       the rows to use, as fractions: ``(0, 0.9)`` to train and ``(0.9, 1)`` to evaluate
    vocab_size: tokens that the model knows; a larger vocabulary of the files is an error

    >>> rows = echelon.data.TokenFiles("corpus.tokens", length=1024, part=(0, 0.99))
    >>> loader = engine.loader(rows, global_batch=512)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        length: int,
        *,
        documents: bool = False,
        named: bool = False,
        part: tuple[float, float] = (0.0, 1.0),
        vocab_size: int | None = None,
    ) -> None:
        if length < 1:
            raise UsageError(f"length={length}: a row needs at least one token")
        if not 0 <= part[0] < part[1] <= 1:
            raise UsageError(f"part={part}: expected two ascending fractions, such as (0, 0.9)")
        self.path, self.length, self._separates, self._named = Path(path), length, documents, named
        index = None if self.path.is_dir() else megatron_index(self.path)
        self.head = None if index else read_head(self.path)
        shards = [megatron_shard(index)] if index else _shards(self.path, self.head)
        self.store = TokenStore(shards)
        self.paths = [str(shard.path) for shard in shards]  #: files by which a resumed run recognizes the data
        self._require_fit(vocab_size)
        rows = max(len(self.store) - 1, 0) // length
        self._first, self._last = round(part[0] * rows), round(part[1] * rows)
        if not len(self):
            raise DataError(
                f"{path} has {len(self.store):,} tokens, which make no row of {length} and the token after it in "
                f"part={part}; use shorter rows or more text"
            )

    def __len__(self) -> int:
        return self._last - self._first

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        result = self.batch(np.array([index % len(self)]), np.zeros(1, np.uint64))
        if self._named:
            return {name: column[0] for name, column in result.items()}
        return result if self._separates else tuple(column[0] for column in result)

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids that may occur; None if the files do not say (Megatron-LM)."""
        return self.head.vocabulary if self.head else None

    def batch(self, indices: Indices, seeds: Seeds) -> Any:
        """Return rows, and the tokens that follow, as ``engine.loader`` reads them: [rows, length], or packed."""
        begins = (indices + self._first) * self.length
        tokens = np.stack([self.store.read(begin, self.length + 1) for begin in begins.tolist()])
        if self._named:
            return self._fields(begins, torch.from_numpy(tokens[:, :-1].copy()))
        inputs, targets = torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(tokens[:, 1:].copy())
        return self._packed(begins, inputs, targets) if self._separates else (inputs, targets)

    def check(self) -> None:
        """Read all files, and raise DataError if one differs from what was written (its CRC-32)."""
        for shard in self.head.shards if self.head else ():
            found = 0
            for kind in ("tokens", "documents"):
                with open(self.path / f"{shard.name}.{kind}", "rb") as file:
                    while piece := file.read(_CHUNK):
                        found = zlib.crc32(piece, found)
            if found != shard.crc32:
                raise DataError(f"{self.path / shard.name}: the files are damaged (CRC-32); copy them again")

    @property
    def has_positions(self) -> bool:
        """True if ``position_ids`` say where documents begin."""
        return self._named and self._separates

    def _fields(self, begins: Indices, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        fields = {"input_ids": inputs, "labels": inputs.clone()}
        if self._separates:
            sizes = np.array([size for begin in begins.tolist() for size in self._pieces(begin)])
            firsts = np.cumsum(sizes) - sizes
            fields["labels"].view(-1)[torch.from_numpy(firsts)] = IGNORED
            positions = np.arange(inputs.numel()) - np.repeat(firsts, sizes)
            fields["position_ids"] = torch.from_numpy(positions).view_as(inputs)
        return fields

    def _packed(self, begins: Indices, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        from echelon.nn.packed import pack_concatenated  # with echelon.nn, which plain rows do not need

        sizes = [size for begin in begins.tolist() for size in self._pieces(begin)]
        ends = np.cumsum(sizes) - 1
        flat = targets.flatten()
        flat[torch.from_numpy(ends[self._ends_document(begins, ends)])] = IGNORED
        pack = partial(pack_concatenated, lengths=sizes, multiple=1, longest=self.length)
        return pack(inputs.flatten()), pack(flat)

    def _pieces(self, begin: int) -> list[int]:
        """Return the lengths of the pieces of documents in one row."""
        starts = self.store.documents
        low, high = np.searchsorted(starts, [begin + 1, begin + self.length])
        return np.diff([begin, *starts[low:high].tolist(), begin + self.length]).tolist()  # type: ignore[no-any-return]

    def _ends_document(self, begins: Indices, ends: NDArray[Any]) -> NDArray[np.bool_]:
        """Return True for each place in a batch whose next token begins another document."""
        after = begins[ends // self.length] + ends % self.length + 1
        starts = self.store.documents
        result: NDArray[np.bool_] = starts[np.searchsorted(starts, after)] == after
        return result

    def _require_fit(self, vocab_size: int | None) -> None:
        if vocab_size is not None and (self.vocabulary or 0) > vocab_size:
            raise DataError(
                f"{self.path} has a vocabulary of {self.vocabulary:,} tokens, and the model knows {vocab_size:,}; "
                "tokenize with the model's tokenizer, or make the model's vocabulary larger"
            )


def _shards(path: Path, head: TokenHead | None) -> list[TokenShard]:
    assert head is not None
    return [_shard(path, shard, head.dtype) for shard in head.shards]


def _shard(path: Path, shard: ShardHead, dtype: np.dtype[Any]) -> TokenShard:
    offsets = path / f"{shard.name}.documents"
    require_size(offsets, shard.documents * 8)
    return TokenShard(path / f"{shard.name}.tokens", shard.tokens, dtype, partial(_offsets, offsets))


def _offsets(path: Path) -> Indices:
    return np.fromfile(path, "<i8").astype(np.int64, copy=False)
