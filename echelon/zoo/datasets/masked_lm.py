"""Text for the pretraining of BERT: masked words and next-sentence prediction (Devlin et al. 2019)."""

from __future__ import annotations

from echelon.base.errors import DataError
from echelon.zoo import registry
from echelon.zoo.datasets.tokens.masking import MaskedRows
from echelon.zoo.datasets.tokens.row_sizes import row_sizes
from echelon.zoo.datasets.tokens.sentences import SentencePairBuilder, documents_of, pieces_of
from echelon.zoo.datasets.tokens.token_files import find, read_text
from echelon.zoo.datasets.tokens.token_rows import TokenRows
from echelon.zoo.datasets.tokens.vocabulary import SETTINGS, WordPiece, vocabulary_for
from echelon.zoo.entry import Data, Dataset, Request, Setting


def open_masked(request: Request) -> Data:
    """Open text files with one sentence per line and blank lines between documents; the last documents are the test."""
    paths = find(request, "*.txt", "text files: a sentence a line, a blank line between documents")
    documents = [document for path in paths for document in documents_of(read_text(path))]
    held_out = round(len(documents) * request.get("test_part", 0.1))
    train, test = documents[: len(documents) - held_out], documents[len(documents) - held_out :]
    if not train:
        raise DataError(f"{paths[0]} has {len(documents)} documents, which leaves none to train on; add text")
    vocabulary = vocabulary_for(request, [line for document in train for line in document])
    rows = _masked(train, vocabulary, request)
    return Data(
        train=rows,
        test=_masked(test, vocabulary, request) if test else None,
        facts={"vocab_size": vocabulary.size},
        about=f"{len(rows)} sequences of {len(train)} documents in {len(paths)} files, {vocabulary.size} words",
    )


def _masked(documents: list[list[str]], vocabulary: WordPiece, request: Request) -> MaskedRows:
    length, most = row_sizes(request)
    texts = vocabulary.encode(line for document in documents for line in document)
    chapters = pieces_of(texts, [len(document) for document in documents], length - 3)
    if not chapters:
        raise DataError(f"the text of {request.get('dataset_dir')} has no words in it; check the files")
    pairs = SentencePairBuilder(chapters, length - 3, request.get("seed", 0)).pairs()
    rows = TokenRows(texts.tokens, pairs.spans, length, vocabulary.signs)
    return MaskedRows(rows, pairs.follows, most=most, others=vocabulary.ordinary)


for _name in ("masked_lm", "wiki"):
    registry.add(
        Dataset(
            name=_name,
            open=open_masked,
            tasks=("masked_lm",),
            about="text files for BERT: a sentence a line, a blank line between documents",
            settings=(*SETTINGS, Setting(name="test_part", default=0.1, meaning="the last documents, to evaluate")),
        )
    )
