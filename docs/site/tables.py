"""For the site: each cell of a table knows its column, so that a narrow window can show rows as lists (site.css)."""

from __future__ import annotations

import html
import re
from typing import Any

TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
HEAD = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
CELL = re.compile(r"<td\b([^>]*)>")
SHORT = re.compile(r"<code>([^<]{1,24})</code>")  # not broken at its hyphens and spaces
MANY = 10


def on_page_content(content: str, **_: Any) -> str:
    return TABLE.sub(lambda table: _labelled(table[0]), content)


def _labelled(table: str) -> str:
    columns = [" ".join(re.sub(r"<[^>]+>", "", head).split()) for head in HEAD.findall(table)]
    body = ROW.sub(lambda row: _row(row[0], columns), SHORT.sub(r'<code class="short">\1</code>', table))
    return body.replace("<table>", '<table data-columns="many">') if len(columns) >= MANY else body


def _row(row: str, columns: list[str]) -> str:
    names = iter(columns)

    def cell(found: re.Match[str]) -> str:
        name = next(names, "")
        return f'<td{found[1]} data-column="{html.escape(html.unescape(name))}">' if name else found[0]

    return CELL.sub(cell, row)
