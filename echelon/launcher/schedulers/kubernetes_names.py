"""Validates names for Kubernetes, so that a mistake is reported in one line before the cluster refuses it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from echelon.base.errors import UsageError

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[MGTPE]|[KMGTPE]i)?", re.ASCII)
_IMAGE = re.compile(r"[A-Za-z0-9][\w./:@-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
#: Longest job name: pods and StatefulSets append to it, and a host name has at most 63 characters.
LONGEST = 45


def check_name(option: str, name: str) -> None:
    """Raise unless the name fits a job and its Service, whose name must begin with a letter."""
    if not _LABEL.fullmatch(name) or not name[0].isalpha() or len(name) > LONGEST:
        raise UsageError(
            f"{option} {name!r} is not a valid job name; use small letters, digits and dashes, a letter first, "
            f"{LONGEST} characters at most"
        )


def check_object(what: str, name: str) -> None:
    if not all(_LABEL.fullmatch(part) for part in name.split(".")) or len(name) > 253:
        raise UsageError(f"{what} is {name!r}, which Kubernetes does not allow; use small letters, digits and dashes")


def check_image(image: str) -> None:
    if not _IMAGE.fullmatch(image):
        raise UsageError(f"--image {image!r} is not the name of an image, such as registry.example/team/train:1.2")


def check_text(texts: Iterable[str]) -> None:
    """Raise for arguments that are not UTF-8: they contain lone surrogates, which JSON and Kubernetes cannot hold."""
    for word in texts:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"the argument {word!a} is not UTF-8 text, and Kubernetes takes no other; change it"
            ) from None


def check_quantity(option: str, text: str) -> None:
    if not _QUANTITY.fullmatch(text):
        raise UsageError(f"{option} {text!r} is not a Kubernetes quantity; write 8, 500m, 64Gi")


def split_variable(text: str, env: Mapping[str, str]) -> tuple[str, str]:
    """Return name and value of ``NAME=VALUE``, or of ``NAME`` with its value in ``env``."""
    name, given, value = text.partition("=")
    if not _VARIABLE.fullmatch(name):
        raise UsageError(f"--env {text!r} is not NAME=VALUE, with a name of letters, digits and underscores")
    if not given and name not in env:
        raise UsageError(f"--env {name} is not set here; set it, or give --env {name}=VALUE")
    return name, value if given else env[name]


def split_volume(text: str) -> tuple[str, str]:
    """Split ``CLAIM:/path`` into a persistent volume claim and its path in pods."""
    claim, _, path = text.partition(":")
    if not path.startswith("/") or ":" in path or not path.isprintable():
        raise UsageError(f"--volume {text!r} is not CLAIM:/path, such as data:/data")
    check_object("the claim of --volume", claim)
    return claim, path
