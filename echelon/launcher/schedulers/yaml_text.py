"""Writes YAML that every parser reads alike: unambiguous words are plain, all other text is quoted and ASCII."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

_BARE = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*", re.ASCII)
#: Words that some version of YAML reads as another type.
_TAKEN = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


class _Dumper(yaml.SafeDumper):
    """A dumper without anchors, and with quotes wherever parsers might differ (``1e3``, ``0o7``, ``on``)."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    bare = _BARE.fullmatch(text) and text.lower() not in _TAKEN
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if bare else '"')


_Dumper.add_representer(str, _text)


def to_yaml(documents: Iterable[Any]) -> str:
    # lines are not folded, so that readers can search for a whole argument
    text: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=10**6)
    return text
