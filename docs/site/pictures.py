"""The pictures of ``how_it_works.md``, drawn from the code they show: ``python docs/site/pictures.py``.

The staircase is the runtime's own schedule, timed by its simulator; the mesh is the plan's own.
"""

from __future__ import annotations

from pathlib import Path

from echelon.plan.schedule import make_schedule
from echelon.plan.simulate import simulate

OUT = Path(__file__).parent.parent / "pictures"
STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #39424e } .soft { fill: #7a8494; font-size: 11px }
.F { fill: #7c93f2 } .B { fill: #2b9a5b } .I { fill: #2b9a5b } .W { fill: #f0a500 }
.box { fill: #eef1fd; stroke: #7c93f2 }
.ghost { fill: none; stroke: #b9c0cd; stroke-dasharray: 4 3 }
.way { stroke: #7a8494; fill: none; marker-end: url(#tip) }
.in { fill: #fff; font-size: 10px; text-anchor: middle } .mid { text-anchor: middle }
</style>
<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">
<path d="M0,0 L8,4 L0,8 z" fill="#7a8494"/></marker></defs>"""


def drawing(width: int, height: int, title: str, parts: list[str]) -> str:
    ground = f'<rect width="{width}" height="{height}" fill="#ffffff" rx="6"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"><title>{title}</title>'
    return "\n".join([head, STYLE, ground, *parts, "</svg>\n"])


def staircase() -> str:
    """Three schedules of four stages and eight micro-batches, backward twice as long as forward."""
    parts, top = [], 10
    for name in ("gpipe", "1f1b", "zero-bubble"):
        seconds = {
            (kind, stage): {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}[kind] for kind in "FBIW" for stage in range(4)
        }
        timed = simulate(make_schedule(name, 4, 4, 8), seconds)
        share = 1 - sum(timed.busy) / (4 * timed.makespan)
        parts.append(f'<text x="10" y="{top + 12}">{name}</text>')
        parts.append(f'<text class="soft" x="110" y="{top + 12}">idle {share:.0%}</text>')
        for event in timed.events:
            x, width = 60 + 18.5 * event.begin, 18.5 * (event.end - event.begin) - 1
            y = top + 20 + 22 * event.rank
            kind, micro = event.action.kind, event.action.micro
            parts.append(f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="20" rx="2"/>')
            parts.append(f'<text class="in" x="{x + width / 2:.1f}" y="{y + 14}">{micro}</text>')
        parts += [f'<text class="soft" x="10" y="{top + 34 + 22 * rank}">rank {rank}</text>' for rank in range(4)]
        top += 125
    legend = "forward (blue), backward (green; the part the previous stage waits for), weights' gradients (orange)"
    parts.append(f'<text class="soft" x="10" y="{top + 8}">{legend}</text>')
    return drawing(740, top + 20, "Three pipeline schedules", parts)


def mesh() -> str:
    """Eight ranks as two replicas of two stages of a split over two."""
    parts = []
    for replica in range(2):
        left = 20 + 350 * replica
        parts.append(f'<rect class="ghost" x="{left}" y="34" width="330" height="170" rx="8"/>')
        parts.append(f'<text x="{left + 10}" y="26">replica {replica}: a batch of its own</text>')
        for stage in range(2):
            x = left + 15 + 160 * stage
            parts.append(f'<text class="soft" x="{x}" y="56">stage {stage}: some of the layers</text>')
            for part in range(2):
                rank, y = 4 * replica + 2 * stage + part, 64 + 68 * part
                parts.append(f'<rect class="box" x="{x}" y="{y}" width="140" height="56" rx="6"/>')
                parts.append(f'<text class="mid" x="{x + 70}" y="{y + 24}">rank {rank}</text>')
                parts.append(f'<text class="soft mid" x="{x + 70}" y="{y + 42}">part {part} of each layer</text>')
        parts.append(f'<path class="way" d="M{left + 155},126 h18"/>')
    parts.append('<path class="way" d="M185,204 v22 h350 v-20"/><path class="way" d="M535,226 h-350 v-20"/>')
    parts.append('<text class="soft mid" x="360" y="244">gradients are added up over replicas</text>')
    return drawing(720, 256, "A mesh of eight ranks", parts)


#: Each line of ``Engine.step``: what it does, and the functions that do it, from the engine down.
STEP = [
    ("prepare", "this rank's batch", ["Engine._prepare", "LoaderFactory.rows", "BatchChecks.compare"]),
    (
        "forward, backward",
        "buckets leave meanwhile",
        [
            "Engine._forward_backward",
            "ForwardBackward.run",
            "FastPath.run",
            "Objective.__call__",
            "PipelineRunner.train",
        ],
    ),
    (
        "reduce",
        "sums over ranks",
        ["Engine._reduce", "ForwardBackward.reduce", "Gradients.after_backward", "Reducer.finish"],
    ),
    (
        "update",
        "clip, optimizer, schedule",
        ["Engine._update", "OptimizerUpdate.weights", "Shards.after_step", "ServerBackend.push", "OptimizerUpdate.end"],
    ),
    (
        "observe",
        "metrics, checkpoints",
        ["Engine._observe", "TraceSession.after", "MetricsLogger.step", "CheckpointManager.save"],
    ),
]


def step() -> str:
    parts = []
    for i, (name, about, functions) in enumerate(STEP):
        x, middle = 12 + 190 * i, 97 + 190 * i
        parts.append(f'<rect class="box" x="{x}" y="20" width="170" height="52" rx="6"/>')
        parts.append(f'<text class="mid" x="{middle}" y="42">{name}</text>')
        parts.append(f'<text class="soft mid" x="{middle}" y="60">{about}</text>')
        for row, function in enumerate(functions):
            parts.append(f'<text class="soft mid" x="{middle}" y="{94 + 17 * row}">{function}</text>')
        if i:
            parts.append(f'<path class="way" d="M{x - 20},46 h18"/>')
    return drawing(964, 178, "Engine.step, line by line", parts)


def seam() -> str:
    left = ["your marks", "your strategy", "the planner", "a file"]
    right = ["parallelize", "pipeline, split, shard", "reducer", "checkpoints"]
    parts = ['<rect class="box" x="285" y="50" width="150" height="80" rx="8"/>']
    parts.append('<text class="mid" x="360" y="86">Plan</text>')
    parts.append('<text class="soft mid" x="360" y="106">frozen, JSON, hashed</text>')
    for i, (decides, runs) in enumerate(zip(left, right, strict=True)):
        y = 32 + 40 * i
        parts.append(f'<text x="20" y="{y}">{decides}</text><path class="way" d="M130,{y - 4} L282,{74 + 12 * i}"/>')
        parts.append(f'<text x="560" y="{y}">{runs}</text><path class="way" d="M437,{74 + 12 * i} L552,{y - 4}"/>')
    parts.append('<text class="soft" x="20" y="186">what decides writes a Plan</text>')
    parts.append('<text class="soft" x="560" y="186">what runs reads it</text>')
    return drawing(720, 200, "Everything that decides writes a Plan", parts)


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    for name, drawn in {"staircase": staircase(), "mesh": mesh(), "step": step(), "seam": seam()}.items():
        (OUT / f"{name}.svg").write_text(drawn)
