"""The report in a real browser: reading, zooming, refreshing; no request to other servers, no error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import made_up_runs as made_up
import pytest
from browser import BROWSER, TOO_PALE, Browser
from made_up_runs import BEGAN, append, loss_at, metrics
from test_report_server import serving

from echelon.cli.commands.report import report
from echelon.tools.report.figures.curves import SIDE
from echelon.tools.report.run_files import gather
from echelon.tools.report.run_page import render

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium; ECHELON_CHROMIUM names one")

LOSS = "#chart-loss .canvas"
READ = "document.querySelector('#chart-loss .readout').innerText.replaceAll(/\\s+/g, ' ').trim()"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = made_up.write(tmp_path_factory.mktemp("log"), servers=2)
    page = directory / "report.html"
    page.write_text(render(gather(directory), BEGAN + 220))
    return page


@pytest.fixture
def opened(browser: Browser, path: Path) -> Iterator[Browser]:
    browser.requests.clear()
    browser.complaints.clear()
    browser.resize(1280, 900)
    browser.open(path.as_uri())
    yield browser
    assert browser.complaints == []
    assert set(browser.requests) == {path.as_uri()}


def test_page_fits_the_window_and_shapes_lie_in_their_pictures(opened: Browser) -> None:
    """Nothing is wider than the window, and every shape is drawn inside its picture."""
    for width in (1280, 390):
        opened.resize(width, 900)
        assert opened.ask("document.documentElement.scrollWidth - innerWidth") <= 0, width
        outside = opened.ask("""[...document.querySelectorAll("svg[role=img]")].flatMap(picture => {
          const frame = picture.getBoundingClientRect();
          return frame.width === 0 ? [] : [...picture.querySelectorAll("rect, path.curve")].filter(each => {
            const box = each.getBoundingClientRect();
            return box.left < frame.left - 2 || box.right > frame.right + 2 || box.top < frame.top - 2
              || box.bottom > frame.bottom + 2;
          });
        }).length""")
        assert outside == 0, width


def test_pointing_at_a_curve_reads_it(opened: Browser) -> None:
    box = opened.box(LOSS)
    opened.mouse("Moved", box["x"] + 0.3 * box["width"], box["y"] + 50)  # 10 + 0.3 * 2990, with space
    assert opened.ask(READ) == f"step 890 loss {loss_at(890):.4g} evaluated {loss_at(1000) + 0.04:.4g}"
    dot = opened.ask("document.querySelector('#chart-loss .dot').getAttribute('cx')")
    assert float(dot.rstrip("%")) == pytest.approx(100 * (880 / 2990 + SIDE) / (1 + 2 * SIDE))
    opened.mouse("Moved", 5, 5)
    assert opened.ask(READ).startswith("step 3,000 loss")


def test_drawing_over_a_part_shows_that_part_alone(opened: Browser) -> None:
    box = opened.box(LOSS)
    ticks = "[...document.querySelectorAll('#chart-loss .ticks span')].map(each => each.textContent)"
    assert opened.ask(ticks) == ["0", "500", "1,000", "1,500", "2,000", "2,500", "3,000"]
    opened.drag((box["x"] + 0.5 * box["width"], box["y"] + 90), (box["x"] + 0.6 * box["width"], box["y"] + 95))
    assert opened.ask(ticks) == ["1,550", "1,600", "1,650", "1,700", "1,750", "1,800"]
    low, high = opened.ask("""(() => { const y = [...document.querySelectorAll('#chart-loss .scale span')]
      .map(each => Number(each.textContent)); return [Math.min(...y), Math.max(...y)]; })()""")
    inside = [loss_at(step) for step in range(1510, 1801, 10)]
    assert min(inside) <= low < high <= max(inside) + 0.1  # the axis fits what is seen
    opened.click("#chart-loss [data-tool=all]")
    assert opened.ask(ticks)[0] == "0"


def test_smooth_and_log_and_keys(opened: Browser) -> None:
    opened.click("#chart-loss [data-tool=smooth]")
    paths = opened.ask("[...document.querySelectorAll('#chart-loss .curve')].map(each => each.getAttribute('class'))")
    assert paths == ["curve s-0 raw", "curve s-0 smooth", "curve s-1 raw", "curve s-1 smooth"]
    before = opened.ask("document.querySelector('#chart-loss .curve').getAttribute('d')")
    opened.click("#chart-loss [data-tool=log]")
    assert opened.ask("document.querySelector('#chart-loss .curve').getAttribute('d')") != before
    assert opened.ask("document.querySelector('#chart-loss [data-tool=log]').getAttribute('aria-pressed')") == "true"
    opened.ask("document.querySelector('#chart-loss .canvas').focus()")
    for key in ("Home", "ArrowRight", "ArrowRight"):
        for kind in ("keyDown", "keyUp"):
            opened.call("Input.dispatchKeyEvent", type=kind, key=key)
    assert opened.ask(READ).startswith(f"step 30 loss {loss_at(30):.4g}")


def test_a_rectangle_of_the_schedule_says_what_it_is(opened: Browser) -> None:
    box = opened.box("#plan .said-by rect.block.k-backward")
    opened.mouse("Moved", box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert opened.ask("document.querySelector('#plan .said').textContent").startswith(
        "rank 0, backward, kernels: 2.6 ms"
    )


def test_all_can_be_read_without_scripts(opened: Browser) -> None:
    opened.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        opened.call("Page.reload")
        opened.wait("document.readyState === 'complete'")
        assert not opened.ask("document.querySelector('.tools').checkVisibility()")
        assert opened.ask("document.querySelector('#chart-loss .curve').getBoundingClientRect().width") > 300
        assert "evaluated" in opened.ask(READ)
    finally:
        opened.call("Emulation.setScriptExecutionDisabled", value=False)


def test_a_script_that_got_into_the_page_would_not_run(browser: Browser, tmp_path: Path) -> None:
    made_up.write(tmp_path / "log", last=100)
    path = tmp_path / "report.html"
    page = render(gather(tmp_path / "log"), BEGAN + 9).replace(
        "<main>",
        "<main><script>document.title = 'had'</script><img src='http://127.0.0.1:9/x' onerror='document.title=1' />",
    )
    path.write_text(page)
    browser.requests.clear()
    browser.open(path.as_uri())
    assert "train gpt.py" in browser.ask("document.title")
    assert set(browser.requests) <= {path.as_uri(), "http://127.0.0.1:9/x"}
    assert any("Content Security Policy" in each for each in browser.complaints)
    browser.complaints.clear()


def test_a_live_page_grows_under_its_reader(browser: Browser, tmp_path: Path) -> None:
    made_up.write(tmp_path, last=1000)
    browser.complaints.clear()
    browser.resize(1280, 900)
    with serving(tmp_path) as server:
        browser.open(f"http://127.0.0.1:{server.port}/?token={server.token}")
        browser.wait("document.querySelector('.facts b')?.textContent === '1,000'")
        box = browser.box(LOSS)
        browser.drag((box["x"] + 0.2 * box["width"], box["y"] + 90), (box["x"] + 0.4 * box["width"], box["y"] + 95))
        browser.mouse("Moved", 2, 2)
        browser.ask("for (const id of ['rank-figures', 'figures-loss']) document.getElementById(id).open = true")
        top = browser.box("#rank-figures")["y"]
        ticks = "[...document.querySelectorAll('#chart-loss .ticks span')].map(each => each.textContent)"
        zoomed = browser.ask(ticks)
        assert "250" in zoomed
        warning = {"time": BEGAN + 80, "kind": "warning", "rank": 1, "text": "<b>new</b>\n" * 9}
        append(tmp_path / "events.jsonl", [warning])
        append(tmp_path / "rank-0.jsonl", made_up.rank_records(0, 1010, 1500))
        append(tmp_path / "metrics.jsonl", metrics(1010, 1500))
        browser.wait("document.querySelector('.facts b').textContent === '1,500'")
        assert browser.ask(ticks) == zoomed
        assert browser.ask("['rank-figures', 'figures-loss'].every(id => document.getElementById(id).open)")
        now = browser.ask("document.getElementById('rank-figures').getBoundingClientRect().y")
        assert now == pytest.approx(top, abs=2)
        assert "<b>new</b>" in browser.ask("document.querySelector('.alerts').textContent")
        assert browser.complaints == []
    browser.wait("document.querySelector('.beat').textContent.startsWith('not reached any more')")
    origin = f"http://127.0.0.1:{server.port}/"
    asked = {each.partition("?")[0] for each in browser.requests if each.startswith("http")}
    assert asked - {"http://127.0.0.1:9/x"} == {origin}


def test_the_token_leaves_the_address_and_the_page_stays_live(browser: Browser, tmp_path: Path) -> None:
    made_up.write(tmp_path, last=100)
    with serving(tmp_path, "a-token") as server:
        browser.open(f"http://127.0.0.1:{server.port}/?token=a-token")
        browser.wait("document.querySelector('.facts b')?.textContent === '100'")
        assert browser.ask("location.href") == f"http://127.0.0.1:{server.port}/"
        assert browser.ask("document.cookie") == ""  # scripts do not see it
        append(tmp_path / "metrics.jsonl", metrics(110, 200))
        browser.wait("document.querySelector('.facts b').textContent === '200'")
        assert browser.ask("document.querySelector('.beat').textContent") == "live"
        browser.open("about:blank#done")


def test_contrast_of_text_is_enough_in_light_and_dark(opened: Browser) -> None:
    """WCAG AA: 4.5 to 1 for all text that is read, against the ground it stands on."""
    for scheme in ("light", "dark"):
        opened.colours(scheme)
        assert opened.ask(TOO_PALE) == [], scheme
    opened.colours("light")


def test_pages_of_runs_and_of_a_failure_are_readable(browser: Browser, tmp_path: Path) -> None:
    """A comparison and the page of a failed run fit the window, have enough contrast and answer to keys."""
    made_up.write(tmp_path / "one", last=100, optimizer="SGD(lr=0.1)")
    made_up.write(tmp_path / "two", last=200, optimizer="SGD(lr=0.2)")
    failure = {"time": BEGAN + 99, "kind": "failed", "rank": 1, "text": "rank 1 of 2 raised ValueError: odd"}
    trace = "Traceback\n" + "  a line that is longer than a telephone is wide, and does not end soon\n" * 9
    append(tmp_path / "two" / "events.jsonl", [failure | {"step": 7, "log": "log/rank-1.log", "traceback": trace}])
    index = report(str(tmp_path), None)
    browser.complaints.clear()
    for path in (index, tmp_path / "two" / "report.html"):
        browser.requests.clear()
        browser.open(path.as_uri())
        for scheme, width in (("light", 1280), ("dark", 390)):
            browser.colours(scheme)
            browser.resize(width, 900)
            assert browser.ask(TOO_PALE) == [], (path.name, scheme)
            assert browser.ask("document.documentElement.scrollWidth - innerWidth") <= 0, (path.name, width)
        browser.colours("light")
        browser.ask("document.querySelector('figure.chart .canvas').focus()")
        for kind in ("keyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key="Home")
        assert browser.ask("document.querySelector('figure.chart .readout').textContent").startswith("step 10 ")
        assert set(browser.requests) == {path.as_uri()}
    assert browser.complaints == []
