"""Looking at a cache on disk from outside, also while it is in use: takes no lock and changes nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lmcache_backends.disk.faults import ODD, failed
from lmcache_backends.disk.files import open_file
from lmcache_backends.disk.locks import Locked, is_locked, lock_text, locked_files
from lmcache_backends.disk.manifests import read_manifests
from lmcache_backends.disk.replay import Replay, replay_log
from lmcache_backends.disk.shard import LOCK, LOG, is_readable, seed_of, segment_path, segment_sizes, shard_names
from lmcache_core.protocols import Stored

__all__ = ["Inspected", "InspectedEntry", "InspectedShard", "inspect_path"]

_LOOKS = 3


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
    readable: bool = True
    """Whether this version understands its log, and its files are what they should be; if not, nothing is known of
    what lies in it."""


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
        held = locked_files()
        shards = []
        for name in shard_names(root):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                shards.append(_inspect_shard(os.path.join(root, name), held))
        return Inspected(tuple(shards), read_manifests(root))
    except OSError as error:
        raise failed(error, root, looking=True) from error


def _inspect_shard(path: str, held: Locked | None) -> InspectedShard:
    owner, locked, readable = "", None, True
    try:
        with contextlib.suppress(FileNotFoundError):
            owner = lock_text(os.path.join(path, LOCK))
            locked = None if held is None else is_locked(os.path.join(path, LOCK), held)
        readable = is_readable(path)
    except OSError as error:
        if error.errno not in ODD:
            raise
        readable = False
    if readable:
        sizes, replay, damaged = _replayed(path)
    else:
        sizes, replay, damaged = segment_sizes(path), Replay({}), 0
    entries = tuple(
        InspectedEntry(entry.stored(), entry.epoch / 1e6, Path(segment_path(path, entry.segment)), entry.offset)
        for entry in sorted(replay.by_key.values(), key=lambda entry: entry.epoch)
    )
    nbytes, name = sum(sizes.values()), os.path.basename(path)
    return InspectedShard(name, owner, locked, nbytes, damaged, replay.lost, entries, readable)


def _replayed(path: str) -> tuple[dict[int, int], Replay, int]:
    """Sizes of the segments, what the log says, and how often it is damaged. While a segment is being taken or given
    back, chunks in it seem to be lost; it is looked again then."""
    for _ in range(_LOOKS):
        sizes = segment_sizes(path)
        try:
            fd = open_file(os.path.join(path, LOG), os.O_RDONLY)
        except FileNotFoundError:  # its owner is just making it, or removing it
            return sizes, Replay(sizes), 0
        try:
            replay, reader = replay_log(fd, seed_of(path), sizes)
        finally:
            os.close(fd)
        if not replay.lost or segment_sizes(path) == sizes:
            break
    return sizes, replay, reader.gaps + replay.odd
