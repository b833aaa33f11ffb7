"""Pictures of the pages of real runs, taken in Chromium: ``python docs/site/screenshots.py``, in ``make pictures``.

``inputs.json`` beside the pictures holds a hash of what each is taken from: the page's code and the run's commands.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "pictures"
INPUTS = OUT / "inputs.json"
HTML = ("echelon/tools/html/palette.css", "echelon/tools/html/style.css", "docs/site/screenshots.py")
RUN = "echelon run --procs 2 --timeline --log-dir log examples/digits.py --dir digits --epochs 4 --fresh"
REPORT = "echelon report log --out report.html"
PLAN = (
    "echelon plan gpt:layers=48,hidden=6144,heads=64,sequence=2048 --cluster 4x8xH100 --global-batch 512 "
    "--html plan.html"
)


@dataclass(frozen=True)
class Screenshot:
    """One picture of a page.

    page:   file that the commands write
    inputs: files whose change makes the picture an old one
    part:   CSS selector of the part to show; default: the top of the page
    height: height of the top of the page, in pixels
    """

    commands: tuple[str, ...]
    page: str
    inputs: tuple[str, ...]
    part: str = ""
    height: int = 900


REPORT_PAGE = ("examples/digits.py", "echelon/tools/report/page.html.j2", "echelon/tools/report/page.css", *HTML)
SCREENSHOTS = {
    "report": Screenshot((RUN, REPORT), "report.html", REPORT_PAGE),
    "timeline": Screenshot((RUN, REPORT), "report.html", REPORT_PAGE, part="#plan"),
    "plan": Screenshot((PLAN,), "plan.html", ("echelon/tools/plan_report/page.html.j2", *HTML), height=1250),
}


def hash_inputs(shot: Screenshot) -> str:
    """Return a hash of the commands and of the files that a picture is taken from."""
    texts = [*shot.commands, *((ROOT / path).read_text("utf-8") for path in shot.inputs)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from browser import Browser

    with tempfile.TemporaryDirectory() as place, Browser(Path(place, "profile"), width=1280) as browser:
        browser.call("Emulation.setScrollbarsHidden", hidden=True)
        os.symlink(ROOT / "examples", Path(place, "examples"))
        made = [command for shot in SCREENSHOTS.values() for command in shot.commands]
        for command in dict.fromkeys(made):
            words = [sys.executable, "-m", *command.split()]
            subprocess.run(words, cwd=place, check=True, stdout=subprocess.DEVNULL)
        for name, shot in SCREENSHOTS.items():
            browser.resize(1280, shot.height)
            browser.open(Path(place, shot.page).as_uri())
            time.sleep(0.5)  # charts are drawn after the page has loaded
            clip = {"x": 0, "y": 0, "width": 1280, "height": shot.height}
            if shot.part:
                box = browser.ask(f"document.querySelector('{shot.part}').getBoundingClientRect().toJSON()")
                clip = {side: box[side] for side in ("x", "y", "width", "height")}
            taken = browser.call(
                "Page.captureScreenshot",
                format="webp",
                quality=80,
                captureBeyondViewport=True,
                clip=clip | {"scale": 1},
            )
            (OUT / f"{name}.webp").write_bytes(base64.b64decode(taken["data"]))
    INPUTS.write_text(json.dumps({name: hash_inputs(shot) for name, shot in SCREENSHOTS.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
