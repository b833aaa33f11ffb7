"""Tokenized corpora in mapped files: ``echelon tokenize`` writes them, ``TokenFiles`` reads them."""

from echelon.data.tokens.token_files import TokenFiles
from echelon.data.tokens.tokenize_corpus import TokenizeOptions, tokenize_corpus

__all__ = ["TokenFiles", "TokenizeOptions", "tokenize_corpus"]
