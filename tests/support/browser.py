"""A real Chromium for tests, spoken to over a pipe (the DevTools protocol): real pointers, keys, requests and errors.

``ECHELON_CHROMIUM`` names one where none is on the path.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

BROWSER = os.environ.get("ECHELON_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
#: Options that keep the browser from network access of its own.
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
WORDS = ("--headless", "--no-sandbox", "--disable-gpu", *QUIET)
LIMIT = 100.0
#: The browser reads what it is told from descriptor 3, and answers on 4.
_BECOME = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
#: Texts that are too near to their ground: tag, class, beginning, ratio.
TOO_PALE = """(() => {
  const parts = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
  const linear = c => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const over = ([r, g, b, a = 1], below) => [r, g, b].map((value, at) => a * value + (1 - a) * below[at]);
  const ground = each => each === null ? [255, 255, 255]
    : over(parts(getComputedStyle(each).backgroundColor), ground(each.parentElement));
  const speaks = each => [...each.childNodes].some(node => node.nodeType === 3 && node.data.trim());
  const seen = [...document.querySelectorAll("main *, header *, footer *")]
    .filter(each => !each.closest("svg, script") && speaks(each) && each.checkVisibility());
  return seen.flatMap(each => {
    const behind = ground(each), seen = over(parts(getComputedStyle(each).color), behind);
    const pair = [light(seen), light(behind)].sort((a, b) => b - a);
    const ratio = (pair[0] + .05) / (pair[1] + .05);
    return ratio < 4.5 ? [[each.tagName, each.className, each.textContent.slice(0, 20), ratio]] : [];
  });
})()"""


class Browser:
    """One page. ``requests``: what it has asked for; ``complaints``: errors, and what its console was told."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 900) -> None:
        assert BROWSER is not None
        to, self._to = os.pipe()
        self._from, back = os.pipe()
        words = [BROWSER, *WORDS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        words += [f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BECOME, str(to), str(back), *words],
            pass_fds=(to, back),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to)
        os.close(back)
        self._numbers, self._unread, self._session = itertools.count(1), b"", ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        page = next(each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._to)  # it ends when its last client has gone
        os.close(self._from)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + LIMIT
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            more = os.read(self._from, 1 << 20) if ready else b""
            assert more, "the browser does not answer"
            self._unread += more
        line, self._unread = self._unread.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, values: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(values["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.complaints.append(values["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(values["args"]))

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        self.wait_for(lambda: bool(self.ask(expression)), expression)

    def wait_for(self, true: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + LIMIT
        while not true():
            assert time.monotonic() < until, what
            time.sleep(0.05)

    def box(self, selector: str) -> dict[str, float]:
        """Return the place of an element in the window, scrolled into view."""
        target = f"document.querySelector({json.dumps(selector)})"
        self.ask(f"{target}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        found: dict[str, float] = self.ask(f"{target}.getBoundingClientRect().toJSON()")
        return found

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """``kind``: Moved, Pressed or Released."""
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def drag(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("Moved", *begin)
        self.mouse("Pressed", *begin, button="left", buttons=1, clickCount=1)
        self.mouse("Moved", *end, button="left", buttons=1)
        self.mouse("Released", *end, button="left", clickCount=1)

    def click(self, selector: str) -> None:
        box = self.box(selector)
        at = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        self.mouse("Pressed", *at, button="left", buttons=1, clickCount=1)
        self.mouse("Released", *at, button="left", clickCount=1)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def colours(self, scheme: str) -> None:
        """light or dark"""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path) -> None:
        """All of the page, not only what is in the window."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))
