"""The script of the quick start prints the losses that its page shows, in each of its layouts."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from harness import run, script

ROOT = Path(__file__).parents[2]


def losses(text: str) -> list[str]:
    """Return the losses of the console's lines, as they are written."""
    return re.findall(r"^\s*step \d+/40  loss ([\d.]+) ", text, re.MULTILINE)


def test_all_layouts_print_the_losses_of_the_page(tmp_path: Path) -> None:
    """Each layout on two ranks prints the losses that one process prints, which stand on the page."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    shown = losses(page)[:4]
    assert losses(page)[4:8] == shown
    for layout, ranks in (("data", 1), ("data", 2), ("tensor", 2), ("pipeline", 2), ("zero", 2)):
        folder = tmp_path / f"{layout}-{ranks}"
        folder.mkdir()
        shutil.copy(ROOT / "examples" / "llama.py", folder)
        output = run(script, str(folder / "llama.py"), ["--layout", layout], ranks=ranks)[0]
        assert losses(output) == shown, f"{layout} on {ranks}"
