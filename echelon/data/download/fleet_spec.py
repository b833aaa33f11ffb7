"""Reads the yaml of Paddle Fleet's Downloader as a spec: ``bos_path``, or the keys of HDFS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.base.errors import UsageError

_PLACE = ("fs.default.name", "fs_name")
#: Keys of credentials and programs, and the environment variable that is read instead.
_ENVIRONMENT = {
    "hadoop.job.ugi": "HADOOP_USER_NAME",
    "fs_ugi": "HADOOP_USER_NAME",
    "hadoop_home": "HADOOP_HOME",
    "java_home": "JAVA_HOME",
}
#: The defaults of a Fleet folder: names with their md5, names of further files, and archives to unpack.
_FOLDER = {"list": "filelist.txt", "meta": "meta.txt", "unpack": True}
FLEETS = ("bos_path", "data_path", *_PLACE, *_ENVIRONMENT)


def in_our_names(given: Mapping[Any, Any], source: str) -> Mapping[Any, Any]:
    """Return a spec with Fleet's keys translated to Echelon's."""
    found = {key: given[key] for key in FLEETS if key in given}
    if not found:
        return given
    refused = {key: _ENVIRONMENT[key] for key in found if key in _ENVIRONMENT}
    if refused:
        variables = " and ".join(dict.fromkeys(refused.values()))
        raise UsageError(
            f"{source}: {', '.join(refused)}: a spec names no users and no programs; set {variables} in the "
            "environment, and leave it out"
        )
    if "base" in given:
        raise UsageError(f"{source} has both 'base' and '{next(iter(found))}'; keep one")
    rest = {key: value for key, value in given.items() if key not in found}
    named = {} if "files" in given or "list" in given else _FOLDER
    return {"base": _base(found, source), **named, **rest}


def _base(found: Mapping[str, Any], source: str) -> Any:
    if "bos_path" in found:
        return found["bos_path"]
    place = next((str(found[key]) for key in _PLACE if key in found), "")
    if "data_path" not in found:
        raise UsageError(f"{source}: '{next(iter(found))}' needs data_path beside it, the folder in that file system")
    return f"{place.rstrip('/')}/{str(found['data_path']).lstrip('/')}" if place else found["data_path"]
