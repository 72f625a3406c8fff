"""How much memory this process can take: what the machine has free, and what its cgroups, of both versions, allow.

A limit holds for a group and all groups below it, so that the lowest one of a process's group and its parents counts.
Pages of files that nobody uses just now count as free, as the machine itself counts them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")


class _Names(NamedTuple):
    """Files of a version of cgroups."""

    limit: str
    used: str
    idle: str
    """In `memory.stat`: file pages that can be taken back at once, of all groups below too."""


_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Names("memory.max", "memory.current", "inactive_file")


def available_memory(root: Path = ROOT) -> int | None:
    """Bytes that can be taken without swapping; None when the system doesn't tell. `root` is where `/proc` and `/sys`
    are."""
    values = [*_machine(root), *_cgroups(root)]
    return min(values) if values else None


def _machine(root: Path) -> Iterator[int]:
    kibibytes = _value(root / "proc/meminfo", "MemAvailable:")
    if kibibytes is not None:
        yield kibibytes * 1024


def _cgroups(root: Path) -> Iterator[int]:
    """What each group that this process is in still allows."""
    groups = list(_groups(root))
    for names, top, mount in _mounts(root):
        for version, group in groups:
            if version is names:
                for directory in _upwards(mount, top, group):
                    yield from _left(directory, names)


def _mounts(root: Path) -> Iterator[tuple[_Names, str, Path]]:
    """Where groups can be seen: the version, the group at the top of what is mounted, and the place."""
    for line in _lines(root / "proc/self/mountinfo"):
        head, _, tail = line.partition(" - ")
        where, what = head.split()[3:5], tail.split()
        if len(where) < 2 or len(what) < 3:
            continue
        top, place = map(_unescaped, where)
        if what[0] == "cgroup2":
            yield _VERSION_2, top, root / place.lstrip("/")
        elif what[0] == "cgroup" and "memory" in what[2].split(","):
            yield _VERSION_1, top, root / place.lstrip("/")


def _groups(root: Path) -> Iterator[tuple[_Names, str]]:
    """The groups of this process that may limit its memory."""
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            yield _VERSION_2, group
        elif "memory" in controllers.split(","):
            yield _VERSION_1, group


def _upwards(mount: Path, top: str, group: str) -> Iterator[Path]:
    """The directory of a group and those of its parents, as far as they are mounted. Of a container's group often no
    more is there than the group itself, as the top of the mount."""
    try:
        inner = PurePosixPath(group).relative_to(top)
    except ValueError:
        inner = PurePosixPath()
    if ".." in inner.parts:  # outside of what this process may see
        inner = PurePosixPath()
    for each in (inner, *inner.parents):
        yield mount / each


def _left(directory: Path, names: _Names) -> Iterator[int]:
    try:
        limit, used = (int((directory / name).read_text("ascii")) for name in (names.limit, names.used))
    except (OSError, ValueError):
        return  # the top has no limit, nor has a group whose limit is "max"
    if limit >= 0:
        idle = _value(directory / "memory.stat", names.idle) or 0
        yield max(0, limit - max(0, used - idle))


def _value(path: Path, name: str) -> int | None:
    """The number behind a name that begins a line; None if there is none."""
    for line in _lines(path):
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def _lines(path: Path) -> list[str]:
    try:
        return os.fsdecode(path.read_bytes()).splitlines()
    except OSError:
        return []


def _unescaped(word: str) -> str:
    """A path of mountinfo: spaces and the like are octal there."""
    for code in (" ", "\t", "\n", "\\"):
        word = word.replace(f"\\{ord(code):03o}", code)
    return word
