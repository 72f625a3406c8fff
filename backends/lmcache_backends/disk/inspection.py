"""Looking at a cache on disk from outside, also while it is in use: takes no lock and changes nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lmcache_backends.disk.faults import failed
from lmcache_backends.disk.locks import lock_text
from lmcache_backends.disk.manifests import read_manifests
from lmcache_backends.disk.replay import Replay, replay_log
from lmcache_backends.disk.shard import LOCK, LOG, seed_of, segment_path, segment_sizes, shard_names
from lmcache_core.protocols import Stored

__all__ = ["Inspected", "InspectedEntry", "InspectedShard", "inspect_path"]


class InspectedEntry(NamedTuple):
    """A chunk that is stored. In a cache in use it may be gone, and its place another chunk's, a moment later: read
    its frame, and look again whether the entry is still there."""

    stored: Stored
    used: float
    """When it was last stored or used: seconds since 1970."""
    file: Path
    offset: int
    """Where in `file` the `stored.nbytes` bytes of the value start."""


class InspectedShard(NamedTuple):
    """What one owner has, or had."""

    name: str
    owner: str
    """Process and opening that hold or held it, `<pid>-<random>`; empty if unknown."""
    locked: bool | None
    """Whether its owner is alive; None if this system does not tell."""
    nbytes: int
    """Bytes of the file system that it takes for values."""
    damaged: int
    """Damaged places in its log."""
    lost: int
    """Chunks whose values are gone."""
    entries: tuple[InspectedEntry, ...]
    """Least recently used first."""


class Inspected(NamedTuple):
    """A path of the cache at one moment."""

    shards: tuple[InspectedShard, ...]
    manifests: dict[bytes, bytes]
    """Descriptions by space, UTF-8 JSON."""

    def entries(self) -> Iterator[InspectedEntry]:
        """Of all shards."""
        for shard in self.shards:
            yield from shard.entries


def inspect_path(path: str | os.PathLike[str]) -> Inspected:
    """What lies below a path that is, or was, the `path` of a disk tier.

    Raises:
        BackendError: It cannot be read.
    """
    root = os.fspath(path)
    try:
        held = _locked_files()
        shards = []
        for name in shard_names(root):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                shards.append(_inspect_shard(os.path.join(root, name), held))
        return Inspected(tuple(shards), read_manifests(root))
    except OSError as error:
        raise failed(error, root) from error


def _inspect_shard(path: str, held: frozenset[int] | None) -> InspectedShard:
    sizes = segment_sizes(path)
    try:
        fd = os.open(os.path.join(path, LOG), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # its owner is just making it, or removing it
        replay, damaged = Replay(sizes), 0
    else:
        try:
            replay, reader = replay_log(fd, seed_of(path), sizes)
            damaged = reader.gaps
        finally:
            os.close(fd)
    entries = tuple(
        InspectedEntry(entry.stored(), entry.epoch / 1e6, Path(segment_path(path, entry.segment)), entry.offset)
        for entry in sorted(replay.by_key.values(), key=lambda entry: entry.epoch)
    )
    owner, locked = "", None
    with contextlib.suppress(FileNotFoundError):
        owner = lock_text(os.path.join(path, LOCK))
        if held is not None:
            locked = os.stat(os.path.join(path, LOCK)).st_ino in held
    return InspectedShard(os.path.basename(path), owner, locked, sum(sizes.values()), damaged, replay.lost, entries)


def _locked_files() -> frozenset[int] | None:
    """Inodes with an flock, as far as this system tells."""
    try:
        with open("/proc/locks", encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:
        return None
    return frozenset(int(words[5].rpartition(":")[2]) for words in lines if len(words) > 5 and words[1] == "FLOCK")
