"""What a backend needs beside its distribution, by that distribution's metadata: the extra with the backend's name.

Nothing is imported. What cannot be told for certain counts as there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from importlib.metadata import Distribution, PackageNotFoundError

__all__ = ["extra_of", "lacking"]

_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)[^;]*;[\s(]*extra\s*==\s*['\"]([^'\"]+)['\"][\s)]*")
"""Whether other markers hold is not worked out."""
_BUILD = re.compile(r"-(?:cu\d+|non-cuda)$")
"""Ends the names of several builds of one package, of which each will do."""


def extra_of(distribution: Distribution | None, backend: str) -> str:
    """The extra with what a backend needs, as pip takes it: `lmcache-core[redis]`. Empty if it has none."""
    if distribution is None:
        return ""
    extras = distribution.metadata.get_all("Provides-Extra") or ()
    there = _plain(backend) in map(_plain, extras)
    return f"{distribution.name}[{backend}]" if there else ""


def lacking(distribution: Distribution | None, backend: str) -> tuple[str, ...]:
    """Packages that the extra of a backend asks for and that are not installed."""
    if distribution is None:
        return ()
    found = filter(None, map(_REQUIREMENT.fullmatch, distribution.requires or ()))
    wanted = [match[1] for match in found if _plain(match[2]) == _plain(backend)]
    return tuple(name for name in wanted if not _is_there(name))


def _is_there(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except PackageNotFoundError:
        return _is_there_otherwise(_BUILD.sub("", _plain(name)), built=_BUILD.search(_plain(name)) is not None)
    return True


def _is_there_otherwise(package: str, *, built: bool) -> bool:
    """In another build, or without metadata."""
    if built:
        installed = (each.name or "" for each in importlib.metadata.distributions())
        if any(_BUILD.sub("", _plain(each)) == package for each in installed):
            return True
    try:
        return importlib.util.find_spec(package.replace("-", "_")) is not None
    except (ImportError, ValueError):  # half imported, by somebody who makes modules of his own
        return True


def _plain(name: str) -> str:
    """A name as it is compared: PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()
