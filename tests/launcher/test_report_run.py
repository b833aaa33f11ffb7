"""``echelon report`` and ``echelon watch`` as commands."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path

import pytest
from command import finish, here, start
from forked import Forked
from made_up_runs import write

from echelon.cli.commands.report import report
from echelon.observability.runlog import log_files, read
from echelon.observability.runlog.events import note_beside
from echelon.observability.trace import trace_files


def test_report_writes_page_beside_the_run_or_to_out(tmp_path: Path) -> None:
    write(tmp_path / "log", last=100)
    ended = here("report", "log", cwd=tmp_path)
    assert (ended.code, ended.out) == (0, "echelon: log/report.html written\n")
    assert here("report", "log", "--out", "there.html", cwd=tmp_path).code == 0
    assert (tmp_path / "there.html").read_text().startswith("<!DOCTYPE html>")


def test_a_launchers_directory_leads_to_the_log_of_its_run(tmp_path: Path) -> None:
    """A script with ``Log(dir=...)`` writes its log elsewhere; its report and its timeline are found."""
    write(tmp_path / "script", last=100)
    write(tmp_path / "logs", last=50)  # of an earlier run
    (tmp_path / "logs" / "elsewhere.json").write_text(json.dumps({"records": str(tmp_path / "script")}))
    assert report(str(tmp_path / "logs"), None) == tmp_path / "script" / "report.html"
    assert trace_files.find(tmp_path / "logs") == tmp_path / "script" / "timeline"
    note_beside_in(tmp_path / "logs")
    assert read(tmp_path / "script").events[-1].text == "it ended"


def note_beside_in(logs: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECHELON_LOG_DIR", str(logs))
        patch.setattr(log_files, "_settled", None)
        note_beside("ended", "it ended")


def test_a_directory_without_a_run_is_one_line(tmp_path: Path) -> None:
    for words in (("report", "."), ("report", "nowhere"), ("watch", "nowhere")):
        ended = here(*words, cwd=tmp_path)
        assert (ended.code, ended.out, len(ended.err.splitlines())) == (2, "", 1)
        assert ended.err.startswith("echelon: ")


def test_watch_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    write(tmp_path / "log", last=100)
    process = start("watch", "log", "--port", "0", cwd=tmp_path)
    said = process.stdout.readline()
    assert said.startswith("echelon: watching 'log' at http://127.0.0.1:")
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with browser.open(said.split()[4], timeout=30) as answer:
        assert b"train gpt.py" in answer.read()
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.strip() == "echelon: no longer watching; the run goes on"


def test_each_job_has_a_directory_and_its_restarts_go_on_there(tmp_path: Path) -> None:
    """The second job leaves the first one's logs alone; a restart appends to its own; report takes the newest."""
    (tmp_path / "again.py").write_text(
        "import os, sys\nprint('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and '--fail' in sys.argv)\n",
    )
    for words in (["again.py"], ["--max-restarts", "1", "again.py", "--fail"]):
        job = Forked(["run", "--procs", "1", *words], cwd=tmp_path, env=dict(os.environ), warm=True)
        assert finish(job).code == 0
    first, second = (tmp_path / "runs" / f"again-{number}" for number in (1, 2))
    assert first.joinpath("rank-0.log").read_text() == "attempt 0\n"
    assert second.joinpath("rank-0.log").read_text().splitlines() == ["attempt 0", "----- restart 1 -----", "attempt 1"]
    write(second, last=100)
    assert here("report", cwd=tmp_path).out == "echelon: runs/again-2/report.html written\n"
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"again-1", "again-2"}
