"""``echelon bench``: a real measurement of this machine, the file it writes, and plans that use it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import context
from hypothesis import given
from hypothesis import strategies as st

from echelon.base.errors import UsageError
from echelon.cli.commands.bench import bench
from echelon.planner.cluster.bench_file import default_path
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.cluster.detect import cores, processor
from echelon.planner.cluster.device_catalog import CATALOGUE
from echelon.tools.bench import ranks as crew
from echelon.tools.bench.fit_figures import alpha_beta, rising
from echelon.tools.bench.overlap import hidden_part
from echelon.tools.bench.ranks import run_ranks

HERE = f"{min(2, cores())}xhere"  #: as two processes measure it


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Warm:
    """A process of a measurement as crew.py starts it, forked with torch imported already: to crew.py it is a Popen."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._process = context.Process(target=_be, args=(command, env), daemon=True)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def _be(command: list[str], env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    _, _, module, *sys.argv[1:] = command
    runpy.run_module(module, run_name="__main__")


def start(command: list[str], env: dict[str, str]) -> Any:
    """The first process starts as a user's does; the others do the same, and are spared importing torch."""
    first = env["RANK"] == "0" and "--engine" not in command
    return subprocess.Popen(command, env=env) if first else Warm(command, env)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A measurement by two real processes, and what it printed."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(crew, "subprocess", SimpleNamespace(Popen=start))
        path = bench(tmp_path_factory.mktemp("bench") / "deep" / "bench.json", procs=2, quick=True)
    return path, said.getvalue()


def _values(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def test_figures_are_those_of_what_was_measured(measured: tuple[Path, str]) -> None:
    path, _ = measured
    rows = _values(path)["rows"]
    device = Cluster.parse(HERE, bench=path).device(0)
    together = [row for name, part in rows.items() if name != "alone" for row in part]
    computed = [row for row in together if row.get("dtype") == "float32"]
    best = max(row["flops"] / row["seconds"] for row in computed)
    assert device.peak_of("float32") == best
    assert 1e8 < best < 1e13  # of one core
    square = next(row for row in rows["products float32"] if row["shape"] == [1, 128, 128, 128])
    assert square["flops"] == 2 * 128**3
    assert device.bandwidth == rows["streams"][-1]["bytes"] / rows["streams"][-1]["seconds"]
    for (size, part), row in zip(device.streams, rows["streams"], strict=True):
        assert part * device.bandwidth == pytest.approx(size / row["seconds"])
    assert device.launch == next(row["seconds"] for row in rows["launch"] if row["what"] == "chain")


def test_tables_of_collectives_are_what_two_processes_took(measured: tuple[Path, str]) -> None:
    path, _ = measured
    rows = _values(path)["rows"]["collectives"]
    link = Cluster.parse(HERE, bench=path).hosts[0][1].link
    assert {kind for kind, _ in link.tables} == {"all_reduce", "all_gather", "reduce_scatter", "gather_small", "p2p"}
    for (kind, ranks), curve in link.tables.items():
        found = [(row["bytes"], row["seconds"]) for row in rows if (row["kind"], row["ranks"]) == (kind, ranks)]
        assert list(curve) == found
    assert 0 <= link.overlap <= 1


def test_every_figure_is_said_to_be_measured(measured: tuple[Path, str]) -> None:
    path, said = measured
    *figures, last = said.splitlines()
    assert figures[1:]
    assert {line.split()[-1] for line in figures[1:]} == {"measured"}
    assert str(path) in last
    assert Cluster.parse(HERE, bench=path).table() == "\n".join(figures)


def test_plans_take_the_usual_file_by_themselves(measured: tuple[Path, str], cache: Path) -> None:
    assert Cluster.parse("here").device(0).origin_of("peak") == "default"
    assert default_path() == cache / "echelon" / "bench.json"
    default_path().parent.mkdir(parents=True)
    default_path().write_text(measured[0].read_text())
    for text in ("here", "4xCPU", "2x2xCPU"):
        assert Cluster.parse(text).device(0).origin_of("peak") == "measured"
        assert Cluster.parse(text).hosts[0][1].link.origin_of("tables") == "measured"
        assert Cluster.parse(text, bench=False).device(0).origin_of("peak") == "default"
    assert Cluster.parse("8xV100").device(0) == CATALOGUE["V100"].device


def test_measured_figures_survive_being_written_as_a_cluster(measured: tuple[Path, str], tmp_path: Path) -> None:
    cluster = Cluster.parse("2x2xCPU", bench=measured[0])
    cluster.to_yaml(tmp_path / "cluster.yaml")
    assert Cluster.parse(tmp_path / "cluster.yaml") == cluster


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: text[: len(text) // 2], "is no JSON"),
        (lambda text: "[]", "is no bench file"),
        (lambda text: '{"loss": 3}', "is no bench file"),
        (lambda text: text.replace('"version": 1', '"version": 9'), "version=9"),
        (lambda text: text.replace('"bandwidth":', '"bandwith":'), "did you mean 'bandwidth'"),
        (lambda text: text.replace('"attention": ', '"attention": -'), "above 0"),
        (lambda text: text.replace('"launch": ', '"launch": 1e999, "floor": '), "launch"),
    ],
)
def test_a_damaged_file_is_told_in_one_line_and_never_used(
    measured: tuple[Path, str], damage: Any, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    default_path().parent.mkdir(parents=True)
    default_path().write_text(damage(measured[0].read_text()))
    with pytest.raises(UsageError, match=says) as caught:
        Cluster.parse("here", bench=default_path())
    assert "\n" not in str(caught.value)
    assert str(default_path()) in str(caught.value)
    assert Cluster.parse("here") == Cluster.parse("here", bench=False)  # by default the catalogue's figures hold
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert "catalogue" in line


def test_a_file_of_another_processor_is_told_and_not_used(
    measured: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    values = _values(measured[0])
    values["machine"]["processor"] = "Abacus 3000"
    default_path().parent.mkdir(parents=True)
    default_path().write_text(json.dumps(values))
    assert Cluster.parse("here").device(0).origin_of("peak") == "default"
    (line,) = capsys.readouterr().err.splitlines()
    assert "Abacus 3000" in line
    assert processor() in line
    # a plan that names it is for that machine
    assert Cluster.parse("4xCPU", bench=default_path()).device(0).origin_of("peak") == "measured"


def test_a_named_file_without_the_device_says_so(
    measured: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert Cluster.parse("8xV100", bench=measured[0]).device(0) == CATALOGUE["V100"].device
    assert "has figures of CPU, not of V100" in capsys.readouterr().err
    with pytest.raises(UsageError, match="there is no bench file at"):
        Cluster.parse("8xV100", bench="nowhere.json")


def test_a_device_that_only_a_bench_file_knows_can_be_named(measured: tuple[Path, str], tmp_path: Path) -> None:
    values = _values(measured[0])
    values["devices"] = {"NVIDIA Foo 9": values["devices"]["CPU"] | {"memory": 5e9}}
    path = tmp_path / "foo.json"
    path.write_text(json.dumps(values))
    device = Cluster.parse("2xFoo-9", bench=path).device(1)
    assert (device.name, device.memory, device.origin_of("peak")) == ("NVIDIA Foo 9", 5e9, "measured")


def test_what_cannot_be_measured_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected 1 or more"):
        bench(tmp_path / "b.json", procs=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        bench(tmp_path / "file" / "b.json", procs=1, quick=True)


def test_a_measurement_whose_process_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(Exception, match="measuring with 2 processes failed") as caught:
        run_ranks(2, quick=True)
    assert "\n" not in str(caught.value)


@given(
    st.floats(1e-6, 1e-3),
    st.floats(1e6, 1e12),
    st.lists(st.sampled_from([2.0**power for power in range(8, 28)]), min_size=2, max_size=8, unique=True),
)
def test_latency_and_bandwidth_are_found_again(latency: float, bandwidth: float, sizes: list[float]) -> None:
    points = [(size, latency + size / bandwidth) for size in sorted(sizes)]
    found = alpha_beta(points)
    for size, seconds in points:
        assert found[0] + size / found[1] == pytest.approx(seconds, rel=1e-3)


def test_the_fit_is_numpys_least_squares_of_relative_errors() -> None:
    random = np.random.default_rng(0)
    sizes = np.geomspace(1e3, 1e8, 12)
    seconds = (5e-5 + sizes / 2e9) * random.uniform(0.9, 1.1, 12)
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    latency, bandwidth = alpha_beta(list(zip(sizes.tolist(), seconds.tolist(), strict=True)))
    np.testing.assert_allclose([latency, bandwidth], [start, 1 / slope], rtol=1e-6)


def test_curve_of_products_rises_through_the_middle_of_points() -> None:
    """A curve of products never falls and goes through the middle of the measured points."""
    assert rising([(1e6, 0.1), (1e7, 0.3), (1e8, 0.2), (1e9, 0.6)]) == (
        (pytest.approx(1e6), 0.1),
        (pytest.approx(1e7), 0.25),
        (pytest.approx(1e8), 0.25),
        (pytest.approx(1e9), 0.6),
    )
    ((size, part),) = rising([(0.9e6, 0.1), (1e6, 0.5), (1.1e6, 0.2)])
    assert size == pytest.approx((0.9 * 1.0 * 1.1) ** (1 / 3) * 1e6)
    assert part == 0.2


@pytest.mark.parametrize(
    ("compute", "message", "both", "hidden"), [(2, 1, 2, 1.0), (2, 1, 3, 0.0), (2, 1, 2.5, 0.5), (1, 2, 4, 0.0)]
)
def test_what_computing_hides(compute: float, message: float, both: float, hidden: float) -> None:
    assert hidden_part({"compute": compute, "sum": message, "both": both}) == hidden
