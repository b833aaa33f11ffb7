"""Pictures drawn from measured figures and from the source: ``python docs/site/charts.py``; part of ``make pictures``.

The test draws each again and compares, so a picture is always that of its figures.
"""

from __future__ import annotations

import ast
import html
import json
import re
import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pictures import OUT, drawing

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "benchmarks" / "measured"
CHART = """<style>
.us { fill: #4051b5 } .them { fill: #c3c9d6 } .killed { stroke: #d1495b } .quiet { stroke: #c3c9d6 }
.axis { stroke: #dde1e9 } .curve { fill: none } .end { text-anchor: end } .strong { font-weight: 600 }
.term { fill: #1e2129 } .mono { font: 12.5px ui-monospace, monospace; fill: #e6e8ee; white-space: pre }
.command { fill: #ffd479 } .good { fill: #7ee2a8 }
</style>"""
WORKLOADS = {
    "resnet50_64": "ResNet-50, batch 64",
    "resnet50": "ResNet-50, batch 256",
    "bert_large_64": "BERT-large, 64 x 128",
    "bert_large": "BERT-large, 256 x 128",
    "gpt2_medium": "GPT-2-medium, 16 x 1024",
}
CONTENDERS = {"fabric": "Fabric", "accelerate": "Accelerate", "echelon": "Echelon"}
COMPRESSED = {
    "torch DDP": "torch DDP",
    "Horovod": "Horovod",
    "torch DDP, fp16 hook": "torch DDP, fp16 hook",
    "torch DDP, PowerSGD rank 2": "torch DDP, PowerSGD rank 2",
    "Echelon": "Echelon",
    "Echelon, fp16_allreduce": "Echelon, 16-bit gradients",
    "Echelon, localsgd k=8": "Echelon, LocalSGD, k = 8",
    "Echelon, dgc 99.9 %": "Echelon, DGC 99.9 %",
}
HYBRID = {"bert": "BERT-like, 31.5 M", "classes-100k": "100,000 classes"}
LAYOUTS = {
    "ddp": "torch DDP",
    "dp": "Echelon, data parallel",
    "1f1b": "Echelon, pipeline, 1F1B",
    "zero-bubble": "Echelon, pipeline, zero-bubble",
    "split": "Echelon, head split",
}
SYSTEMS = {
    "bound": "bound",
    "tf": "TensorFlow 2.21, async",
    "paddle": "Paddle 3.0, async",
    "torchrec": "TorchRec 1.8, sync",
    "echelon-sync": "Echelon, sync",
    "echelon-hybrid": "Echelon, hybrid",
    "echelon-async": "Echelon, async",
    "echelon-collective": "Echelon, collective (no servers)",
}


@dataclass(frozen=True)
class Bar:
    """One bar of a chart: its name, its length and the figure behind it."""

    name: str
    value: float
    figure: str


@dataclass(frozen=True)
class BarGroup:
    """Bars under one title; the longest fills the width if ``full`` is None, else one of length ``full`` does."""

    title: str
    bars: Sequence[Bar]
    full: float | None = None


def bar_chart(title: str, about: str, groups: Sequence[BarGroup], note: str) -> str:
    """Draw groups of bars from the left; bars whose names begin with Echelon have its colour."""
    parts, top, unit = [CHART, f'<text class="soft" x="310" y="14">{html.escape(about)}</text>'], 14, 330
    for group in groups:
        full = group.full or max(bar.value for bar in group.bars)
        parts.append(f'<text class="strong" x="10" y="{top + 22}">{html.escape(group.title)}</text>')
        for row, bar in enumerate(group.bars):
            y, kind, width = top + 10 + 17 * row, _kind(bar.name), unit * bar.value / full
            parts.append(f'<text class="soft end" x="378" y="{y + 11}">{html.escape(bar.name)}</text>')
            parts.append(f'<rect class="{kind}" x="385" y="{y}" width="{width:.1f}" height="14" rx="2"/>')
            parts.append(f'<text class="soft" x="{390 + width:.1f}" y="{y + 11}">{html.escape(bar.figure)}</text>')
        top += 17 * len(group.bars) + 14
    parts.append(f'<text class="soft" x="10" y="{top + 12}">{html.escape(note)}</text>')
    return drawing(870, top + 24, title, parts)


def _kind(name: str) -> str:
    return "us" if name.startswith("Echelon") else "them"


def speed() -> str:
    """Samples per second of five workloads on one GPU, relative to the best hand-written loop."""
    groups = []
    for entry in json.loads((MEASURED / "gpu.json").read_text()):
        runs = entry["contenders"]
        best = max(runs[name]["per_s"] for name in ("eager", "compiled", "graphs") if name in runs)
        rates = {"by hand": best, **{CONTENDERS[name]: runs[name]["per_s"] for name in CONTENDERS if name in runs}}
        bars = [Bar(name, rate / best, f"{rate / best:.2f} ({rate:,.0f}/s)") for name, rate in rates.items()]
        groups.append(BarGroup(WORKLOADS[entry["workload"]], bars, full=1.0))
    about, note = "relative to the best hand-written loop (1.00)", "one NVIDIA H200, bf16, torch 2.11; higher is better"
    return bar_chart("Training speed on one H200", about, groups, note)


def slow_links() -> str:
    """Speed on links of 1 Gb/s, relative to torch DDP: compression and local steps, then pipelines and splits."""
    found = json.loads((MEASURED / "slow_links.json").read_text())["results"]
    rows = [row for row in found if (row["model"], row["rate"]) == ("vgg", "1gbit") and row["contender"] in COMPRESSED]
    groups = [
        BarGroup(
            f"VGG-like, {hosts} hosts",
            [
                Bar(COMPRESSED[row["contender"]], row["times_ddp"], f"{row['times_ddp']:.2f}")
                for row in rows
                if row["hosts"] == hosts
            ],
        )
        for hosts in (2, 4)
    ]
    hybrid = json.loads((MEASURED / "hybrid.json").read_text())
    for case in (*hybrid["a"], *hybrid["b"]):
        runs = [row for row in case["rows"] if row["rate"] == "1gbit" and "ddp" in row["times"]]
        if runs:
            title = f"{HYBRID[case['case']]}, {case['hosts']} hosts"
            bars = [Bar(LAYOUTS[row["contender"]], row["times"]["ddp"], f"{row['times']['ddp']:.2f}") for row in runs]
            groups.append(BarGroup(title, bars))
    note = "network namespaces on two cores, links of 1 Gb/s, torch 2.13; higher is better; a scale for each group"
    return bar_chart("Training speed between hosts with slow links", "relative to torch DDP (1.00)", groups, note)


def recommender() -> str:
    """Examples per second of a click-through model with sparse tables, for each system and mode."""
    found = {row["contender"]: row["ex_s"] for row in json.loads((MEASURED / "ctr.json").read_text())["contenders"]}
    bars = [Bar(SYSTEMS[name], found[name], f"{found[name]:,.0f}") for name in SYSTEMS if name in found]
    about = "examples per second; the bound is the dense network alone, its rows for nothing"
    note = "26 slots of a million ids, 2 workers (and a server where there is one) on two cores; higher is better"
    return bar_chart("A click-through model on two cores", about, [BarGroup("click-through model", bars)], note)


def kills() -> str:
    """The losses of a run whose ranks were killed again and again, on top of those of the undisturbed run."""
    found: dict[str, list[Any]] = json.loads((MEASURED / "many_kills_losses.json").read_text())
    quiet, killed, at = found["quiet"], found["killed"], found["resumed after step"]
    left, right, low, top = 50, 730, 230, 20
    most = max(quiet)

    def curve(losses: list[float]) -> str:
        points = enumerate(losses)
        return " ".join(
            f"{left + (right - left) * step / (len(losses) - 1):.1f},{low - (low - top) * loss / most:.1f}"
            for step, loss in points
        )

    parts = [CHART, f'<line class="axis" x1="{left}" y1="{low}" x2="{right}" y2="{low}"/>']
    for loss in (0.5, 1.0):
        y = low - (low - top) * loss / most
        parts.append(f'<line class="axis" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(f'<text class="soft end" x="{left - 8}" y="{y + 4:.1f}">{loss}</text>')
    parts.append(f'<polyline class="curve quiet" stroke-width="5" points="{curve(quiet)}"/>')
    parts.append(f'<polyline class="curve killed" stroke-width="1.2" points="{curve(killed)}"/>')
    for step in at:
        x = left + (right - left) * (step - 1) / (len(quiet) - 1)
        parts.append(f'<line class="killed" x1="{x:.1f}" y1="{low + 3}" x2="{x:.1f}" y2="{low + 12}"/>')
    differ = sum(one != other for one, other in zip(quiet, killed, strict=True))
    parts.append(f'<text class="soft" x="{left}" y="{low + 28}">step 1</text>')
    parts.append(f'<text class="soft end" x="{right}" y="{low + 28}">step {len(quiet)}</text>')
    said = f"{len(at)} times kill -9 of a random rank (marks), 2 ranks; losses that differ: {differ}"
    parts.append(f'<text class="mid" x="390" y="{low + 28}">{said}</text>')
    parts.append('<text class="soft" x="520" y="34">undisturbed: grey, wide; killed: red, thin</text>')
    return drawing(750, low + 40, "The loss through many kills, over that of the undisturbed run", parts)


def levels() -> str:
    """The packages by level, with the first line of each."""
    rows: tuple[tuple[str, ...], ...] = runpy.run_path(str(ROOT / "tests" / "layout" / "levels.py"))["LEVELS"]
    parts, top = [CHART], 10
    for level, packages in reversed(list(enumerate(rows))):
        height = 24 * len(packages) + 8
        parts.append(f'<rect class="box" x="60" y="{top}" width="760" height="{height}" rx="6"/>')
        parts.append(f'<text class="soft" x="10" y="{top + height / 2 + 4}">level {level}</text>')
        for row, package in enumerate(packages):
            about = html.escape(_about(package))
            parts.append(f'<text class="strong" x="72" y="{top + 21 + 24 * row}">{package}</text>')
            parts.append(f'<text class="soft" x="200" y="{top + 21 + 24 * row}">{about}</text>')
        top += height + 6
    parts.append(f'<text class="soft" x="60" y="{top + 10}">a package imports from lower levels only</text>')
    return drawing(830, top + 20, "The packages of Echelon by level", parts)


def _about(package: str) -> str:
    text = ast.get_docstring(ast.parse((ROOT / "echelon" / package / "__init__.py").read_text())) or ""
    return text.splitlines()[0].rstrip(".").replace("``", "") if text else ""


def verify() -> str:
    """The output of ``echelon verify`` that the README shows, in a terminal."""
    block = re.search(r"^    \$ echelon verify.*?\n\n", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None, "README.md shows no output of 'echelon verify'"
    text = block[0].rstrip().replace("gives; losses", "gives;\n          losses")
    lines = [line[4:] for line in text.splitlines()]
    parts = [CHART, f'<rect class="term" width="720" height="{38 + 19 * len(lines)}" rx="8"/>']
    for place, colour in enumerate(("#ff5f57", "#febc2e", "#28c840")):
        parts.append(f'<circle cx="{18 + 18 * place}" cy="16" r="5.5" fill="{colour}"/>')
    for row, line in enumerate(lines):
        kind = (
            "mono command"
            if line.startswith("$")
            else "mono good"
            if line.startswith(("same", "      losses"))
            else "mono"
        )
        parts.append(f'<text class="{kind}" x="16" y="{48 + 19 * row}">{html.escape(line)}</text>')
    return drawing(720, 38 + 19 * len(lines), "echelon verify: two processes give what one process gives", parts)


CHARTS = {
    "speed": speed,
    "slow_links": slow_links,
    "recommender": recommender,
    "kills": kills,
    "levels": levels,
    "verify": verify,
}

if __name__ == "__main__":
    for name, draw in CHARTS.items():
        (OUT / f"{name}.svg").write_text(draw())
