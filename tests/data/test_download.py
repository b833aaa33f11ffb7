"""Downloads from real servers: whole and verified or not there, resumed, once per host, refused in one line."""

from __future__ import annotations

import hashlib
import http.server
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certificates
import pytest
from harness import context, errors, run

import echelon
from echelon.base.errors import DataError, EchelonError, UsageError
from echelon.data import Downloader
from echelon.data.download import local

BIG = bytes(range(256)) * 12000  # 3 MB
SHA = hashlib.sha256(BIG).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        path = self.path.lstrip("/")
        given = self.headers.get("Range")
        server.asked.append((path, given))
        server.tokens.append(self.headers.get("Authorization"))
        if path == "away":
            self.send_response(302)
            self.send_header("Location", server.away)
            self.end_headers()
            return
        data = server.files.get(path)
        if data is None:
            self.send_error(404)
            return
        start = int(re.findall(r"\d+", given)[0]) if given and server.ranges else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", server.etag)
        if not server.endless:
            self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.pour(server, data[start:])

    def pour(self, server: Any, data: bytes) -> None:
        cut, server.cut = server.cut, None
        try:
            for at in range(0, len(data[:cut]), 1 << 16):
                chunk = data[:cut][at : at + (1 << 16)]
                self.wfile.write(chunk)
                server.served += len(chunk)
                time.sleep(server.slow)
        except OSError:
            pass
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def make_server(context: ssl.SSLContext | None = None) -> Any:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.served = {"big": BIG, "small": b"small"}, [], 0
    server.ranges, server.cut, server.slow, server.etag, server.endless = True, None, 0.0, '"1"', False
    server.tokens = []
    server.handle_error = lambda *_: None
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.url = f"http{'s' if context else ''}://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


@pytest.fixture
def server() -> Iterator[Any]:
    made = make_server()
    yield made
    made.shutdown()
    made.server_close()


def spec(server: Any, *files: Any, **more: Any) -> dict[str, Any]:
    return {"base": server.url, "files": list(files), "retries": 1, **more}


def refused(given: Any, out: Path, kind: type[EchelonError] = DataError) -> str:
    with pytest.raises(kind) as caught:
        Downloader(given, out).fetch()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_come_whole_and_once(server: Any, tmp_path: Path) -> None:
    given = spec(server, "small", {"name": "big", "sha256": SHA, "size": len(BIG)})
    paths = Downloader(given, tmp_path).fetch()
    assert [path.read_bytes() for path in paths] == [b"small", BIG]
    Downloader(given, tmp_path).fetch()
    assert len(server.asked) == 2
    paths[1].write_bytes(b"x" * len(BIG))  # damaged since
    assert Downloader(given, tmp_path).fetch()[1].read_bytes() == BIG


@pytest.mark.parametrize("ranges", [True, False])
def test_a_cut_connection_is_gone_on_with(server: Any, tmp_path: Path, ranges: bool) -> None:
    server.cut, server.ranges = 2_000_000, ranges
    assert Downloader(spec(server, "big"), tmp_path).fetch()[0].read_bytes() == BIG
    assert server.asked == [("big", None), ("big", "bytes=1999999-")]
    assert server.served == (len(BIG) + 1 if ranges else len(BIG) + 2_000_000)


def fetch_big(url: str, out: str) -> None:
    Downloader({"base": url, "files": ["big"]}, out, quiet=True).fetch()


def start(server: Any, folder: Path) -> Any:
    process = context.Process(target=fetch_big, args=(server.url, str(folder / "o")))
    process.start()
    return process


@pytest.mark.parametrize("changed", [False, True])
def test_a_killed_process_is_gone_on_from(server: Any, tmp_path: Path, changed: bool) -> None:
    server.slow = 0.05
    process = start(server, tmp_path)
    while not any(path.stat().st_size for path in tmp_path.glob("o/.echelon/*.part")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "o/big").exists()
    (part,) = (tmp_path / "o/.echelon").glob("*.part")
    had, server.slow, server.asked[:] = part.stat().st_size, 0, []
    assert 0 < had < len(BIG)
    if changed:
        server.etag, server.files["big"] = '"2"', BIG[::-1]
    assert Downloader(spec(server, "big"), tmp_path / "o").fetch()[0].read_bytes() == server.files["big"]
    again = [("big", None)] if changed else []
    assert server.asked == [("big", f"bytes={had - 1}-"), *again]


def test_two_processes_fetch_a_file_once(server: Any, tmp_path: Path) -> None:
    server.slow = 0.02
    both = [start(server, tmp_path) for _ in range(2)]
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert (tmp_path / "o/big").read_bytes() == BIG
    assert len(server.asked) == 1


def test_a_wrong_checksum_leaves_nothing(server: Any, tmp_path: Path) -> None:
    assert "came twice with md5" in refused(spec(server, {"name": "big", "md5": "0" * 32}), tmp_path)
    assert len(server.asked) == 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_more_bytes_than_announced_are_refused(server: Any, tmp_path: Path) -> None:
    server.endless = True
    assert "sends more than the 10 bytes" in refused(spec(server, {"name": "big", "size": 10}), tmp_path)
    assert not (tmp_path / "big").exists()


def test_what_a_server_refuses_is_one_line(server: Any, tmp_path: Path) -> None:
    assert f"{server.url}/none: HTTP 404" in refused(spec(server, "none"), tmp_path)
    server.away = "file:///etc/passwd"
    assert "is not allowed" in refused(spec(server, "away"), tmp_path)
    assert "attempts" in refused({"base": "http://127.0.0.1:9", "files": ["a"], "retries": 1}, tmp_path)


def test_untrusted_certificate_and_redirect_to_http_are_refused(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from echelon.data.download import url_source as web

    pem = certificates.write(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pem / "member.pem", pem / "member.key")
    safe = make_server(tls)
    web._opener.cache_clear()
    assert "certificate is not trusted" in refused(spec(safe, "small"), tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(pem / "authority.pem"))
    web._opener.cache_clear()
    assert Downloader(spec(safe, "small"), tmp_path).fetch()[0].read_bytes() == b"small"
    safe.away = f"{server.url}/small"
    assert "not safe" in refused(spec(safe, "away"), tmp_path)
    assert server.asked == []
    web._opener.cache_clear()
    safe.shutdown()
    safe.server_close()


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "a\\x", "", "a//b", ".echelon/x", "a\nb", "x" * 300])
def test_names_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    refused({"base": str(tmp_path), "files": [name]}, tmp_path / "o")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("bsae: x\nfiles: [a]", "no option 'bsae'; did you mean 'base'?"),
        ("files: [a]\nlist: b", "both 'files' and 'list'"),
        ("files: [{name: a, size: -1}]", "0 or more"),
        ("files: [a]\nfiles: [b]", "given twice"),
        ("a: &a [x]\nfiles: [*a, *a]", "alias"),
        ("files: [", "cannot be read"),
        ("files: [{name: a, sha256: abc}]", "64 hexadecimal digits"),
    ],
)
def test_mistakes_in_a_spec_are_one_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "spec.yaml").write_text(text)
    assert line in refused(tmp_path / "spec.yaml", tmp_path / "o", UsageError)


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    line = refused({"base": "s3://bucket", "files": ["a"]}, tmp_path, UsageError)
    assert line == "s3://bucket/a needs the library s3fs; pip install s3fs"


def in_a_job(url: str, out: str, name: str) -> list[bytes]:
    echelon.init()
    return [path.read_bytes() for path in Downloader({"base": url, "files": [name]}, out).fetch()]


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_rank_fetches_for_its_host(server: Any, tmp_path: Path, ranks: int) -> None:
    assert run(in_a_job, server.url, str(tmp_path), "big", ranks=ranks) == [[BIG]] * ranks
    assert len(server.asked) == 1


def test_a_failure_is_told_to_all_ranks(server: Any, tmp_path: Path) -> None:
    lines = errors(in_a_job, server.url, str(tmp_path), "none", ranks=3)
    assert len(set(lines)) == 1
    assert lines[0].startswith(f"DataError: {server.url}/none: HTTP 404")


def test_the_command_fetches_its_share_of_a_list(server: Any, tmp_path: Path) -> None:
    small = hashlib.sha256(b"small").hexdigest()
    server.files["sums"] = f"{SHA}  big\n{small} *small\n".encode()
    (tmp_path / "spec.yaml").write_text(f"list: {server.url}/sums\n")
    words = [
        sys.executable,
        "-m",
        "echelon",
        "fetch-data",
        "spec.yaml",
        "--out",
        "o",
        "--worker",
        "1",
        "--workers",
        "2",
    ]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "1 files of spec.yaml are in o" in done.stdout
    assert (tmp_path / "o/small").read_bytes() == b"small"
    assert not (tmp_path / "o/big").exists()


def test_local_fetches_urls_and_leaves_paths(server: Any, tmp_path: Path) -> None:
    assert local("some/where") == Path("some/where")
    assert local(f"{server.url}/small", tmp_path).read_bytes() == b"small"
    server.files["spec.yaml"] = b"files: [small]"
    assert (local(f"{server.url}/spec.yaml", tmp_path) / "small").read_bytes() == b"small"
    server.files["spec.yaml"] = b"files: [{name: a, url: 'file:///etc/hostname'}]"
    with pytest.raises(DataError, match="a spec from afar may not"):
        local(f"{server.url}/spec.yaml", tmp_path)


def test_a_folder_that_cannot_be_written_is_one_line(server: Any, tmp_path: Path) -> None:
    (tmp_path / "o").write_text("in the way")
    assert "cannot be written" in refused(spec(server, "small"), tmp_path / "o")
    assert os.listdir(tmp_path) == ["o"]


def test_a_token_is_for_one_server_only(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    other = make_server()
    server.away = f"{other.url}/small"
    elsewhere = {"name": "b", "url": f"{other.url}/small"}
    Downloader(spec(server, "small", "away", elsewhere), tmp_path, token_env="TOKEN").fetch()
    assert server.tokens == ["Bearer secret"] * 2
    assert other.tokens == [None, None]
    other.shutdown()
    other.server_close()
    with pytest.raises(UsageError, match="'NONE' is not set"):
        Downloader(spec(server, "small"), tmp_path, token_env="NONE")
