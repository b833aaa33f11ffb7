"""``echelon plan --compare``: the differences of two saved plans add up, and unlike plans are said to be unlike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_plan_command import echelon

from echelon.plan.draft import Draft
from echelon.plan.saved_plan import SavedPlan, SavedPrediction

PIPELINE = Draft(batch=64, replicate=2, stage=2, cuts=(3,), micro_batches=8, schedule="1f1b")
SHARDED = Draft(batch=64, replicate=4, shard=1, recompute=(True,))


def predicted(parts: dict[str, float], *kinds: dict[str, float]) -> SavedPrediction:
    totals = tuple(sum(each.values()) for each in kinds)
    return SavedPrediction(seconds=sum(parts.values()), parts=parts, memory=totals, limit=80e9, kinds=kinds)


SLOW = predicted(
    {"compute": 0.080, "bubble": 0.030, "host": 0.002},
    {"parameters": 2e9, "activations": 9e9},
    {"parameters": 3e9, "activations": 1e9},
)
QUICK = predicted({"compute": 0.080, "recompute": 0.010, "host": 0.002}, {"parameters": 4e9, "activations": 2e9})


def saved(path: Path, draft: Draft, told: SavedPrediction | None, **others: Any) -> str:
    values: dict[str, Any] = {"units": tuple((f"layers.{at}",) for at in range(6)), "name": "net", "cluster": "4xA100"}
    SavedPlan(draft=draft, predicted=told, **(values | others)).save(path)
    return str(path)


def test_compare_tells_where_the_seconds_and_bytes_differ(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "a.json", PIPELINE, SLOW), saved(tmp_path / "b.json", SHARDED, QUICK)
    code, out, err = echelon("plan", "--compare", first, second, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["decisions"] == {
        "replicate": ["2", "4"],
        "stage": ["2", "1"],
        "cuts": ["3", "no"],
        "micro_batches": ["8", "1"],
        "schedule": ["1f1b", "no"],
        "recompute": ["no", "everywhere"],
        "shard": ["0", "1"],
    }
    assert sum(part["change"] for part in found["parts"].values()) == pytest.approx(QUICK.seconds - SLOW.seconds)
    assert found["seconds"]["in all"]["change"] == pytest.approx(-0.020)
    assert found["memory"]["activations"] == {"first": 9e9, "second": 2e9, "change": -7e9}  # of the fullest device
    assert found["memory"]["in all"]["change"] == -5e9
    assert found["per"] == "step"
    assert found["notes"] == []
    assert found["plans"][1]["samples_per_second"] == pytest.approx(64 / 0.092)
    assert found["sentence"] == (
        "b.json takes 17.9% less than a.json (92 ms against 112 ms a step): 30 ms less for bubble (waiting for other "
        "stages), but 10 ms more for recompute (forward once more, before backward)"
    )
    code, out, _ = echelon("plan", "--compare", first, second)
    assert code == 0
    assert found["sentence"] in out
    assert "-30 ms" in out
    assert "+10 ms" in out
    assert echelon("plan", "--compare", second, first, "--json")[1].count("b.json takes 17.9% less than a.json") == 1


def test_compare_says_what_makes_plans_unlike(tmp_path: Path) -> None:
    first = saved(tmp_path / "a.json", PIPELINE, SLOW)
    (tmp_path / "other").mkdir()
    other = {"name": "large", "cluster": "8xH100", "created_by": "echelon 9"}
    second = saved(tmp_path / "other" / "a.json", PIPELINE.replaced(batch=128), SLOW, **other)
    found = json.loads(echelon("plan", "--compare", first, second, "--json")[1])
    assert found["per"] == "sample"
    assert [plan["file"] for plan in found["plans"]] == [first, second]  # names alone would be the same
    assert found["seconds"]["in all"]["second"] == pytest.approx(SLOW.seconds / 128)
    assert [note.split(":")[0].split("(")[0].strip() for note in found["notes"]] == [
        "the plans are for different models",
        "the plans are for different machines",
        "the batches differ",
        "the predictions are those of an unknown version and echelon 9",
    ]
    bare = saved(tmp_path / "bare.json", SHARDED, None, model={"weight": (4, 4)})
    code, out, _ = echelon("plan", "--compare", first, bare)
    assert code == 0
    assert "bare.json was saved without a prediction" in out
    assert "Predicted" not in out
    assert "both take 112 ms a step; the plans are the same" in echelon("plan", "--compare", first, first)[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a.json", "nowhere.json"], "plan 'nowhere.json': there is no such file; 'echelon plan --save' writes one"),
        (["a.json", "text.json"], "plan 'text.json': it is not JSON"),
        (["a.json", "list.json"], "plan 'list.json': it is not an Echelon plan"),
        (["a.json"], "'--compare' requires 2 arguments"),
        (["a.json", "a.json", "--cluster", "V100"], "takes --json alone beside them; leave out --cluster"),
    ],
)
def test_compare_refuses_other_files_in_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "a.json", PIPELINE, SLOW)
    Path("text.json").write_text("no plan")
    Path("list.json").write_text("[]")
    code, out, err = echelon("plan", "--compare", *words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert said in err
