"""For the site: a linked file outside docs/ is copied under files/; a linked folder becomes its name."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]*)(#[^)]*)?\)")
SOURCE = {".md", ".py", ".yaml", ".yml", ".toml", ".txt"}  # browsers show these as text under a name that ends in .txt


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def inside(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, found[2]))
        if path.startswith("docs/"):
            return found[0]
        if not (ROOT / path).is_file():
            return f"{found[1]} (`{path}`)"
        place = f"files/{path}" + (".txt" if Path(path).suffix in SOURCE else "")
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
        return f"[{found[1]}]({posixpath.relpath(place, folder)})"

    return LINK.sub(inside, markdown)
