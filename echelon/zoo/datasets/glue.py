"""The data set ``glue``: labelled texts or text pairs, in tables or JSON, with the tasks of GLUE (Wang et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from echelon.base.errors import DataError, UsageError
from echelon.zoo import registry
from echelon.zoo.datasets.tokens.row_sizes import row_length
from echelon.zoo.datasets.tokens.token_files import find_part, need_part, read_objects, read_table
from echelon.zoo.datasets.tokens.token_rows import LabelledRows, TokenRows
from echelon.zoo.datasets.tokens.vocabulary import SETTINGS, WordPiece, vocabulary_for
from echelon.zoo.entry import Data, Dataset, Request, Setting

WHAT = "train and dev as .tsv, .jsonl or .json"
ENDINGS = (".tsv", ".jsonl", ".json")


class GlueFileFormat(NamedTuple):
    """The layout of the files of a task.

    text, second, label: names of the columns; ``second`` is None if there is one text
    labels:              names of the classes; empty if the data determines them
    names:               names of all columns, if the file has no header
    broken_lines:        True to skip incomplete lines, which some published files have
    """

    text: str
    second: str | None
    label: str
    labels: tuple[str, ...] = ("0", "1")
    names: tuple[str, ...] = ()
    broken_lines: bool = False


ENTAILS = ("entailment", "not_entailment")
TASKS = {
    "cola": GlueFileFormat("sentence", None, "label", names=("source", "label", "star", "sentence")),
    "sst2": GlueFileFormat("sentence", None, "label"),
    "mrpc": GlueFileFormat("#1 String", "#2 String", "Quality"),
    "qqp": GlueFileFormat("question1", "question2", "is_duplicate", broken_lines=True),
    "mnli": GlueFileFormat("sentence1", "sentence2", "gold_label", ("contradiction", "entailment", "neutral")),
    "qnli": GlueFileFormat("question", "sentence", "label", ENTAILS),
    "rte": GlueFileFormat("sentence1", "sentence2", "label", ENTAILS),
    "wnli": GlueFileFormat("sentence1", "sentence2", "label"),
}


class GlueExample(NamedTuple):
    text: str
    second: str
    label: str
    place: str


def open_glue(request: Request) -> Data:
    layout = _layout(request)
    train = _read(need_part(request, _patterns(request, ["train"]), WHAT), layout)
    test = _read(find_part(request, _patterns(None, ["dev", "dev_matched", "validation"]), WHAT), layout)
    labels = layout.labels or _found(train)
    texts = [text for one in train for text in (one.text, one.second) if text]
    vocabulary = vocabulary_for(request, texts)
    length = row_length(request)
    return Data(
        train=_rows(train, labels, vocabulary, length),
        test=_rows(test, labels, vocabulary, length) if test else None,
        facts={"vocab_size": vocabulary.size, "num_classes": len(labels)},
        about=f"{len(train)} texts to train on and {len(test)} to test, {len(labels)} labels",
    )


def _layout(request: Request) -> GlueFileFormat:
    """Return the file format of the GLUE task, with the columns and labels that the user set."""
    task = request.get("glue_task")
    known = TASKS[task] if task else GlueFileFormat("text", None, "label", labels=())
    said = {
        "text": request.get("text_column"),
        "second": request.get("second_text_column"),
        "label": request.get("label_column"),
        "labels": tuple(part.strip() for part in request.get("labels", "").split(",") if part.strip()) or None,
    }
    layout = known._replace(**{name: value for name, value in said.items() if value is not None})
    if len(set(layout.labels)) < len(layout.labels):
        raise UsageError(f"--labels {','.join(layout.labels)} has one label twice")
    return layout


def _patterns(request: Request | None, parts: Sequence[str]) -> list[str]:
    given = request.get("file_pattern") if request else None
    return [given] if given else [part + ending for part in parts for ending in ENDINGS]


def _read(paths: list[Path], layout: GlueFileFormat) -> list[GlueExample]:
    examples = [one for path in paths for one in (_table if path.suffix == ".tsv" else _objects)(path, layout)]
    if paths and not examples:
        raise DataError(f"{paths[0]} has no rows in it; download it again")
    return examples


def _table(path: Path, layout: GlueFileFormat) -> list[GlueExample]:
    lines = read_table(path)
    header = list(layout.names) or (lines.pop(0)[1] if lines else [])
    columns = _columns(path, header, layout)
    examples = []
    for number, fields in lines:
        if len(fields) > max(columns):
            text, label, *second = (fields[column] for column in columns)
            examples.append(GlueExample(text, "".join(second), label.strip(), f"{path}, line {number}"))
        elif not layout.broken_lines:
            raise DataError(
                f"{path}, line {number} has {len(fields)} of {len(header)} columns; mend it, or download it again"
            )
    return examples


def _columns(path: Path, header: Sequence[str], layout: GlueFileFormat) -> list[int]:
    """Return the indices of the columns of text, label and second text."""
    wanted = [layout.text, layout.label, *([layout.second] if layout.second else [])]
    if missing := [name for name in wanted if name not in header]:
        raise DataError(
            f"{path} has no column '{missing[0]}' among {', '.join(header)}; "
            "set --glue_task, or --text_column, --second_text_column and --label_column"
        )
    return [list(header).index(name) for name in wanted]


def _objects(path: Path, layout: GlueFileFormat) -> list[GlueExample]:
    examples = []
    for number, one in read_objects(path):
        _columns(path, list(one), layout)
        second = str(one[layout.second]) if layout.second else ""
        examples.append(GlueExample(str(one[layout.text]), second, str(one[layout.label]), f"{path}, entry {number}"))
    return examples


def _found(examples: list[GlueExample]) -> tuple[str, ...]:
    """Return all labels, in numerical order if they are numbers."""
    labels = {one.label for one in examples}
    return tuple(sorted(labels, key=int if all(label.isdigit() for label in labels) else None))


def _rows(examples: list[GlueExample], labels: Sequence[str], vocabulary: WordPiece, length: int) -> LabelledRows:
    texts = vocabulary.encode(text for one in examples for text in (one.text, one.second))
    begins, sizes = texts.begins[:-1].reshape(-1, 2), np.diff(texts.begins).reshape(-1, 2)
    first, second = sizes.T
    room = np.where(second > 0, length - 3, length - 2)
    second_kept = np.minimum(second, np.maximum(room - first, room // 2))  # the longer text is truncated first
    kept = np.minimum(first, room - second_kept)
    spans = np.stack([begins[:, 0], kept, begins[:, 1], second_kept], 1)
    numbers = {label: number for number, label in enumerate(labels)}
    for one in examples:
        if one.label not in numbers:
            raise DataError(f"{one.place} has label '{one.label}', which is none of {', '.join(labels)}; set --labels")
    targets = np.array([numbers[one.label] for one in examples], np.int64)
    return LabelledRows(TokenRows(texts.tokens, spans, length, vocabulary.signs), targets)


registry.add(
    Dataset(
        name="glue",
        open=open_glue,
        tasks=("classify_text",),
        about="texts or pairs of texts with a label, in .tsv, .jsonl or .json; the tasks of GLUE by name",
        settings=(
            Setting(
                name="glue_task",
                default=None,
                meaning="whose columns the files have",
                kind=Literal["cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte", "wnli"] | None,
            ),
            Setting(name="text_column", default=None, meaning="by default 'text'", kind=str | None),
            Setting(name="second_text_column", default=None, meaning="of pairs", kind=str | None),
            Setting(name="label_column", default=None, meaning="by default 'label'", kind=str | None),
            Setting(
                name="labels", default=None, meaning="separated by commas; by default those of train", kind=str | None
            ),
            *SETTINGS,
        ),
    )
)
