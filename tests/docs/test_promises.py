"""The table of promises in docs/faults.md names a test that exists for each promise."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_each_promise_names_tests_that_exist() -> None:
    known = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    section = (ROOT / "docs" / "faults.md").read_text().partition("\n## Promises\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if re.match(r"\| (?!what comes|fault|---)", line)]
    assert len(rows) >= 30
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.split("|")[-2])
        assert named, row
        assert set(named) <= known, set(named) - known
