"""Removing what was used longest ago, by all hosts together. Blocks, in steps that are short.

Keys are hashes, so each part of them holds about the same share of all bytes: a part is swept by itself, down to its
share of the capacity, and nobody needs to know the whole. Whoever sweeps a part removes its oldest chunks first. Two at
once remove the same ones: what is gone already counts for both.

The time of last use of a chunk is the time of its file. It is compared with the file system's own clock, not this
host's; what is from the future was touched by a host whose clock is wrong, and goes last.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import stat
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from lmcache_backends.nfs.directory import names_below
from lmcache_backends.nfs.errors import NAMES_GONE, NOT_PERMITTED, failed
from lmcache_backends.nfs.leases import Lease, Leases
from lmcache_backends.nfs.naming import MANIFESTS, SWEEPS, is_chunk, is_shard, is_space, is_temporary
from lmcache_backends.nfs.tally import Tally

__all__ = ["Rules", "Sweeper", "parts_of"]

_log = logging.getLogger(__name__)

BATCH = 256
"""Files that are looked at or removed in one step."""
KEEP = 0.9
"""Part of the capacity that is left when more than all of it is used."""
GRACE = 60.0
"""Seconds for which nothing that was written or used is removed."""
UNFINISHED = 3600.0
"""Seconds after which something that was never finished is what a crash left."""
_LEAST_SHARE = 16 << 30
"""Bytes of capacity that make a part of their own worth it."""
_DIGITS = "0123456789abcdef"


@dataclass(frozen=True, slots=True)
class Rules:
    """What is removed when."""

    capacity: int | None
    ttl: float | None
    interval: float
    """Seconds between two sweeps of a part, whoever sweeps it."""


class _File(NamedTuple):
    """A chunk, in the order in which chunks go."""

    used: float
    directory: str
    name: str
    nbytes: int


def parts_of(capacity: int | None) -> list[str]:
    """What is swept at a time: all chunks, or those whose page begins with these digits."""
    digits = 0
    while capacity is not None and digits < 3 and capacity // 16 ** (digits + 1) >= _LEAST_SHARE:
        digits += 1
    parts = [""]
    for _ in range(digits):
        parts = [part + digit for part in parts for digit in _DIGITS]
    return parts


class Sweeper:
    """Sweeps below an open directory, for as long as `rounds` is iterated."""

    def __init__(self, root: int, path: str, rules: Rules, leases: Leases, tally: Tally, name: str = "nfs") -> None:
        self._root = root
        self._name = name
        self._path = path
        self._rules = rules
        self._leases = leases
        self._tally = tally
        self._parts = parts_of(rules.capacity)
        self._told = False
        self.abandoned = False
        """Set when the directory is not open any more: what is left of a round must not use it."""

    def round(self, soonest: float) -> Generator[None, None, None]:
        """Sweep each part that nobody has swept for `soonest` seconds and nobody else is at. Each step is short."""
        try:
            if os.fstatvfs(self._root).f_flag & os.ST_RDONLY:
                return
        except OSError as error:
            self._failed(error)
            return
        parts = list(self._parts)
        random.shuffle(parts)  # hosts that start together shall not be at the same ones
        for part in parts:
            try:
                yield from self._try(part, soonest)
                self._told = False
            except OSError as error:
                self._failed(error)
            yield

    def _failed(self, error: OSError) -> None:
        if error.errno in NAMES_GONE:
            return  # another host was at the same lease, and this one sees it late; the part's turn comes again
        if error.errno in NOT_PERMITTED and self._rules.capacity is None and self._rules.ttl is None:
            return  # whoever only reads need not clear up
        self._tally.add("sweeps_failed")
        if not self._told:
            self._told = True
            _log.warning("%s; nothing is removed there until then", failed(error, self._path, name=self._name))

    def _try(self, part: str, soonest: float) -> Generator[None, None, None]:
        label = part or "all"
        last = self._leases.last_sweep(label)
        lease = self._leases.take(label)
        if lease is None:
            return
        try:
            now = lease.now()
            if last is not None and 0 <= now - last < soonest:
                return
            if (yield from self._sweep(part, lease, now)):
                self._leases.swept(label)
                self._tally.add("sweeps")
        finally:
            if not self.abandoned:
                with contextlib.suppress(OSError):  # then it is taken for dead
                    lease.release()

    def _sweep(self, part: str, lease: Lease, now: float) -> Generator[None, None, bool]:
        """Returns whether the end was reached."""
        files: list[_File] = []
        total = 0
        for directory, names in self._listed(part, now):
            for found in self._look(directory, names, now):
                if self._is_expired(found, now):
                    self._remove(found)
                else:
                    total += found.nbytes
                    if self._rules.capacity is not None:
                        files.append(found)
            yield
            if not lease.hold():
                return False
        return (yield from self._make_room(files, total, lease, now))

    def _is_expired(self, found: _File, now: float) -> bool:
        return self._rules.ttl is not None and now - found.used > max(self._rules.ttl, GRACE)

    def _make_room(self, files: list[_File], total: int, lease: Lease, now: float) -> Generator[None, None, bool]:
        share = (self._rules.capacity or 0) / len(self._parts)
        if self._rules.capacity is None or total <= share:
            return True
        files.sort()
        oldest = (found for found in files if abs(now - found.used) >= GRACE)
        while total > share * KEEP and (batch := list(islice(oldest, BATCH))):
            for found in batch:
                if total > share * KEEP and self._remove(found):
                    total -= found.nbytes
            yield
            if not lease.hold():
                return False
        return True

    def _remove(self, found: _File) -> bool:
        """Remove a chunk unless it was used or written since it was listed. Returns whether it is gone."""
        name = f"{found.directory}/{found.name}"
        try:
            if os.stat(name, dir_fd=self._root, follow_symlinks=False).st_mtime != found.used:
                return False
            os.unlink(name, dir_fd=self._root)
        except OSError as error:
            if error.errno not in NAMES_GONE:
                raise
            return True  # by another host
        self._tally.add("swept_chunks")
        self._tally.add("swept_bytes", found.nbytes)
        return True

    # Listing

    def _listed(self, part: str, now: float) -> Iterator[tuple[str, Sequence[str]]]:
        """Directories of a part, each with some of the names in it at a time. Removes those that stay empty."""
        for space in filter(is_space, self._names("")):
            for shard in sorted(self._names(space)):
                if is_shard(shard) and shard.startswith(part):
                    directory = f"{space}/{shard}"
                    names = self._names(directory)
                    if not names:
                        self._remove_empty(directory, now)
                    for start in range(0, max(1, len(names)), BATCH):
                        yield directory, names[start : start + BATCH]
            self._remove_empty(space, now)
        if part in ("", self._parts[0]):
            for directory in (MANIFESTS, SWEEPS):
                yield directory, self._names(directory)

    def _names(self, directory: str) -> list[str]:
        return names_below(self._root, directory)

    def _look(self, directory: str, names: Sequence[str], now: float) -> Iterator[_File]:
        """The chunks among `names`. Removes what a crash left half written; what is not ours is not touched."""
        shard = directory.rpartition("/")[2]
        for name in names:
            unfinished = is_temporary(name)
            if not unfinished and not is_chunk(name, shard):
                continue
            try:
                status = os.stat(f"{directory}/{name}", dir_fd=self._root, follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                if not unfinished:
                    yield _File(status.st_mtime, directory, name, status.st_size)
                elif now - status.st_mtime > UNFINISHED:
                    os.unlink(f"{directory}/{name}", dir_fd=self._root)
                    self._tally.add("temporaries_removed")
            except OSError as error:
                if error.errno not in NAMES_GONE:
                    raise

    def _remove_empty(self, directory: str, now: float) -> None:
        """Remove a directory in which nothing has lain for a while, such as those of a model that nobody runs now. Who
        wants to write there makes it again."""
        with contextlib.suppress(OSError):  # it is not empty
            if now - os.stat(directory, dir_fd=self._root).st_mtime > UNFINISHED:
                os.rmdir(directory, dir_fd=self._root)
