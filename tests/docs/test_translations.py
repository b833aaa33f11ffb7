"""Each Chinese page states the English page that it translates, by the hash of what was translated."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHINESE = ROOT / "docs" / "zh"
MARK = re.compile(r"\A<!-- translates (\S+) (\w+) -->\n")
#: Pictures and comments need no translation.
PICTURE = re.compile(r"^(!\[.*|<!--.*-->)\n", re.MULTILINE)
FENCED = re.compile(r"^```(?:python|py|diff|yaml)\n.*?^```", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^    (?:\$|echelon:|step \d).*", re.MULTILINE)


def english_of(page: Path) -> Path:
    return ROOT / "README.md" if page.name == "index.md" else ROOT / "docs" / page.name


def read_english(page: Path) -> str:
    return PICTURE.sub("", english_of(page).read_text("utf-8"))


def pages() -> list[Path]:
    return sorted(CHINESE.glob("*.md"))


def test_pages_of_newcomers_have_a_translation() -> None:
    wanted = {"index", "quickstart", "from_fleet", "from_fluid", "from_tensorflow", "from_whale"}
    assert {page.stem for page in pages()} >= wanted


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_translation_is_of_the_present_english_page(page: Path) -> None:
    english = english_of(page).relative_to(ROOT)
    wanted = f"<!-- translates {english} {hashlib.sha256(read_english(page).encode()).hexdigest()[:12]} -->\n"
    found = MARK.match(page.read_text("utf-8"))
    assert found, f"{page.relative_to(ROOT)}: the first line must be {wanted}"
    assert found[0] == wanted, (
        f"{english} has changed since docs/zh/{page.name} was translated: bring the Chinese page up to date, then make "
        f"its first line {wanted}"
    )


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_translation_has_the_code_and_outputs_of_the_original(page: Path) -> None:
    """Code blocks, commands and what they print are the same in both languages."""
    translated, english = page.read_text("utf-8"), read_english(page)
    assert FENCED.findall(translated) == FENCED.findall(english)
    assert SHOWN.findall(translated) == SHOWN.findall(english)
