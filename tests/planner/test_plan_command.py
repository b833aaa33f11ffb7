"""``echelon plan``: what it prints is what the library predicts, for described models, callables and scripts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon import cli
from echelon.base import formatting
from echelon.plan.draft import Draft
from echelon.plan.prediction import PredictedMemory, Prediction
from echelon.plan.saved_plan import SavedPlan
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.cost.predict import predict
from echelon.planner.cost.system import ECHELON
from echelon.planner.default_run import DefaultRun, capabilities_of, find_default_run
from echelon.planner.plan_search.search import search
from echelon.planner.plan_search.search_result import PlanChoice, SearchResult
from echelon.planner.profiling.builders import gpt
from echelon.planner.profiling.profile import Profile
from echelon.tools.plan_report import plan_tables, sensitivity
from echelon.tools.plan_report.model_source import described_batch, mean_of_outputs
from echelon.tools.plan_report.report_data import PlanReport

SMALL = "gpt:layers=4,hidden=64,heads=4,sequence=32,vocabulary=500"
MACHINES, BATCH = "2x2xV100", 32


def echelon(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, run in this process."""
    before, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["echelon", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        sys.argv = before
    code = ended.value.code
    return int(code or 0), out.getvalue(), err.getvalue()


@functools.cache
def usual() -> DefaultRun:
    return find_default_run(small().model, None, {}, capabilities_of(Cluster.parse(MACHINES)))


@functools.cache
def small() -> Profile:
    return gpt(layers=4, hidden=64, heads=4, sequence=32, vocabulary=500)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """One run with all its outputs: the JSON, and where the page and the plan are."""
    room = tmp_path_factory.mktemp("planned")
    words = [SMALL, "--cluster", MACHINES, "--global-batch", str(BATCH), "--keep", "3", "--json"]
    words += ["--html", str(room / "page.html"), "--save", str(room / "plan.json")]
    code, out, err = echelon("plan", *words)
    assert code == 0, err
    return json.loads(out), room


def test_figures_are_those_of_the_library(planned: tuple[dict[str, Any], Path]) -> None:
    report, cluster = PlanReport.from_dict(planned[0]), Cluster.parse(MACHINES)
    assert 1 <= len(report.options) <= 3
    for option in report.options:
        told = predict(small(), cluster, option.draft, system=usual().runtime(ECHELON))
        assert option.seconds == pytest.approx(told.seconds, rel=1e-9)
        assert sum(option.prediction.parts.values()) == pytest.approx(option.seconds, rel=1e-6)
        assert [each.total for each in option.prediction.memory] == pytest.approx([each.total for each in told.memory])
    found = search(small(), cluster, batch=BATCH, keep=3, usual=usual(), system=usual().runtime(ECHELON))
    assert report.runs_as == "fp32, compiled blocks"  # V100 have no bf16
    assert report.choice.draft == found.best[0].draft
    assert [remark.what for remark in report.neighbours] == [other.what for other in found.rejected]
    assert [remark.what for remark in report.approximate] == [means.name for means in found.would_help]
    assert report.weights == 500 * 64 + 32 * 64 + 2 * 64 + 4 * (12 * 64 * 64 + 13 * 64)


def test_sensitivities_are_searches_on_another_cluster(planned: tuple[dict[str, Any], Path]) -> None:
    report, cluster = PlanReport.from_dict(planned[0]), Cluster.parse(MACHINES)
    told = {remark.what: remark for remark in report.sensitivities}
    for what, other, batch in (
        ("twice the network", cluster.with_(network=2.0), BATCH),
        ("twice the devices", cluster.with_(hosts=4), BATCH),
        ("half the batch", cluster, BATCH // 2),
    ):
        best = search(small(), other, batch=batch, keep=1, usual=usual(), system=usual().runtime(ECHELON)).best[0]
        assert told[what].seconds == pytest.approx(best.seconds, rel=1e-9)
        assert told[what].against == pytest.approx(best.seconds / report.choice.seconds - 1, abs=1e-9)
    assert [size.devices for size in report.sizes] == [1, 2, 4, 8, 16]
    assert report.sizes[2].seconds == report.choice.seconds


def test_the_page_and_the_tables_say_the_same(planned: tuple[dict[str, Any], Path]) -> None:
    report, page = PlanReport.from_dict(planned[0]), (planned[1] / "page.html").read_text()
    text = plan_tables.plain(report)
    for told in (str(report.choice.draft), formatting.duration(report.choice.seconds)):
        assert told in text
        assert told in page
    for remark in report.neighbours:
        assert f"{remark.what}: {plan_tables.in_words(remark)}" in text
    assert re.search(r"\n  V100 +default +float32 15.7 TFLOP/s, float16 125 TFLOP/s, memory 15.9 GB", text)


def test_a_saved_plan_is_explained_as_it_was_found(planned: tuple[dict[str, Any], Path]) -> None:
    path = str(planned[1] / "plan.json")
    code, out, err = echelon("plan", "--explain", path, "--json")
    assert code == 0, err
    before, after = PlanReport.from_dict(planned[0]), PlanReport.from_dict(json.loads(out))
    assert SavedPlan.load(path).draft == before.choice.draft == after.choice.draft
    assert after.choice.prediction == before.choice.prediction
    assert [dataclasses.replace(each, plan="") for each in after.neighbours] == [
        dataclasses.replace(each, plan="") for each in before.neighbours
    ]
    assert after.stages == before.stages
    assert len(after.options) == 1


def test_a_callables_model_takes_no_memory(tmp_path: Path) -> None:
    """102 GB of weights, which no test could hold."""
    (tmp_path / "large.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n"
        "    model = nn.Sequential(*[nn.Linear(40_000, 40_000, bias=False) for _ in range(16)])\n"
        "    return model, (torch.zeros(8, 40_000), torch.zeros(8, 40_000)), nn.functional.mse_loss\n"
    )
    words = ["--cluster", "8xH200", "--global-batch", "64", "--keep", "1"]
    code, out, err = echelon("plan", f"{tmp_path}/large.py:make", *words)
    assert code == 0, err
    assert out.startswith(
        "make: 25.6 billion parameters in 16 units, batch 64, bf16, not compiled\non 1 host of 8 H200 "
    )


SCRIPT = """
import sys
import torch
from torch import nn
import echelon

print("what the script says")
echelon.init()
model = nn.Sequential(nn.Linear(int(sys.argv[1]), 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
engine = echelon.distribute(model, optimizer=optimizer, loss=nn.functional.cross_entropy)
data = torch.utils.data.TensorDataset(torch.zeros(64, 20), torch.zeros(64, dtype=torch.long))
for batch in engine.loader(data, batch_size=16):
    engine.step(*batch)
    sys.exit("it trains")
"""


def test_a_script_is_planned_at_its_first_batch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    path = str(tmp_path / "plan.json")
    code, out, err = echelon("plan", f"{tmp_path}/train.py", "--cluster", "2xV100", "--save", path, "--", "20")
    assert code == 0, err
    assert out.startswith(f"train: {(20 * 64 + 64 + 64 * 10 + 10) / 1000:.3g} thousand parameters in ")
    assert "batch 16, fp32, not compiled\n" in out
    saved = SavedPlan.load(path)
    assert saved.made_from["optimizer"] == "momentum"
    assert f"1  {saved.draft}  " in out
    saved.check_model(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)))


def test_a_script_that_shows_no_batch_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "quiet.py").write_text("print('nothing to see')")
    code, out, err = echelon("plan", f"{tmp_path}/quiet.py", "--cluster", "2xV100")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"echelon: '{tmp_path}/quiet.py' ended before its first batch")


def test_where_nothing_fits_the_nearest_is_shown() -> None:
    code, out, err = echelon("plan", SMALL, "--cluster", "V100", "--global-batch", "8", "--memory", "500kB")
    assert code == 1
    assert "No plan fits" in out
    assert "The plan that lacks least" in out
    assert len(err.splitlines()) == 1
    assert err.startswith("echelon: no plan of gpt(4 layers, hidden 64) fits on V100: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "MODEL is missing; give one"),
        ([SMALL, "--global-batch", "8"], "--cluster is missing"),
        ([SMALL, "--cluster", "V100"], "--global-batch is missing"),
        ([SMALL, "--cluster", "V1000", "--global-batch", "8"], "there is no device 'V1000'"),
        ([SMALL, "--cluster", "V100", "--global-batch", "0"], "--global-batch 0: expected 1 or more"),
        ([SMALL, "--cluster", "V100", "--global-batch", "8", "--memory", "much"], "--memory: 'much' is no quantity"),
        ([SMALL, "--cluster", "V100", "--global-batch", "8", "--allow", "ampp"], "did you mean 'amp'?"),
        ([SMALL, "--cluster", "V100", "--global-batch", "8", "--optimizer", "adan"], "optimizer='adan' is not one"),
        ([SMALL, "--cluster", "V100", "--global-batch", "8", "--html", "/nowhere/p.html"], "--html '/nowhere/p.html'"),
        (["gpt:layer=2", "--cluster", "V100", "--global-batch", "8"], "gpt has no 'layer'; did you mean 'layers'?"),
        (["gpt:layers=x", "--cluster", "V100", "--global-batch", "8"], "gpt takes a whole number as layers, not 'x'"),
        (["gpt:layers=-2", "--cluster", "V100", "--global-batch", "8"], "gpt takes a whole number above 0 as layers"),
        (
            ["gpt:layers=2,hidden=8", "--cluster", "V100", "--global-batch", "8"],
            "lacks heads, sequence; write gpt:layers=2,",
        ),
        (["resnet", "--cluster", "V100", "--global-batch", "8"], "MODEL 'resnet' is no model that is known here"),
        (["nowhere.py", "--cluster", "V100"], "MODEL: no file at 'nowhere.py'"),
        (["nowhere.py:make", "--cluster", "V100"], "MODEL: no file at 'nowhere.py'"),
        (["torch.nn:Linea", "--cluster", "V100"], "there is no callable 'Linea' in torch.nn; did you mean 'Linear'?"),
        (["torch.nn:Linear", "--cluster", "V100"], "MODEL 'torch.nn:Linear' failed with TypeError"),
        (["torch.nn:ReLU", "--cluster", "V100"], "MODEL 'torch.nn:ReLU' returns a model without a batch"),
        (
            ["torch.nn:ReLU", "--cluster", "V100", "--input", "3x4"],
            "--global-batch is missing: --input 3x4 is one sample",
        ),
        (
            ["torch.nn:ReLU", "--cluster", "V100", "--global-batch", "4", "--input", "3xx4"],
            "--input '3xx4' describes no tensor",
        ),
        (
            ["torch.nn:ReLU", "--cluster", "V100", "--global-batch", "4", "--input", "int9:4"],
            "torch has no type 'int9'",
        ),
        (["torch:tensor", "--cluster", "V100"], "MODEL 'torch:tensor' failed with"),
        (["builtins:dict", "--cluster", "V100"], "MODEL 'builtins:dict' gave dict; return model, (model, batch)"),
        (["--explain", "nowhere.json"], "plan 'nowhere.json': there is no such file"),
    ],
)
def test_mistakes_are_told_in_one_line(words: list[str], said: str) -> None:
    code, _, err = echelon("plan", *words)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert err.startswith("echelon: ")
    assert said in err


def test_inputs_are_described_by_type_shape_and_range() -> None:
    images, tokens = described_batch("3x8x8, int64:128:30522")
    assert images.shape[1:] == (3, 8, 8)
    assert images.dtype == torch.float32
    assert tokens.shape[1:] == (128,)
    assert tokens.dtype == torch.int64
    assert float(mean_of_outputs((torch.full((2, 2), 3.0), {"a": torch.ones(4)}))) == 4.0


def test_amounts_in_words() -> None:
    assert [formatting.duration(s) for s in (1.234, 0.9996, 0.0123, 4.56e-5, 0.0)] == [
        "1.23 s",
        "1 s",
        "12.3 ms",
        "45.6 us",
        "0 s",
    ]
    assert [formatting.percent(p, signed=True) for p in (-0.09, 0.14, 0.0001, -1e-9)] == ["-9.0%", "+14%", "0%", "0%"]
    assert [formatting.size(s) for s in (80e9, 1.5e6, 12)] == ["80 GB", "1.5 MB", "12 bytes"]
    assert [formatting.count(n) for n in (1.746e11, 512)] == ["175 billion", "512"]


def test_clusters_grow_and_shrink_by_hosts_or_by_devices() -> None:
    def sizes(text: str) -> list[int | None]:
        found = [sensitivity.resized(Cluster.parse(text), times) for times in (0.25, 0.5, 1.0, 2.0, 4.0)]
        return [each.size if each else None for each in found]

    assert sizes("4x8xH100") == [8, 16, 32, 64, 128]
    assert sizes("2x8xH100") == [4, 8, 16, 32, 64]
    assert sizes("H100") == [None, None, 1, 2, 4]
    assert sizes("2x8xV100+1x8xT4") == [None, None, 24, 48, 96]


def test_when_searches_take_too_long_the_plan_there_is_answers() -> None:
    draft = Draft(batch=8, replicate=4)

    def answered(seconds: float) -> SearchResult:
        return SearchResult(
            (PlanChoice(draft, Prediction(seconds, {}, (PredictedMemory(1.0, 1.0, 1.0, 1.0),))),), (), 0, 0.0
        )

    choice, cluster = answered(2.0).best[0], Cluster.parse("2x2xV100")
    for costs, against in ((0.0, -0.5), (100.0, -0.25)):
        ask = sensitivity.SensitivitySearch(lambda *_: answered(1.0), lambda *_: answered(1.5), costs)
        remarks = sensitivity.sensitivities(choice, cluster, ask)
        assert [remark.against for remark in remarks] == pytest.approx([against] * len(remarks))
        assert [size.seconds for size in sensitivity.sizes(choice, cluster, ask)].count(2.0) == 1


def test_spread_changes_replicas_and_keeps_the_micro_batch_size() -> None:
    """A plan is spread over more or fewer replicas with micro-batches of the same size."""
    draft = Draft(batch=64, replicate=2, stage=2, cuts=(3,), micro_batches=8, schedule="1f1b", shard=1)
    twice = sensitivity.spread(draft, 8, 64)
    assert twice is not None
    assert (twice.replicate, twice.stage, twice.micro_batches, twice.micro_batch) == (4, 2, 4, 4.0)
    half = sensitivity.spread(draft, 2, 64)
    assert half is not None
    assert (half.replicate, half.micro_batches, half.shard) == (1, 16, 0)
    assert sensitivity.spread(draft, 4, 64) == draft
    assert sensitivity.spread(draft, 1, 64) is None
    assert sensitivity.spread(draft, 8, 30) is None
