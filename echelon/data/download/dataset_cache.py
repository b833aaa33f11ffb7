"""Resolves the URL of a data set to a local path: downloads it once into this machine's cache."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from echelon.base.environment import CACHE_HOME, DATA_DIR
from echelon.data.download.downloader import Downloader
from echelon.data.download.url_source import is_remote, path_of

SPECS = (".yaml", ".yml", ".json")


def local(dataset_dir: str | os.PathLike[str], cache: Path | None = None) -> Path:
    """Return the local path of the data.

    A path is returned unchanged. For the URL of a spec (.yaml, .json) the files are downloaded, and their folder is
    returned; any other URL is one file, such as an archive: it is downloaded, not unpacked; its path is returned. In a
    job every rank calls this.
    """
    url = os.fspath(dataset_dir)
    if not is_remote(url):
        return path_of(url)
    folder = (cache or default_cache()) / hashlib.sha256(url.encode()).hexdigest()[:16]
    path = urlsplit(url).path
    if path.lower().endswith(SPECS):
        Downloader(url, folder).fetch()
        return folder
    name = unquote(path).rpartition("/")[2] or "data"
    return Downloader({"files": [{"name": name, "url": url}]}, folder).fetch()[0]


def default_cache() -> Path:
    if given := os.environ.get(DATA_DIR):
        return Path(given).absolute()
    base = os.environ.get(CACHE_HOME, "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "echelon" / "data"
