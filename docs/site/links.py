"""For the site: files outside docs/ have no page there, so links to them become their names."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]*)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def plain(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, found[2]))
        return found[0] if path.startswith("docs/") else f"{found[1]} (`{path}`)"

    return LINK.sub(plain, markdown)
