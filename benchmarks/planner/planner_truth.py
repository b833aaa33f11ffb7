"""The planner against published runs: how far its step times and memory are from what others have measured.

    python benchmarks/planner/planner_truth.py [--data DIR] [--seed 0] [--cross] [--rows]
    python benchmarks/planner/planner_truth.py --csv FILE [--fit FILE] [--seed 0] [--rows]

The first form prints all tables: vTrain's runs of Megatron-LM (A100, one host and many), Megatron-LM's own (SC21), and
torchtitan's (H100). The second takes any other file in these formats: columns by name, in any order; layers, hidden,
heads, seq, t, d, p, gpus, global_batch, micro_batch, or model, fsdp, tp, pp, local_batch; step_ms, step_s,
tflops_per_gpu or tps_per_gpu; vocab, virtual_stages, recompute and device where not 51200, 1, what fits and A100.
--fit FILE fits the constants of planner_truth_systems.py on that file first: on a random quarter of it where it is the
same file, and the last line is then of the other rows. Without it they are those found on a quarter of vTrain's rows.

pair-order: of two runs of one task (model, GPUs, batch), how often the quicker is foretold; regret: how much longer the
run takes that is foretold to be the quickest of its task than the quickest one, in the mean over tasks.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.planner.fit_constants import FittedConstant, fit
from benchmarks.planner.planner_truth_memory import titan_memory
from benchmarks.planner.planner_truth_rows import GIB, Row, read
from benchmarks.planner.planner_truth_systems import (
    FITTED,
    FOUND,
    FittedFigures,
    Foretelling,
    needs_recompute,
    system_of,
)

SINGLE, MULTI = "a100_single_node.csv", "a100_multi_node.csv"
MEGATRON, TITAN = "megatron_sc21_table1_a100.csv", "torchtitan_h100_llama31.csv"
PART = 4  # constants are fitted on one row of so many
MANY = 200  # rows of another file, beyond which a part of them is enough to fit on


@dataclasses.dataclass(frozen=True)
class Quality:
    """Errors of predictions, in per cent."""

    mape: float
    p90: float
    pair_order: float
    regret: float

    def __str__(self) -> str:
        order, regret = f"pair-order {self.pair_order:.1f}%", f"regret {self.regret:.1f}%"
        return f"MAPE {self.mape:.1f}% p90 {self.p90:.1f}% {order} {regret}"


def judge(rows: Sequence[Row], foretold: Sequence[float]) -> Quality:
    errors = sorted(abs(guess / row.seconds - 1) for row, guess in zip(rows, foretold, strict=True))
    tasks: defaultdict[object, list[tuple[float, float]]] = defaultdict(list)
    for row, guess in zip(rows, foretold, strict=True):
        tasks[row.task].append((guess, row.seconds))
    groups = [group for group in tasks.values() if len(group) > 1]
    pairs = [(a[0] < b[0]) == (a[1] < b[1]) for group in groups for a, b in itertools.combinations(group, 2)]
    regrets = [min(group)[1] / min(seconds for _, seconds in group) - 1 for group in groups]
    return Quality(
        100 * statistics.mean(errors),
        100 * errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        100 * statistics.mean(pairs) if pairs else float("nan"),
        100 * statistics.mean(regrets) if regrets else float("nan"),
    )


def fitted(rows: Sequence[Row], steps: int = 60) -> Foretelling:
    """Return predictions with constants fitted on ``rows``, for each system that has some."""
    figures = {}
    for name, known in FITTED.items():
        own = [row for row in with_recompute(rows) if system_of(row).name == name]
        if own:
            figures[name] = _fit(name, known, own, steps)
    return Foretelling(figures)


def _fit(name: str, known: Mapping[str, FittedConstant], rows: Sequence[Row], steps: int) -> FittedFigures:
    seconds, tasks = [row.seconds for row in rows], [row.task for row in rows]

    def predicted(given: Mapping[str, float]) -> list[float]:
        return Foretelling({name: FOUND[name].with_(given)}).seconds(rows)

    return FOUND[name].with_(fit(known, predicted, seconds, steps, tasks))


def with_recompute(rows: Sequence[Row]) -> list[Row]:
    """Rows that all say whether they recompute, as the whole table lets one infer."""
    full = needs_recompute(rows)
    return [
        dataclasses.replace(row, recompute=row.recompute or ("full" if row.shape in full else "none")) for row in rows
    ]


def a_quarter(rows: Sequence[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """A random quarter, and the rest."""
    chosen = set(random.Random(seed).sample(range(len(rows)), max(1, len(rows) // PART)))
    return [row for i, row in enumerate(rows) if i in chosen], [row for i, row in enumerate(rows) if i not in chosen]


def show(what: str, rows: Sequence[Row], by: Foretelling, each: bool = False) -> Quality:
    foretold = by.seconds(rows, simulate=True)
    quality = judge(rows, foretold)
    print(f"{what:<58} {len(rows):>4} rows  {quality}")
    if each:
        for row, guess in zip(rows, foretold, strict=True):
            mesh = f"d{row.replicate} p{row.stage}x{row.chunks} t{row.split} micro {row.micro_batch:g}"
            print(
                f"  {_name(row):<28} {mesh:<26} {row.seconds:9.3f} s  {guess:9.3f} s  {guess / row.seconds - 1:+7.1%}"
            )
    return quality


def _name(row: Row) -> str:
    extras = [
        word for word, there in (("compile", row.compiled), ("float8", row.float8), ("async", row.async_split)) if there
    ]
    return " ".join([row.name or f"{row.shape.parameters / 1e9:.1f}B", f"x{row.gpus}", *extras])


def show_constants(system: str, by: Foretelling, fitted_on: str) -> None:
    print(f"constants of {system}, fitted on {fitted_on}:")
    for name, constant in FITTED[system].items():
        found = by.figures[system].value(name)
        print(f"  {name:<18} {found:10.3g}  {constant.says} (taken as likely before: {constant.usual:.3g})")


def all_tables(data: Path, seed: int, cross: bool, each: bool) -> None:
    missing = [name for name in (SINGLE, MULTI, MEGATRON, TITAN) if not (data / name).exists()]
    if missing:
        raise SystemExit(f"{data} has no {', '.join(missing)}: name the directory with --data or ECHELON_PLANNER_DATA")
    single, multi = with_recompute(read(data / SINGLE)), with_recompute(read(data / MULTI))
    megatron, titan = read(data / MEGATRON), read(data / TITAN)
    vtrain = single + multi
    seen, unseen = a_quarter(vtrain, seed)
    by = fitted(seen)
    show_constants("Megatron-LM", by, f"{len(seen)} of {len(vtrain)} vTrain rows (random, seed {seed})")
    show("vTrain, rows it was not fitted on", unseen, by)
    show("vTrain, all rows", vtrain, by)
    show("vTrain, one host", single, by)
    show("vTrain, several hosts", multi, by, each)
    show("Megatron-LM SC21, nothing fitted on it", megatron, by, each)
    seen, unseen = titan[::PART], [row for at, row in enumerate(titan) if at % PART]
    by = fitted(seen)
    show_constants("torchtitan", by, f"{len(seen)} of {len(titan)} torchtitan rows (every {PART}th)")
    show("torchtitan, rows it was not fitted on", unseen, by)
    show("torchtitan, all rows", titan, by, each)
    show_memory(titan)
    if cross:
        cross_validate(single, multi, megatron, seed)


def show_memory(rows: Sequence[Row]) -> None:
    known = [row for row in rows if row.memory]
    errors = []
    for row in known:
        guess = titan_memory(row)
        errors.append(abs(guess / row.memory - 1))
        print(f"  {_name(row):<28} {row.memory / GIB:7.1f} GiB  {guess / GIB:7.1f} GiB  {guess / row.memory - 1:+7.1%}")
    print(f"{'torchtitan, memory':<58} {len(known):>4} rows  MAPE {100 * statistics.mean(errors):.1f}%")


def cross_validate(single: list[Row], multi: list[Row], megatron: list[Row], seed: int) -> None:
    print("cross-validation: constants fitted elsewhere")
    alone = fitted(a_quarter(single, seed)[0])
    show("fitted on a quarter of one host: several hosts", multi, alone)
    show("fitted on a quarter of one host: Megatron-LM SC21", megatron, alone)
    for hidden in sorted({row.shape.hidden for row in single}):
        others = [row for row in single if row.shape.hidden != hidden]
        left_out = [row for row in single if row.shape.hidden == hidden]
        show(f"fitted on a quarter of the others: hidden {hidden}", left_out, fitted(a_quarter(others, seed)[0]))


def one_table(path: Path, fit_on: Path | None, seed: int, each: bool) -> None:
    rows = with_recompute(read(path))
    if not rows:
        raise SystemExit(f"{path} has no rows; the first line names the columns, the others are runs")
    by, judged = Foretelling(), rows
    print("constants: found on a quarter of the vTrain rows" if fit_on is None else "constants: fitted now")
    if fit_on is not None:
        seen, judged = with_recompute(read(fit_on)), rows
        if fit_on.resolve() == path.resolve():
            seen, judged = a_quarter(rows, seed)
        elif len(seen) > MANY:
            seen, _ = a_quarter(seen, seed)
        by = fitted(seen)
        for system in sorted({system_of(row).name for row in seen}):
            show_constants(system, by, f"{len(seen)} rows of {fit_on.name} (random, seed {seed})")
        show(f"{path.name}, all rows", rows, by)
    print(show(f"{path.name}, rows it was not fitted on", judged, by, each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("ECHELON_PLANNER_DATA", "data/planner")))
    parser.add_argument("--csv", type=Path, help="another table to foretell")
    parser.add_argument("--fit", type=Path, help="a table to fit the constants on first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cross", action="store_true", help="also fit on some models or files and judge on others")
    parser.add_argument("--rows", action="store_true", help="every row of the small tables")
    given = parser.parse_args()
    for path in (given.csv, given.fit):
        if path is not None and not path.exists():
            raise SystemExit(f"there is no file {path}")
    if given.csv is None:
        all_tables(given.data, given.seed, given.cross, given.rows)
    else:
        one_table(given.csv, given.fit, given.seed, given.rows)


if __name__ == "__main__":
    main()
