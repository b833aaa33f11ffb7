"""``echelon report`` of several runs: their table, their curves together, and the settings that differ."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import made_up_runs as made_up
import pytest
from test_report_page import XHTML, data, section, words

from echelon.base.errors import UsageError
from echelon.cli.commands.report import compare, report

SETTINGS = [{"name": "gradient_merge", "value": 4, "origin": "script"}]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs, of which the second has another optimizer and the third has failed; and an empty directory."""
    made_up.write(tmp_path / "runs" / "plain", last=200, optimizer="SGD(lr=0.1)", began=made_up.BEGAN)
    made_up.write(tmp_path / "runs" / "merged", last=100, optimizer="AdamW(lr=0.001)", settings=SETTINGS)
    made_up.append(tmp_path / "runs" / "nested" / "bad" / "metrics.jsonl", made_up.metrics(10, 50))
    failure = {"time": made_up.BEGAN + 9, "kind": "failed", "rank": 0, "text": "out of memory"}
    made_up.append(tmp_path / "runs" / "nested" / "bad" / "events.jsonl", [failure])
    (tmp_path / "runs" / "plots").mkdir()
    return tmp_path / "runs"


def test_comparison_overlays_curves_and_tables_what_differs(runs: Path, tmp_path: Path) -> None:
    path = compare([str(runs / "plain"), str(runs / "merged")], str(tmp_path / "both.html"))
    root = ElementTree.fromstring(path.read_text())
    loss = data(root, "runs-0")["series"]
    assert [(each["name"], each["x"][-1]) for each in loss] == [("plain", 200), ("merged", 100)]
    assert loss[1]["y"] == pytest.approx([made_up.loss_at(step) for step in range(10, 101, 10)], rel=1e-5)
    rows = [[words(cell) for cell in row] for row in section(root, "differences").iter(f"{XHTML}tr")]
    assert rows[0] == ["setting", "plain", "merged"]
    assert ["optimizer", "SGD(lr=0.1)", "AdamW(lr=0.001)"] in rows
    assert ["gradient_merge", "1", "4"] in rows
    assert not any(row[0] in ("PyTorch", "command", "started") for row in rows), "the same in both, or no choice"
    assert "plain silent" in words(section(root, "runs"))


def test_a_directory_of_runs_has_an_index_with_links(runs: Path) -> None:
    path = report(str(runs), None)
    assert path == runs / "index.html"
    table = section(ElementTree.fromstring(path.read_text()), "runs")
    links = [each.get("href") or "" for each in table.iter(f"{XHTML}a")]
    assert sorted(links) == ["merged/report.html", "nested/bad/report.html", "plain/report.html"]
    assert all((runs / link).is_file() for link in links)
    assert "nested/bad failed" in words(table)
    assert "72 ms" in words(table)


def test_of_many_runs_the_newest_are_drawn(tmp_path: Path) -> None:
    for number in range(10):
        facts = made_up.facts(started=made_up.BEGAN + number, mesh={"replicate": number + 1})
        made_up.append(tmp_path / f"{number}" / "metrics.jsonl", made_up.metrics(10, 30, began=made_up.BEGAN + 99))
        (tmp_path / f"{number}" / "run.json").write_text(json.dumps(facts))
    root = ElementTree.fromstring(report(str(tmp_path), None).read_text())
    assert [each["name"] for each in data(root, "runs-0")["series"]] == [str(number) for number in range(2, 10)]
    assert len(list(section(root, "runs").iter(f"{XHTML}a"))) == 10
    assert "those of the newest 8 runs" in words(section(root, "runs"))


def test_a_directory_without_a_run_is_named(runs: Path) -> None:
    with pytest.raises(UsageError, match=r"^there is no run in '.*plots'; name log directories of runs"):
        compare([str(runs / "plain"), str(runs / "plots")], None)
