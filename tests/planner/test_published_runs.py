"""Published runs: tables in their formats, and the cost model's predictions for rows that nothing was fitted on."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from benchmarks.planner.fit_constants import FittedConstant, fit
from benchmarks.planner.planner_truth import MEGATRON, MULTI, SINGLE, a_quarter, judge, with_recompute
from benchmarks.planner.planner_truth_models import PublishedModel, Shape
from benchmarks.planner.planner_truth_rows import Row, UnknownFormat, read
from benchmarks.planner.planner_truth_systems import Foretelling, cluster, completions, draft, system_of
from echelon.planner.profiling.builders import gpt

DATA = Path(os.environ.get("ECHELON_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "planner"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no planner tables in ../shared/data or $ECHELON_TEST_DATA")

#: Korthikanti et al. 2022, tables 3 and 5: seconds with full recompute, and with selective recompute and sequence
#: parallelism. Nothing was fitted on them.
KORTHIKANTI = """model,layers,hidden,heads,seq,vocab,t,p,d,gpus,global_batch,micro_batch,v,full_recompute_s,selective_s
22B,48,6144,64,2048,51200,8,1,1,8,4,4,1,1.42,1.10
530B,105,20480,128,2048,51200,8,35,1,280,280,1,3,49.05,37.83
"""


def table(folder: Path, text: str, name: str = "runs.csv") -> list[Row]:
    (folder / name).write_text(text, encoding="utf-8")
    return read(folder / name)


# ---- formats ----


def test_row_with_two_ways_to_recompute_is_two_runs(tmp_path: Path) -> None:
    rows = table(tmp_path, KORTHIKANTI)
    assert [(row.recompute, row.seconds) for row in rows[:2]] == [("full", 1.42), ("selective", 1.10)]
    assert rows[1].options.sequence_split
    assert not rows[0].options.sequence_split


@pytest.mark.parametrize(
    ("full", "selective", "unit"),
    [("full", "selective", 1), ("full_ms", "present_work_ms", 1000), ("Full recompute (s)", "step_s_selective", 1)],
)
def test_ways_to_recompute_are_read_under_likely_names(tmp_path: Path, full: str, selective: str, unit: int) -> None:
    head, run = "layers,hidden,heads,seq,t,p,d,batch,micro_batch,mfu", "48,6144,64,2048,8,1,1,4,4,40"
    rows = table(tmp_path, f"{head},{full},{selective}\n{run},{1.42 * unit},{1.1 * unit}\n")
    assert [(row.recompute, row.seconds) for row in rows] == [("full", 1.42), ("selective", pytest.approx(1.1))]


@pytest.mark.parametrize("column", ["selective", "full_recompute"])
def test_flag_of_recompute_is_no_time(tmp_path: Path, column: str) -> None:
    head = "layers,hidden,heads,seq,t,p,d,batch,micro_batch,training_time_s,step_time"
    (row,) = table(tmp_path, f"{head},{column}\n48,6144,64,2048,8,1,1,4,4,99,1.42,1\n")
    assert row.seconds == 1.42


@pytest.mark.parametrize(
    ("column", "value", "seconds"),
    [
        ("step_time_s", "2.5", 2.5),
        ("iteration_time", "2.5", 2.5),
        ("s_per_iter", "2.5", 2.5),
        ("iter_s", "2.5", 2.5),
        ("time_s", "2.5", 2.5),
        ("Iteration Time (s)", "2.5", 2.5),
        ("step_time_sec", "2.5", 2.5),
        ("elapsed_time_per_iteration_ms", "2500.0", 2.5),
        ("Step time (ms)", "2500", 2.5),
        ("no_recompute_s", "2.5", 2.5),
        ("tps_per_gpu", "1024", 8 * 1024 / 8 / 1024),
    ],
)
def test_step_seconds_are_read_under_likely_names(tmp_path: Path, column: str, value: str, seconds: float) -> None:
    (row,) = table(tmp_path, f"num_layers,hidden_size,heads,seq,gpus,tp,batch,{column}\n4,512,8,1024,8,2,8,{value}\n")
    assert row.seconds == pytest.approx(seconds)
    assert (row.gpus, row.split, row.replicate, row.device) == (8, 2, 4, "A100")


def test_percent_of_peak_and_flops_give_the_same_seconds(tmp_path: Path) -> None:
    head = "layers,hidden,heads,seq,vocab,tp,pp,gpus,batch,micro_batch"
    shape = "80,12288,96,4096,131072,8,4,1536,2304,1"
    name = "weak_scaling_h100.csv"
    by_mfu, by_fraction, by_flops = (
        table(tmp_path, f"{head},{column}\n{shape},{value}\n", name)[0]
        for column, value in (("mfu", "47.0"), ("mfu", "0.47"), ("tflops_per_gpu", f"{0.47 * 989.4:.3f}"))
    )
    assert by_mfu.device == "H100"  # the file is named for it
    assert by_mfu.shape.flash
    assert by_mfu.seconds == pytest.approx(by_fraction.seconds) == pytest.approx(by_flops.seconds, rel=1e-3)
    assert system_of(by_mfu).name == "Megatron-Core"


def test_network_of_a_host_is_that_of_the_table(tmp_path: Path) -> None:
    head, run = "layers,hidden,heads,seq,t,p,d,batch,micro_batch,step_s", "4,512,8,128,8,1,4,16,1,1"
    named = table(tmp_path, f"{head}\n{run}\n", "a100_multi_node.csv")
    given = table(tmp_path, f"{head},network_gbps\n{run},400\n")
    usual = table(tmp_path, f"{head}\n{run}\n")
    found = [cluster(row.device, row.gpus, row.network).network for (row,) in (named, given, usual)]
    assert [network.bandwidth * 8e-9 for network in found] == [800, 400, 1600]
    assert found[0].rails == 4


@pytest.mark.parametrize(
    ("text", "lacking"),
    [
        ("a,b\n1,2\n", "layers, hidden, heads"),
        ("layers,hidden,global_batch,gpus\n24,1024,8,8\n", "step_s"),
        ("hidden,step_s\n1024,1\n", "layers, global_batch, gpus"),
        ("model,gpus,local_batch\n8B,8,2\n", "tps_per_gpu, seq"),
    ],
)
def test_unknown_format_names_what_it_lacks(tmp_path: Path, text: str, lacking: str) -> None:
    with pytest.raises(UnknownFormat) as error:
        table(tmp_path, text)
    assert "lacks the columns" in str(error.value)
    assert lacking in str(error.value)
    assert "\n" not in str(error.value)


def test_open_micro_batch_is_taken_as_the_quickest(tmp_path: Path) -> None:
    head = "layers,hidden,heads,seq,vocab,tp,pp,gpus,batch"
    (row,) = table(tmp_path, f"{head},mfu\n24,2304,24,4096,131072,1,1,48,192,41\n", "h100.csv")
    by = Foretelling()
    every = [by.seconds([one])[0] for one in completions(row)]
    assert len(every) == 3
    assert by.seconds([row]) == [min(every)]


# ---- models ----


def test_layers_that_are_alike_stand_for_every_depth() -> None:
    shape = Shape(5, 256, 4, 128, vocabulary=512, flash=True)
    ours = PublishedModel(shape).sheet(2).units[2]
    whole = gpt(5, 256, 4, 128, 512)
    theirs = whole.sheet(2).units[3]
    assert ours.weights == theirs.weights
    assert ours.forward.flops == pytest.approx(theirs.forward.flops)
    assert len(PublishedModel(shape).names) == len(whole.names)


def test_ranks_lie_as_in_megatron(tmp_path: Path) -> None:
    """Ranks of a split are neighbors, then replicas, then stages."""
    head = "layers,hidden,heads,seq,t,p,d,gpus,batch,micro_batch,step_s"
    (row,) = table(tmp_path, f"{head}\n4,512,8,128,2,2,4,16,16,1,1\n")
    order = draft(row, set()).order
    assert order[:4] == (0, 1, 8, 9)  # replica 0: its first stage, then its second
    assert order[4:8] == (2, 3, 10, 11)


# ---- fitting ----


def test_constant_behind_a_larger_cost_is_found() -> None:
    """The smaller of two costs has no slope at its usual value if the larger one counts."""
    sizes = [1.0, 2.0, 4.0, 8.0]
    known = {"latency": FittedConstant(1e-2, 0.7), "each": FittedConstant(0.9, 0.2)}
    found = fit(
        known, lambda one: [max(one["latency"], one["each"] * size / 100) for size in sizes], [0.05, 0.05, 0.05, 0.08]
    )
    assert math.isclose(found["latency"], 0.05, rel_tol=0.05)
    assert math.isclose(found["each"], 1.0, rel_tol=0.05)


# ---- predictions ----


def test_runs_with_selective_recompute_are_foretold_unseen(tmp_path: Path) -> None:
    rows = table(tmp_path, KORTHIKANTI)
    quality = judge(rows, Foretelling().seconds(rows, simulate=True))
    assert quality.mape < 6
    assert quality.pair_order == 100


@needs_data
def test_runs_of_megatron_on_thousands_of_gpus_are_foretold() -> None:
    rows = read(DATA / MEGATRON)
    assert judge(rows, Foretelling().seconds(rows, simulate=True)).mape <= 4.5


@needs_data
def test_vtrain_rows_that_were_not_fitted_are_foretold() -> None:
    rows = with_recompute(read(DATA / SINGLE)) + with_recompute(read(DATA / MULTI))
    _, unseen = a_quarter(rows, seed=0)
    by = Foretelling()
    found = judge(unseen, by.seconds(unseen, simulate=True))
    assert found.mape <= 5.5
    assert found.regret <= 2.0
    for many, least in ((False, 93), (True, 84)):
        part = [row for row in (rows if many else unseen) if (row.gpus > 8) == many]
        assert judge(part, by.seconds(part, simulate=True)).pair_order >= least
