"""``echelon report``: one page, with the figures that the run has written down, whatever state its files are in."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import time
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

import made_up_runs as made_up
import pytest
import torch
from harness import run
from made_up_runs import BEGAN, append, metrics

import echelon
from echelon.base.errors import UsageError
from echelon.cli.commands.report import report
from echelon.observability.trace.trace_report import timeline_words
from echelon.tools.report.run_files import gather
from echelon.tools.report.run_page import render
from echelon.tools.report.sections.overview import overview, status

XHTML = "{http://www.w3.org/1999/xhtml}"
NOW = BEGAN + 220.0  # five seconds after step 3,000


def text_of(directory: Path, now: float = NOW) -> str:
    return render(gather(directory), now)


def page(directory: Path, now: float = NOW) -> ElementTree.Element:
    """The page as a tree: that it can be read as XML says that every tag is closed and every figure escaped."""
    return ElementTree.fromstring(text_of(directory, now))


def words(element: ElementTree.Element) -> str:
    return " ".join(" ".join(element.itertext()).split())


def section(root: ElementTree.Element, name: str) -> ElementTree.Element:
    return next(each for each in root.iter(f"{XHTML}section") if each.get("id") == name)


def names(root: ElementTree.Element) -> list[str | None]:
    return [each.get("id") for each in root.iter(f"{XHTML}section")]


def data(root: ElementTree.Element, key: str) -> dict[str, Any]:
    figure = next(each for each in root.iter(f"{XHTML}figure") if each.get("id") == f"chart-{key}")
    found = next(each for each in figure.iter(f"{XHTML}script"))
    parsed: dict[str, Any] = json.loads(found.text or "")
    return parsed


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ElementTree.Element:
    return page(made_up.write(tmp_path_factory.mktemp("run"), servers=2))


def test_the_head_names_the_run_and_says_how_it_stands(whole: ElementTree.Element) -> None:
    head = words(next(whole.iter(f"{XHTML}header")))
    assert "train gpt.py running" in head
    assert "355 million parameters, replicate 2 x stage 2, on 4 ranks on 2 hosts (NVIDIA H100)" in head
    assert "3,000 of 4,000 steps" in head
    assert f"{made_up.loss_at(3000):.4g} loss" in head
    assert "43 GB memory at most rank 3, of 80 GB" in head
    assert "started 2026-11-15 12:50:00 UTC, running for 4 min" in head
    assert "warning rank 3 (gpu02) is slower than its peers" in head


def test_every_part_is_there_and_in_the_list_of_parts(whole: ElementTree.Element) -> None:
    wanted = ["curves", "plan", "time", "compared", "ranks", "memory", "servers", "settings", "environment", "events"]
    assert names(whole) == wanted
    links = [each.get("href") for each in next(whole.iter(f"{XHTML}nav")).iter(f"{XHTML}a")]
    assert links == [f"#{name}" for name in wanted]


def test_the_curves_are_the_metrics(whole: ElementTree.Element) -> None:
    loss = data(whole, "loss")["series"]
    assert [each["name"] for each in loss] == ["loss", "evaluated"]
    assert loss[0]["x"] == list(range(10, 3001, 10))
    assert loss[0]["y"] == pytest.approx([made_up.loss_at(step) for step in range(10, 3001, 10)], rel=1e-5)
    assert loss[1]["x"] == list(range(500, 3001, 500))
    assert data(whole, "evaluation-0")["y"] == "accuracy"
    assert {each["name"] for each in data(whole, "times")["series"]} == set(made_up.PHASES)


def test_schedule_shows_measured_beside_predicted(whole: ElementTree.Element) -> None:
    """The schedule is the measured one, and the predicted one is beside it."""
    plan = section(whole, "plan")
    assert [each.text for each in plan.iter(f"{XHTML}h3")][2:] == ["The schedule, measured", "The schedule, predicted"]
    assert "Step 12 as it was" in words(plan)  # 11 takes 2 ms longer; the first is left out
    blocks = [each for each in plan.iter(f"{XHTML}rect") if "block" in (each.get("class") or "")]
    measured = [each for each in blocks if "k-forward" in (each.get("class") or "")]
    assert len(measured) == 4 * 8  # neighbouring kernels of one phase are one
    first = measured[0]
    assert float((first.get("width") or "").rstrip("%")) == pytest.approx(100 * 2.6 / 72, abs=0.01)
    assert (first.findtext(f"{XHTML}title") or "").startswith("rank 0, forward, kernels: 0 s to 2.6 ms")
    assert sum("k-F" in (each.get("class") or "") for each in blocks) == 2 * 8


def test_time_and_its_parts(whole: ElementTree.Element) -> None:
    said = words(section(whole, "time"))
    assert "Steps 11 to 3,000 took rank 0 4 min. One step takes 72 ms (median)." in said
    assert "backward 123 s 56.9% 41 ms" in said
    assert (
        "The pipeline's bubble is 12.0% of the time that its stages are at work; the schedule alone makes 11.1%."
        in said
    )
    assert "43.1% of the devices' peak arithmetic" in said


def test_where_forward_is_timed_with_backward_it_is_said(
    whole: ElementTree.Element, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_up, "PHASES", {name: took for name, took in made_up.PHASES.items() if name != "forward"})
    staged = words(section(page(made_up.write(tmp_path)), "time"))
    assert "forward and backward, which alternate" in staged
    assert "forward and backward, which alternate" not in words(section(whole, "time"))


def test_predicted_against_measured(whole: ElementTree.Element) -> None:
    rows = [words(row) for row in section(whole, "compared").iter(f"{XHTML}tr")]
    assert any(row.startswith("a step, mean of 15 until step 20") and row.endswith("68 ms 72 ms +5.9%") for row in rows)
    assert any(row.startswith("forward and backward") and row.endswith("59 ms 61 ms +3.4%") for row in rows)
    assert any(row.startswith("communicate") and row.endswith("4 ms 6 ms +50%") for row in rows)
    assert any(row.startswith("memory, rank 0") and row.endswith("36 GB 41 GB +14%") for row in rows)


def test_slowest_rank_is_the_one_that_works_longest(whole: ElementTree.Element) -> None:
    """The slowest rank is the one that works longest, not the one that waits."""
    said = words(section(whole, "ranks"))
    assert "Rank 3 (gpu02) is the slowest: 85 ms of its own work a step, 28.8% over the others" in said
    assert "others communicate up to 20 ms" in said
    marked = [row for row in section(whole, "ranks").iter(f"{XHTML}tr") if row.get("class") == "chosen"]
    assert [words(row) for row in marked] == ["3 gpu02 85 ms 1 ms 43 GB"]


def test_memory_servers_settings_environment_and_events(whole: ElementTree.Element) -> None:
    memory = words(section(whole, "memory"))
    assert "The peak of rank 0 is 41 GB, in the backward of layers.3 (measured)." in memory
    assert "recompute 19 GB 46.3%" in memory
    servers = words(section(whole, "servers"))
    assert f"0 {119_000 + 47_600:,} 238 MB 595 MB 3,570 3,451" in servers
    assert data(whole, "server-out")["series"][1]["y"] == pytest.approx([5.5] * 119)
    settings = words(section(whole, "settings"))
    assert 'amp {"dtype": "bfloat16"} script' in settings
    assert "gradient_merge 1 default" in settings
    environment = words(section(whole, "environment"))
    assert "NCCL_DEBUG WARN" in environment
    parts = "import 4 s, join 500 ms, build 2 s, distribute 12.5 s, first step 21 s; compiling took 17 s of it"
    assert f"first step after 40 s ({parts})" in environment
    events = words(section(whole, "events"))
    assert events.index("slower than its peers") < events.index("checkpoint at step 1000")  # the newest first


def test_every_picture_has_a_name_and_every_chart_a_table(whole: ElementTree.Element) -> None:
    pictures = [each for each in whole.iter(f"{XHTML}svg") if each.get("role") == "img"]
    assert all(each.get("aria-label") and each.findtext(f"{XHTML}title") for each in pictures)
    for figure in whole.iter(f"{XHTML}figure"):
        assert len(list(figure.iter(f"{XHTML}tr"))) > 2, figure.get("id")
    marked = [each.get("id") for each in whole.iter() if each.get("id")]
    assert len(marked) == len(set(marked))


def test_every_rectangle_lies_in_its_picture(whole: ElementTree.Element) -> None:
    seen = 0
    for picture in whole.iter(f"{XHTML}svg"):
        height = float((picture.get("height") or "").rstrip("%"))
        for each in picture.iter(f"{XHTML}rect"):
            x, width, y, tall = (float((each.get(name) or "").rstrip("%")) for name in ("x", "width", "y", "height"))
            assert 0 <= x <= x + width <= 100.01
            assert 0 <= y <= y + tall <= height + 0.01
            seen += 1
    assert seen > 100


def test_page_is_self_contained_and_runs_only_its_own_script(tmp_path: Path) -> None:
    text = text_of(made_up.write(tmp_path))
    assert re.findall(r"https?://[^\"' ]*", text.split("<script>")[0]) == ["http://www.w3.org/1999/xhtml"]
    assert not re.search(r"\bsrc=|url\(|@import", text)
    own = text.rsplit("<script>", 1)[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
    found = next(each for each in ElementTree.fromstring(text).iter(f"{XHTML}meta") if each.get("http-equiv"))
    policy = found.get("content") or ""
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy


def test_text_of_a_run_is_only_text(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x00\x1b[31m\ud800"
    made_up.write(tmp_path, script=evil, said=[evil], command=[evil], echelon=evil, environment={evil: evil})
    facts = made_up.facts()
    facts["settings"].append({"name": evil, "value": {evil: [evil]}, "origin": evil})
    facts["ranks"][0] |= {"host": evil, "device": evil, "at": {evil: 3}}
    facts["stages"][0]["units"] = [evil, evil]
    facts |= {"mesh": facts["mesh"] | {evil: 4}, "plan": {evil: evil}, "script": evil, "said": [evil]}
    facts["predicted"]["memory"] = [{evil: 5e9}]
    (tmp_path / "run.json").write_text(json.dumps(facts))
    append(tmp_path / "metrics.jsonl", [{"step": 3000, f"eval_{evil}": 1.0}])
    append(tmp_path / "events.jsonl", [{"time": BEGAN + 9, "kind": evil, "rank": 0, "text": evil}])
    append(tmp_path / "server-0.jsonl", [{"time": BEGAN + 9, "rows": {evil: 3}, "pulls": 1}])
    name = {"name": evil, "kind": "forward", "lane": "device", "begin": 101.0, "end": 101.1, "step": 12}
    append(tmp_path / "timeline" / "rank-0.jsonl", [name])
    memory = made_up.MEMORY | {"modules": [{"name": evil, "parameters": 9e12}], "kinds": {evil: 1e9, "buffers": 1e9}}
    (tmp_path / "memory.json").write_text(json.dumps(memory))
    text = text_of(tmp_path)
    root = ElementTree.fromstring(text)
    assert text.count("<script>") == 1
    assert not list(root.iter(f"{XHTML}img"))
    assert not [name for each in root.iter() for name in each.attrib if name.startswith("on")]
    assert words(root).count("alert(1)") > 10
    text.encode()


# ---- runs in every state ----


def test_an_empty_directory_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^there is no run in '.*': no metrics\.jsonl.*name the log directory"):
        report(str(tmp_path), None)
    with pytest.raises(UsageError, match=r"^'.*nowhere' does not exist; name the log directory"):
        report(str(tmp_path / "nowhere"), None)


def test_a_page_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", metrics(10, 20))
    with pytest.raises(UsageError, match=r"cannot be written: No such file or directory; choose another --out"):
        report(str(tmp_path), str(tmp_path / "no" / "where.html"))


def test_metrics_alone_make_a_page(tmp_path: Path) -> None:
    """A run without the launcher's files: no ranks, no evaluations, no plan."""
    append(tmp_path / "metrics.jsonl", metrics(10, 100, total=None))
    path = report(str(tmp_path), None)
    assert path == tmp_path / "report.html"
    root = ElementTree.fromstring(path.read_text())
    assert names(root) == ["curves", "time"]
    assert "The run has no run.json" in words(root)


def test_a_record_alone_makes_a_page(tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", metrics(10, 10))
    root = page(tmp_path)
    assert data(root, "loss")["series"][0]["x"] == [10]
    assert any(each.get("class") == "dots s-0" for each in root.iter(f"{XHTML}path")), "a point alone is seen"


def test_ranks_that_have_not_said_where_they_are_are_counted(tmp_path: Path) -> None:
    told = made_up.facts()
    (tmp_path / "run.json").write_text(json.dumps(told | {"ranks": told["ranks"][:1]}))
    assert "Of 3 more it is not written down where they are." in words(section(page(tmp_path), "plan"))
    (tmp_path / "run.json").write_text(json.dumps(told))
    assert "not written down" not in words(section(page(tmp_path), "plan"))


def test_without_examples_speed_is_in_steps(tmp_path: Path) -> None:
    records = metrics(10, 100)
    for record in records:
        del record["examples_per_s"]
    append(tmp_path / "metrics.jsonl", [record | {"steps_per_s": 12.5} for record in records])
    root = page(tmp_path)
    assert data(root, "speed")["series"][0]["name"] == "steps/s"
    assert "12.5 steps a second median" in words(next(root.iter(f"{XHTML}header")))


def test_a_model_of_the_zoo_goes_by_its_name(tmp_path: Path) -> None:
    own = "/somewhere/site-packages/echelon/zoo/train/run.py"
    settings = [
        {"name": n, "value": v, "origin": "flag"} for n, v in (("model_name", "bert"), ("dataset_name", "qnli"))
    ]
    told = made_up.facts(script=own, command=["echelon", "train", "--model_name=bert"], settings=settings)
    (tmp_path / "run.json").write_text(json.dumps(told))
    root = page(tmp_path)
    assert "bert on qnli" in words(next(root.iter(f"{XHTML}header")))
    assert "command echelon train --model_name=bert" in words(section(root, "environment"))


def test_ranks_are_compared_as_the_run_is_now(tmp_path: Path) -> None:
    """It was resumed by two ranks of four, without the slow one."""
    made_up.write(tmp_path, last=100)
    (tmp_path / "run.json").write_text(json.dumps(made_up.facts(ranks=2, hosts=1, began=BEGAN, started=BEGAN + 50)))
    for rank in range(2):
        records = [
            record | {"time": BEGAN + 60, "backward": 30.0 + rank} for record in made_up.rank_records(0, 110, 150)
        ]
        append(tmp_path / f"rank-{rank}.jsonl", records)
    ranks = section(page(tmp_path), "ranks")
    assert "No rank stands out. Rank 1 (gpu01) has most, 56 ms of its own work" in words(ranks)
    assert "rank 3" not in words(ranks)


def test_a_table_goes_no_further_than_its_curves(tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", [*metrics(10, 30), {"step": 10, "time": BEGAN + 1, "eval_loss": 0.25}])
    append(tmp_path / "rank-0.jsonl", made_up.rank_records(0, 10, 30))
    append(tmp_path / "rank-1.jsonl", made_up.rank_records(1, 10, 20))
    root = page(tmp_path)
    work, loss = (section(root, name).iter(f"{XHTML}table") for name in ("ranks", "curves"))
    assert [words(row) for row in list(work)[1].iter(f"{XHTML}tr")] == [
        "step rank 0 rank 1",
        "20 66 66",
        "30 66",
    ]
    assert next(words(row) for row in next(loss).iter(f"{XHTML}tr")) == "step loss evaluated last"


def test_a_recording_that_was_cut_short_is_said(tmp_path: Path) -> None:
    made_up.write(tmp_path)
    summary = json.loads((tmp_path / "timeline" / "summary.json").read_text())
    ranks = [{"rank": rank, "step": 12} for rank in range(4)]
    cut = {"asked": [10, 40], "running": False, "ranks": ranks, "missing": [], "first": 3, "because": None}
    (tmp_path / "timeline" / "summary.json").write_text(json.dumps(summary | {"cut": cut}))
    said = words(section(page(tmp_path), "time"))
    assert "Cut short: steps 10 to 40 requested; all ranks completed step 12; rank 3 stopped first." in said
    (tmp_path / "timeline" / "summary.json").write_text(json.dumps(summary | {"cut": {"asked": 7}, "steps": [12, 12]}))
    said = words(section(page(tmp_path), "time"))
    assert "Step 12: 72 ms." in said
    assert "Cut short" not in said


def test_one_rank_has_no_other_to_be_compared_with(tmp_path: Path) -> None:
    append(tmp_path / "rank-0.jsonl", made_up.rank_records(0, 10, 50))
    append(tmp_path / "timeline" / "rank-0.jsonl", made_up.spans(0))
    root = page(tmp_path)
    assert "there is no other to compare it with" in words(section(root, "ranks"))
    assert "exposed communication" not in words(section(root, "time"))


def test_a_loss_that_is_no_number_is_said(tmp_path: Path) -> None:
    records = metrics(10, 100)
    for record in records[5:]:
        record["loss"] = math.nan if record["step"] % 20 else math.inf
    append(tmp_path / "metrics.jsonl", records)
    root = page(tmp_path)
    assert "nan loss not a number at step 100" in words(next(root.iter(f"{XHTML}header")))
    assert "Not a number at 5 places" in words(section(root, "curves"))
    assert data(root, "loss")["series"][0]["y"][5:] == [None] * 5


def test_after_a_restart_each_step_counts_once(tmp_path: Path) -> None:
    made_up.write(tmp_path, last=500)
    again = metrics(310, 600, began=BEGAN + 100)
    append(tmp_path / "metrics.jsonl", [record | {"loss": 9.0} for record in again])
    append(
        tmp_path / "events.jsonl", [{"time": again[0]["time"] - 5, "kind": "restart", "rank": None, "text": "again"}]
    )
    root = page(tmp_path)
    loss = data(root, "loss")["series"][0]
    assert loss["x"] == list(range(10, 601, 10))
    assert [y == 9.0 for y in loss["y"]] == [step > 300 for step in loss["x"]]
    assert "restarted at step 310" in words(section(root, "curves"))


def test_a_run_that_was_killed_in_the_middle_of_a_line(tmp_path: Path) -> None:
    made_up.write(tmp_path, last=200)
    for name in ("metrics.jsonl", "rank-1.jsonl", "events.jsonl", "timeline/rank-0.jsonl"):
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"step": 210, "lo')
    (tmp_path / "memory.json").write_text('{"peak"')
    root = page(tmp_path, NOW + 86_400)
    assert data(root, "loss")["series"][0]["x"][-1] == 200
    assert "nothing written since" in words(next(root.iter(f"{XHTML}header")))


def test_files_of_nonsense_make_a_page_all_the_same(tmp_path: Path) -> None:
    made_up.write(tmp_path, servers=1)
    for path in sorted(tmp_path.rglob("*.jsonl")):
        with path.open("ab") as file:
            file.write(
                b'\xff\xfe\n[]\n"x"\n{"step": "x", "time": [], "loss": {}, "rows": 3, "kind": 4}\n{"step": 1e400}\n'
            )
    odd = {"ranks": [3, {"rank": "x", "at": 7}], "stages": "x", "mesh": [], "world": None, "schedule": {"name": 3}}
    (tmp_path / "run.json").write_text(json.dumps(made_up.facts() | odd | {"predicted": {"seconds": 1, "events": [7]}}))
    (tmp_path / "timeline" / "summary.json").write_text(
        '{"ranks": 3, "bubble": 4, "step_ms": "x", "communication": [1]}'
    )
    assert "curves" in names(page(tmp_path))


@pytest.mark.parametrize(
    ("kind", "later", "expected"),
    [("ended", 5.0, "ended"), ("failed", 5.0, "failed"), ("restart", 5.0, "running"), (None, 5.0, "running")],
)
def test_how_a_run_stands(tmp_path: Path, kind: str | None, later: float, expected: str) -> None:
    append(tmp_path / "metrics.jsonl", metrics(10, 100))
    last = BEGAN + 7.2
    if kind is not None:
        append(tmp_path / "events.jsonl", [{"time": last + 1, "kind": kind, "rank": 0, "text": ""}])
    assert status(gather(tmp_path).run, last + later).kind == expected
    assert status(gather(tmp_path).run, last + 7200).kind == (expected if expected != "running" else "silent")


def test_a_failure_shows_step_traceback_and_log(tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", metrics(10, 100))
    failure = {"time": BEGAN + 9, "kind": "failed", "rank": 1, "text": "rank 1 of 2 (host h) raised ValueError: odd"}
    details = {"step": 103, "traceback": 'Traceback\n  File "train.py"\nValueError: odd', "log": "log/rank-1.log"}
    append(tmp_path / "events.jsonl", [failure | details])
    head = words(next(page(tmp_path).iter(f"{XHTML}header")))
    assert "failed rank 1 of 2 (host h) raised ValueError: odd at step 103; log: log/rank-1.log" in head
    assert 'The traceback Traceback File "train.py" ValueError: odd' in head


def test_a_served_page_is_live_only_while_the_run_goes_on(tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", metrics(10, 100))
    assert ">live<" in render(gather(tmp_path), BEGAN + 9, live=2.0)
    append(tmp_path / "events.jsonl", [{"time": BEGAN + 9, "kind": "ended", "rank": 0, "text": ""}])
    assert ">live<" not in render(gather(tmp_path), BEGAN + 9, live=2.0)


def test_gpu_utilisation_norm_tokens_and_mfu_are_curves(tmp_path: Path) -> None:
    more = {"gradient_norm": 2.5, "tokens_per_s": 4096.0, "mfu": 0.5}
    append(tmp_path / "metrics.jsonl", [record | more for record in metrics(10, 100)])
    records = [record | {"utilisation": 87} for record in made_up.rank_records(1, 10, 100)]
    append(tmp_path / "rank-1.jsonl", records)
    root = page(tmp_path)
    assert set(data(root, "rank-busy")["series"][0]["y"]) == {87}
    assert set(data(root, "norm")["series"][0]["y"]) == {2.5}
    assert set(data(root, "tokens")["series"][0]["y"]) == {4096}
    assert set(data(root, "mfu")["series"][0]["y"]) == {50}
    assert {"tokens a second", "of the peak arithmetic"} <= {
        found[1] for found in overview(gather(tmp_path), BEGAN).facts
    }


def test_checkpoints_are_no_part_of_a_step(tmp_path: Path) -> None:
    records = metrics(10, 100)
    records[4]["checkpoint"] = 500.0
    append(tmp_path / "metrics.jsonl", records)
    root = page(tmp_path)
    assert "checkpoint 5 s 43.6% saving" in words(section(root, "time"))
    assert "72 ms a step median; latest 72 ms" in words(next(root.iter(f"{XHTML}header")))


def test_schedule_without_a_timeline_is_predicted_or_simulated(tmp_path: Path) -> None:
    """Without a timeline the schedule is the predicted one, and without a prediction a simulated one."""

    def title() -> str:
        (tmp_path / "run.json").write_text(json.dumps(facts))
        found = section(page(tmp_path), "plan").iter(f"{XHTML}h3")
        return next(each.text or "" for each in found if "schedule" in (each.text or ""))

    facts = made_up.facts()
    assert title() == "The schedule, predicted"
    facts["predicted"] = None
    assert title() == "The schedule, simulated"
    blocks = [each for each in page(tmp_path).iter(f"{XHTML}rect") if "k-F" in (each.get("class") or "")]
    assert len(blocks) == 2 * 8


def test_files_of_an_earlier_run_are_not_taken_for_this_run(tmp_path: Path) -> None:
    """Files that an earlier run left in the directory are not shown as those of this run."""
    made_up.write(tmp_path, ranks=2)
    (tmp_path / "memory.json").unlink()
    began = made_up.BEGAN
    for rank in range(2):
        about = {"rank": rank, "clock_offset": 0.0, "clock_error": None, "began": began + 5}
        path = tmp_path / "timeline" / f"rank-{rank}.jsonl"
        path.write_text(json.dumps(about) + "\n" + path.read_text())
        (tmp_path / f"memory-{rank}.json").write_text(json.dumps(made_up.MEMORY))
        os.utime(tmp_path / f"memory-{rank}.json", (began + 9, began + 9))
    mine = gather(tmp_path)
    assert mine.spans
    assert mine.run.memory is not None
    assert "an earlier run recorded this" not in timeline_words(str(tmp_path), as_json=False)
    (tmp_path / "run.json").write_text(json.dumps({**made_up.facts(), "began": began + 100, "started": began + 100}))
    later = gather(tmp_path)
    assert later.spans == {}
    assert later.summary == {}
    assert later.run.memory is None
    assert timeline_words(str(tmp_path), as_json=False).startswith("an earlier run recorded this")


def test_a_long_run_keeps_its_spike_and_stays_small(tmp_path: Path) -> None:
    records = [
        {"step": step, "learning_rate": 0.1, "loss": 77.0 if step == 13_337 else 1.0 + step % 13 / 50, "time": BEGAN}
        for step in range(1, 20_001)
    ]
    append(tmp_path / "metrics.jsonl", records)
    text = text_of(tmp_path)
    loss = data(ElementTree.fromstring(text), "loss")["series"][0]
    assert len(loss["x"]) <= 2000
    assert (13_337, 77.0) in zip(loss["x"], loss["y"], strict=True)
    assert len(text) < 400_000


# ---- a real run ----


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(rank)
    return [(torch.randn(4, 8, generator=drawn), torch.randn(4, 4, generator=drawn)) for _ in range(12)]


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))  # whose exchange is in forward
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(directory: str) -> None:
    model, optimizer = model_and_optimizer()
    log = echelon.Log(every=2, dir=directory, console=False, timeline="5:6")
    engine = echelon.distribute(model, loss=torch.nn.functional.mse_loss, optimizer=optimizer, log=log)
    for batch in batches(echelon.rank()):
        engine.step(*batch)
    engine.close()


def alone() -> list[float]:
    """The losses of one process that has the batches of both."""
    model, optimizer = model_and_optimizer()
    losses = []
    for (x, y), (more_x, more_y) in zip(batches(0), batches(1), strict=True):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(torch.cat([x, more_x])), torch.cat([y, more_y]))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_the_page_of_a_real_run_has_its_losses_and_its_ranks(tmp_path: Path) -> None:
    run(train, str(tmp_path), ranks=2)
    root = page(tmp_path, time.time())
    shown = data(root, "loss")["series"][0]
    assert shown["x"] == [2, 4, 6, 8, 10, 12]
    assert shown["y"] == pytest.approx(alone()[1::2], rel=1e-4)
    assert "2 ranks" in words(next(root.iter(f"{XHTML}header")))
    rows = [words(row) for row in section(root, "ranks").iter(f"{XHTML}tr")]
    assert [row.split()[0] for row in rows[1:3]] == ["0", "1"]
    records = [json.loads(line) for line in (tmp_path / "rank-1.jsonl").read_text().splitlines()]
    own = [phase for phase in made_up.PHASES if phase != "communicate"]
    work = data(root, "rank-work")["series"][1]["y"]
    assert work == pytest.approx([sum(record[phase] for phase in own) for record in records[1:]], rel=1e-3)
    assert fmean(work) > 0
    _check_one_figure_for_communication(tmp_path, records)
    assert "The schedule, measured" in words(section(root, "plan"))
    assert "ended" in words(next(root.iter(f"{XHTML}h1")))


def _check_one_figure_for_communication(directory: Path, records: list[dict[str, Any]]) -> None:
    """Metrics and timeline count the same as communication in the same steps, batch norm's exchange included."""
    figures = json.loads((directory / "timeline" / "summary.json").read_text())
    row, record = figures["ranks"][1], next(record for record in records if record["step"] == 6)
    assert figures["steps"] == [5, 6]
    assert record["communicate"] == pytest.approx(row["exposed_ms"], rel=0.05, abs=0.05)
    assert record["forward"] + record["backward"] == pytest.approx(row["compute_ms"], rel=0.05, abs=0.05)
    waits = [json.loads(line) for line in (directory / "timeline" / "rank-1.jsonl").read_text().splitlines()[1:]]
    phases = [one for one in waits if one["kind"] == "communicate" and one.get("phase")]
    inside = 1e3 * sum(one["end"] - one["begin"] for one in phases) / 2
    assert inside < record["communicate"], "the exchange in forward and backward counts, too"
