"""Click logs and tables: Criteo's files, CSV and Parquet files with user-defined columns, and UCI Adult."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from echelon.base.errors import DataError, UsageError
from echelon.data import CtrFiles
from echelon.zoo import registry
from echelon.zoo.datasets.tokens.token_files import find, folder
from echelon.zoo.entry import Data, Dataset, Request, Setting

WHOLE = {"num_epochs": 1, "stop_at_step": 0}  #: logs are long, so each row is used once

TEST_PATTERN = Setting(
    name="test_pattern", default=None, meaning="which files of dataset_dir are for the test", kind=str | None
)
BROKEN = Setting(
    name="broken_lines", default="error", meaning="lines that cannot be read", kind=Literal["error", "skip"]
)
COLUMNS = (
    Setting(name="label_column", default="label", meaning="the column to predict"),
    Setting(name="positive_label", default="", meaning="texts of it that mean 1, by commas; else it has 0 and 1"),
    Setting(name="numeric_columns", default="", meaning="columns of numbers, by commas"),
    Setting(name="categorical_columns", default="", meaning="columns of words or ids, by commas"),
    Setting(name="missing", default="", meaning="texts that mean that nothing is there, beside the empty one"),
    Setting(
        name="number_transform",
        default="log1p",
        meaning="of numbers: log1p (of their size, the sign is kept) or none",
        kind=Literal["log1p", "none"],
    ),
    TEST_PATTERN,
    BROKEN,
)
TEXT_COLUMNS = (
    Setting(name="column_names", default="", meaning="of files without a header, by commas"),
    Setting(name="delimiter", default=",", meaning="the sign between columns"),
)


def open_criteo(request: Request) -> Data:
    return _opened(request, "day_*" if _has(request, "day_*") else "train*", format="criteo")


def open_csv(request: Request) -> Data:
    names = _listed(request, "column_names") or None
    return _opened(request, "*.csv*", format="csv", names=names, delimiter=request["delimiter"], **_columns(request))


def open_parquet(request: Request) -> Data:
    return _opened(request, "*.parquet", format="parquet", **_columns(request))


def _opened(request: Request, pattern: str, **options: Any) -> Data:
    """Open the files of ``file_pattern``, or else ``pattern``, without the test files."""
    test = _test_files(request)
    train = [path for path in find(request, pattern, "click logs") if path not in test]
    if not train:
        raise DataError(
            f"all files that match '{request.get('file_pattern', pattern)}' are for the test; "
            f"change --file_pattern or --test_pattern {request['test_pattern']}"
        )
    options["broken"] = request["broken_lines"]
    return _data(CtrFiles(train, **options), CtrFiles(test, **options) if test else None)


def _data(train: CtrFiles, test: CtrFiles | None) -> Data:
    for part in (train, test):
        if part is not None:
            _look_at(part)
    ids, numbers = _widths(train)
    parts = f"{len(train):,} rows" + (f", {len(test):,} for the test" if test is not None else "")
    about = f"{parts}, with {ids} columns of ids and {numbers} of numbers, from {Path(train.paths[0]).parent}"
    return Data(train=train, test=test, facts={"slots": ids, "numbers": numbers}, about=about)


def _look_at(files: CtrFiles) -> None:
    """Check the first block, so that wrong columns and labels raise DataError at the start and not during a run."""
    if not len(files):
        raise DataError(f"{files.paths[0]} has no rows; check the file, or download it again")
    labels = _first_block(files)[2]
    odd = labels[(labels != 0) & (labels != 1)]
    if len(odd):
        raise DataError(
            f"{files.paths[0]}: the label column has {odd[0].item():g}, and clicks are 0 or 1; name another column "
            "(--label_column), or the texts that mean 1 (--positive_label)"
        )


def _first_block(files: CtrFiles) -> list[torch.Tensor]:
    reader = files.reader()
    block = reader.columns(reader.fetch(0))
    whole = slice(None) if block.whole is None else torch.from_numpy(block.whole)
    return [column[whole] for column in block.columns]


def _widths(files: CtrFiles) -> tuple[int, int]:
    ids, numbers, _ = _first_block(files)
    return ids.shape[1], numbers.shape[1]


def _columns(request: Request) -> dict[str, Any]:
    numeric, categorical = _listed(request, "numeric_columns"), _listed(request, "categorical_columns")
    if not numeric and not categorical:
        raise UsageError(
            f"--dataset_name {request['dataset_name']} needs to know what to learn from: name columns by "
            "--categorical_columns and --numeric_columns, separated by commas"
        )
    return {
        "label": request["label_column"],
        "positive": _listed(request, "positive_label") or None,
        "numeric": numeric,
        "categorical": categorical,
        "missing": ["", *_listed(request, "missing")],
        "transform": request["number_transform"],
    }


def _listed(request: Request, name: str) -> list[str]:
    return [part.strip() for part in str(request[name]).split(",") if part.strip()]


def _has(request: Request, pattern: str) -> bool:
    return any(folder(request, "click logs").glob(pattern))


def _test_files(request: Request) -> list[Path]:
    pattern = request.get("test_pattern")
    if pattern is None:
        return []
    home = folder(request, "click logs")
    result = sorted(path for path in home.glob(pattern) if path.is_file())
    if not result:
        raise DataError(f"no file in {home} matches --test_pattern '{pattern}'; check the pattern")
    return result


# ---- UCI Adult

ADULT = (
    *("age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship"),
    *("race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country", "label"),
)
ADULT_NUMBERS = ("age", "education_num", "capital_gain", "capital_loss", "hours_per_week")
ADULT_WORDS = (
    *("workclass", "education", "marital_status", "occupation", "relationship", "race", "sex", "native_country"),
)
#: approximate mean and deviation of each number in the train part; of gains and losses, which are mostly 0, after log1p
ADULT_MEANS = np.array([38.6, 10.1, 0.73, 0.36, 40.4], np.float32)
ADULT_SPREADS = np.array([13.6, 2.6, 2.5, 1.6, 12.3], np.float32)


def open_adult(request: Request) -> Data:
    train, test = (_census(request, part) for part in ("train", "test"))
    return _data(train, test)


def _census(request: Request, part: str) -> CtrFiles:
    home = folder(request, "adult-train.csv.gz and adult-test.csv.gz")
    result = [path for name in (f"adult-{part}.csv.gz", f"adult-{part}.csv") if (path := home / name).is_file()]
    if not result:
        raise DataError(f"{home} has no adult-{part}.csv.gz; put UCI Adult's {part} part there under that name")
    return CtrFiles(
        result[:1],
        format="csv",
        names=ADULT,
        positive=(">50K", ">50K."),
        numeric=ADULT_NUMBERS,
        categorical=ADULT_WORDS,
        missing=("", " ?", "?"),
        transform=_standardized,
    )


def _standardized(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    money = slice(2, 4)
    made = numbers.copy()
    made[:, money] = np.log1p(made[:, money])
    scaled: NDArray[np.float32] = (made - ADULT_MEANS) / ADULT_SPREADS
    return scaled


registry.add(
    Dataset(
        name="criteo",
        open=open_criteo,
        tasks=("click",),
        about="Criteo's click logs: day_*.gz or train.txt, tab-separated, plain or gzip",
        settings=(TEST_PATTERN, BROKEN),
        defaults=WHOLE,
    )
)
registry.add(
    Dataset(
        name="csv",
        open=open_csv,
        tasks=("click",),
        about="CSV files, plain or gzip, with columns of your own",
        settings=COLUMNS + TEXT_COLUMNS,
        defaults=WHOLE,
    )
)
registry.add(
    Dataset(
        name="parquet",
        open=open_parquet,
        tasks=("click",),
        about="Parquet files with columns of your own",
        settings=COLUMNS,
        defaults=WHOLE,
    )
)
registry.add(
    Dataset(
        name="adult",
        open=open_adult,
        tasks=("click",),
        about="UCI Adult: which people earn more than 50,000 dollars a year (adult-train.csv.gz, adult-test.csv.gz)",
        defaults={"num_epochs": 8, "batch_size": 256, "stop_at_step": 0},
    )
)
