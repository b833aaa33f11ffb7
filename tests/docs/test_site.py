"""The site in a real browser: all pages fit wide and narrow windows, search finds the field's words, nothing is
fetched from elsewhere, text can be read in light and dark."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from browser import BROWSER, TOO_PALE, Browser

ROOT = Path(__file__).parents[2]
#: Contents that leave the page or the window, or that scroll sideways: page, tag, text. Each page's article is put
#: into the page that is open, because a full start of each page takes half a second.
TOO_WIDE = """(async pages => {
  const found = [];
  for (const page of pages) {
    const text = await (await fetch(page)).text();
    const article = new DOMParser().parseFromString(text, "text/html").querySelector(".md-content__inner");
    const place = document.querySelector(".md-content__inner");
    for (const image of article.querySelectorAll("img")) image.src = new URL(image.getAttribute("src"), page).href;
    place.replaceChildren(...article.childNodes);
    for (const each of place.querySelectorAll("details")) each.open = true;
    const lost = image => found.push([page, "IMG", image.src]);
    await Promise.all([...place.querySelectorAll("img")].map(image => image.decode().catch(() => lost(image))));
    const frame = place.getBoundingClientRect();
    const whole = document.documentElement;
    const [left, right] = innerWidth > 700 ? [frame.left - 4, frame.right + 4] : [0, whole.clientWidth];
    if (whole.scrollWidth > whole.clientWidth) found.push([page, "page", ""]);
    for (const each of place.querySelectorAll("*")) {
      const box = each.getBoundingClientRect();
      const scrolls = each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 1
        && getComputedStyle(each).overflowX !== "visible";
      if (box.width > 1 && (box.right > right || box.left < left) || scrolls)
        found.push([page, each.tagName, each.textContent.trim().slice(0, 40)]);
    }
  }
  return found.slice(0, 20);
})"""
SOUGHT = {
    "tensor parallel": "parallel.html",
    "pipeline parallel": "parallel.html",
    "mixed precision": "strategies.html",
    "gradient accumulation": "strategies.html",
    "activation checkpointing": "recompute.html",
    "FSDP": "shard.html",
}
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium; ECHELON_CHROMIUM names one")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(place)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return place


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Print nothing for each request."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile"), width=1400) as found:
        yield found


@pytest.fixture
def browser(shared: Browser, address: str) -> Iterator[Browser]:
    shared.requests.clear()
    shared.complaints.clear()
    shared.resize(1400, 900)
    yield shared
    assert shared.complaints == []
    assert [each for each in shared.requests if not each.startswith((address, "data:"))] == []


def pages(site: Path) -> list[str]:
    return sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if path.name != "404.html")


def test_all_pages_fit_wide_and_narrow_windows(browser: Browser, site: Path, address: str) -> None:
    browser.open(f"{address}/index.html")
    addresses = [f"{address}/{page}" for page in pages(site)]
    assert len(addresses) > 60
    for width in (1400, 420):
        browser.resize(width, 900)
        assert browser.ask(f"{TOO_WIDE}({addresses})") == [], width


def test_every_link_and_resource_is_there(site: Path) -> None:
    """No page asks another host for anything; each link within the site leads to a file, measured ones too."""
    missing = []
    for page in pages(site):
        text = (site / page).read_text()
        assert re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="?(?:https?:)?//[^">]*', text) == [], page
        for link in set(re.findall(r'(?:href|src)="([^"]+)"', text)):
            target = unquote(link.split("#")[0].split("?")[0])
            if target and ":" not in target and not (site / page).parent.joinpath(target).resolve().exists():
                missing.append(f"{page}: {link}")
    assert missing == []
    assert (site / "files" / "benchmarks" / "measured" / "overhead.json").is_file()


def test_search_finds_the_words_of_the_field(browser: Browser, address: str) -> None:
    browser.open(f"{address}/index.html")
    for words, page in SOUGHT.items():
        browser.ask(f"""(() => {{
          const field = document.querySelector("[data-md-component=search-query]");
          field.focus(); field.value = "{words}"; field.dispatchEvent(new Event("keyup"));
        }})()""")
        results = "[...document.querySelectorAll('.md-search-result__link')].map(each => each.href).join(' ')"
        browser.wait(f"{results}.includes('/{page}')")


def test_text_can_be_read_in_light_and_dark(browser: Browser, address: str) -> None:
    for page in ("index.html", "strategies.html", "reference/training.html"):
        browser.open(f"{address}/{page}")
        browser.ask("document.querySelector('.md-search').remove()")  # closed: its text is not seen
        for choice, scheme in enumerate(("default", "slate")):
            browser.ask(f"document.getElementById('__palette_{choice}').click()")
            browser.wait(f"document.body.dataset.mdColorScheme === '{scheme}'")
            pale = browser.ask(TOO_PALE)
            assert pale == [], (page, scheme, {(each[0], each[1]): each[2:] for each in pale})


def test_keys_reach_the_contents_and_the_search(browser: Browser, address: str) -> None:
    def press(key: str, **more: object) -> None:
        for kind in ("keyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key=key, **more)

    browser.open(f"{address}/engine.html")
    press("Tab", windowsVirtualKeyCode=9)
    assert browser.ask("document.activeElement.matches('.md-skip')")  # to the contents, past the navigation
    press("/", text="/", windowsVirtualKeyCode=191)
    browser.wait("document.activeElement.matches('[data-md-component=search-query]')")


def test_the_site_has_its_own_mark(browser: Browser, address: str) -> None:
    browser.open(f"{address}/index.html")
    assert browser.ask("document.querySelector('.md-logo img').naturalWidth") > 0
    assert browser.ask("document.querySelector('link[rel=icon]').href") == f"{address}/assets/favicon.svg"
