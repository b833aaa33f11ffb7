"""Pictures drawn from measured figures and from the source: ``python docs/site/charts.py``; part of ``make pictures``.

The test draws each again and compares, so a picture is always that of its figures.
"""

from __future__ import annotations

import ast
import html
import json
import re
import runpy
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


def speed() -> str:
    """Samples per second of five workloads on one GPU, relative to the best hand-written loop."""
    parts, top, unit = [CHART], 14, 330
    parts.append(f'<text class="soft" x="200" y="{top}">relative to the best hand-written loop (1.00)</text>')
    for entry in json.loads((MEASURED / "gpu.json").read_text()):
        runs = entry["contenders"]
        best = max(runs[name]["per_s"] for name in ("eager", "compiled", "graphs") if name in runs)
        bars = [("by hand", best), *((CONTENDERS[name], runs[name]["per_s"]) for name in CONTENDERS if name in runs)]
        parts.append(f'<text class="strong" x="10" y="{top + 22}">{WORKLOADS[entry["workload"]]}</text>')
        for row, (name, rate) in enumerate(bars):
            y, kind = top + 10 + 17 * row, "us" if name == "Echelon" else "them"
            width = unit * rate / best
            parts.append(f'<text class="soft end" x="268" y="{y + 11}">{name}</text>')
            parts.append(f'<rect class="{kind}" x="275" y="{y}" width="{width:.1f}" height="14" rx="2"/>')
            figure = f"{rate / best:.2f} ({rate:,.0f}/s)"
            parts.append(f'<text class="soft" x="{280 + width:.1f}" y="{y + 11}">{figure}</text>')
        top += 17 * len(bars) + 14
    parts.append(f'<text class="soft" x="10" y="{top + 12}">one NVIDIA H200, bf16, torch 2.11; higher is better</text>')
    return drawing(760, top + 24, "Training speed on one H200", parts)


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


CHARTS = {"speed": speed, "kills": kills, "levels": levels, "verify": verify}

if __name__ == "__main__":
    for name, draw in CHARTS.items():
        (OUT / f"{name}.svg").write_text(draw())
