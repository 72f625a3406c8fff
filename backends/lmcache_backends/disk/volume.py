"""One path of the cache: who may take how much of it, over all processes of the host that use it.

    <path>/node.lock      held by flock for the moments in which shards are claimed or segments reserved
          /<shard>/...    one or more for each process; see `shard`
          /manifests/     descriptions of spaces; see `manifests`

What is taken is what lies there: there is no account that a crash could falsify. A segment is made as long as it shall
be under the lock, and given its room without it: that may take a while. A process may be stopped with the lock held;
then others take nothing more, but go on with what they have. A shard nobody has locked was left by
a process that ended. Whoever opens the path next adopts it; who needs room before that removes it. One whose log has
another format than ours is not adopted: another version may come back for it, until its room is needed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
import threading
from typing import NamedTuple

from lmcache_backends.disk.faults import FULL, ODD
from lmcache_backends.disk.files import file_system
from lmcache_backends.disk.locks import WAIT, FileLock, lock_text
from lmcache_backends.disk.manifests import remove_temporary, write_manifest
from lmcache_backends.disk.options import UNIT, DiskOptions
from lmcache_backends.disk.replay import Entry, rounded
from lmcache_backends.disk.segments import Segment
from lmcache_backends.disk.shard import (
    LOCK,
    Shard,
    bytes_to_come,
    is_readable,
    remove_shard,
    segment_sizes,
    shard_names,
)
from lmcache_backends.disk.tally import Tally
from lmcache_core.config import InvalidSetting
from lmcache_core.units import format_size

__all__ = ["Place", "Volume"]

_log = logging.getLogger(__name__)

_NO_DISKS = frozenset(
    {"bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "mqueue", "proc", "pstore", "securityfs", "sysfs"}
    | {"tracefs"}
)
"""File systems that only show what the kernel has."""
PATIENCE = 2.0
"""Seconds that an I/O thread waits for the node's lock. The tier has few threads, and reads want them too."""


class _Others(NamedTuple):
    """The shards of a path that are not ours."""

    nbytes: int
    """Bytes taken by all of them."""
    to_come: int
    """Of these, bytes that the file system has not given them yet."""
    owners: int
    """How many owners are alive."""
    left: dict[str, int]
    """Path and bytes of the shards of those that are not."""


class Place(NamedTuple):
    """Where a value may be written."""

    shard: Shard
    segment: Segment
    offset: int


class Volume:
    """A path and the shards this owner holds there. Everything raises `OSError`; `open` also `ConfigError`."""

    def __init__(self, path: str, options: DiskOptions, owner: str, tally: Tally, lock: threading.Lock) -> None:
        """`lock` is the owner's: it guards what the shards have in memory."""
        self.path = path
        self._node = os.path.join(path, "node.lock")
        self._options = options
        self._owner = owner
        self._tally = tally
        self._lock = lock
        self._limit = options.share()
        self._segment = options.segment_size()
        self.shards: list[Shard] = []
        """New segments go to the first."""
        self.share = self._limit
        """Bytes this owner may take here now."""
        self.growing = threading.Lock()
        """Held around `grow`; taken before the owner's lock."""
        self._hung = False
        """Somebody did not let go of the node's lock in time."""
        self._told_of_others = False
        """It has been said that the file system is full, of whatever else lies there."""

    def open(self) -> list[tuple[Shard, dict[tuple[bytes, bytes], Entry]]]:
        """Adopt what others left, or start afresh. What lies in each shard, by key."""
        self._make()
        self._bound()
        unreadable: list[str] = []
        odd: list[str] = []
        with FileLock.wait(self._node, WAIT):
            self._tally.add("orphans_removed", remove_temporary(self.path))
            for name in shard_names(self.path):
                path = os.path.join(self.path, name)
                try:
                    lock = FileLock.attempt(os.path.join(path, LOCK))
                    if lock is not None and not self._claim(path, lock):
                        unreadable.append(name)
                except OSError as error:
                    if error.errno not in ODD:
                        raise
                    odd.append(f"{error.filename or path}: {error.strerror}")
            self._tally.add("shards_adopted", len(self.shards))
            if not self.shards:
                path = os.path.join(self.path, secrets.token_hex(8))
                os.mkdir(path, 0o700)
                lock = FileLock.attempt(os.path.join(path, LOCK))
                assert lock is not None, "nobody else knows this file yet"
                self._claim(path, lock)
        self._tally.add("shards_unreadable", len(unreadable) + len(odd))
        if odd:
            _log.warning(
                "disk: %s: shards are left alone, since files in them are not what they should be; remove them, or see "
                "to it that they can be used: %s",
                self.path,
                ", ".join(odd),
            )
        if unreadable:
            _log.warning(
                "disk: %s: another version of this software wrote %s; what is in them cannot be read, and is removed "
                "when its room is needed",
                self.path,
                ", ".join(unreadable),
            )
        loaded = [(shard, shard.load()) for shard in self.shards]
        with FileLock.wait(self._node, WAIT):
            self._drop_empty()
            self._share_with(self._others())
        return loaded

    def describe(self, space: bytes, manifest: bytes) -> None:
        """Keep a description."""
        with self._node_lock():
            write_manifest(self.path, space, manifest)

    def _make(self) -> None:
        """Make the directory, unless it is there. If it cannot even be looked at, say why not."""
        if (kind := file_system(self.path)) in _NO_DISKS:
            raise self._impossible(f"is on {kind}, which keeps no files; write a directory on a drive")
        try:
            os.makedirs(self.path, mode=0o700)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(self.path).st_mode):
                raise self._impossible("is no directory; write one, or remove what is there") from None
        except NotADirectoryError:
            raise self._impossible("leads through a file; write a directory, or remove that file") from None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise self._impossible("is too long for a file system; write a shorter one") from None
            raise

    def _bound(self) -> None:
        """No more than there is on the file system."""
        system = os.statvfs(self.path)
        total = system.f_blocks * system.f_frsize
        most = (total - self._options.keep_free(total)) // UNIT * UNIT
        self._limit, self._segment = self._options.share(), self._options.segment_size()
        if self._limit > most > 0:
            _log.warning(
                "disk: %s: the capacity is %s there, but the file system has %s besides min_free; that is what counts",
                self.path,
                format_size(self._limit),
                format_size(most),
            )
            self._limit = self.share = most
            self._segment = min(self._segment, self._options.segment_size(most))

    def _impossible(self, problem: str) -> InvalidSetting:
        return InvalidSetting(("path",), f"disk: path {self.path} {problem}")

    def close(self) -> None:
        """Let go of the shards. Idempotent."""
        for shard in self.shards:
            shard.close()

    @property
    def room(self) -> int:
        """Bytes this owner may still store here. Under the owner's lock."""
        return self.share - sum(shard.taken for shard in self.shards)

    def allocate(self, nbytes: int) -> Place | None:
        """A place in what is taken already. Under the owner's lock."""
        for shard in self.shards:
            if (found := shard.allocate(nbytes)) is not None:
                return Place(shard, *found)
        return None

    def refresh(self) -> None:
        """Find out anew how many share the capacity, unless another process is at it."""
        if (lock := FileLock.attempt(self._node)) is not None:
            with lock:
                self._share_with(self._others())

    def grow(self, nbytes: int) -> tuple[Shard, Segment] | None:
        """Make a segment with room for `nbytes`; None if the capacity, other owners or the file system leave no room
        for it. It is in use when the shard has been given it, under the owner's lock.

        That the node's lock was not to be had raises ETIMEDOUT once; until it is free again there is no room."""
        need = rounded(nbytes)
        most = max(self._segment, need)
        while most >= need:
            hung = self._hung
            try:
                segment = self._reserve(need, most)
            except TimeoutError:
                if hung:
                    return None
                raise
            if segment is None:
                return None
            try:
                segment.fill(self._options.fsync)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._tally.add("enospc")
                most = segment.size // 2
            else:
                return self.shards[0], segment
        return None

    def _reserve(self, need: int, most: int) -> Segment | None:
        """A segment of at most about `most` bytes that holds `need`, if there is room."""
        with self._node_lock():
            others = self._others()
            self._share_with(others)
            room = self._free(others)
            while room < need and others.left:
                path, size = others.left.popitem()
                remove_shard(path)
                self._tally.add("shards_evicted")
                others = others._replace(nbytes=others.nbytes - size)
                room = self._free(others)
            # As many values of this size as fit: the rest would be of use to nobody.
            size = max(0, min(most, room)) // need * need
            if not size:
                self._tell_of_others(need, others)
            return self.shards[0].reserve_segment(size) if size else None

    def _tell_of_others(self, need: int, others: _Others) -> None:
        """If only what else lies on the file system is in the way, say so, once."""
        with self._lock:
            mine = sum(shard.nbytes for shard in self.shards)
        room = min(self.share - mine, self._limit - others.nbytes - mine)
        if room >= need:
            self._tally.add("min_free_reached")
            if not self._told_of_others:
                self._told_of_others = True
                _log.warning(
                    "disk: %s: the file system is down to min_free, and %s of the capacity of %s are taken; "
                    "chunks replace each other from now on. Remove what else lies there, or lower capacity or min_free",
                    self.path,
                    format_size(mine),
                    format_size(self.share),
                )

    def give_back(self) -> None:
        """Remove segments that nothing lies in. One stays, unless others wait for it or nothing is stored at all."""
        with self._lock:
            empty = not any(shard.entries for shard in self.shards)
            keep = 0 if empty or sum(shard.nbytes for shard in self.shards) > self.share else 1
            unused = [(shard, segment) for shard in self.shards for segment in shard.unused_segments()][keep:]
            for _, segment in unused:
                segment.lost = True
        for shard, segment in unused:
            with contextlib.suppress(OSError):  # the next opening removes it
                os.unlink(segment.path)
            with self._lock:  # only now others may take as much
                shard.drop_segment(segment)
        self._tally.add("segments_given_back", len(unused))

    def _free(self, others: _Others) -> int:
        """Bytes that may be taken now."""
        with self._lock:
            mine = sum(shard.nbytes for shard in self.shards)
        system = os.statvfs(self.path)
        free = system.f_bavail * system.f_frsize - self._options.keep_free(system.f_blocks * system.f_frsize)
        free -= others.to_come
        return min(self.share - mine, self._limit - others.nbytes - mine, free) // UNIT * UNIT

    def _share_with(self, others: _Others) -> None:
        self.share = self._limit // (1 + others.owners) // UNIT * UNIT

    def _others(self) -> _Others:
        """Under the node's lock."""
        mine = {shard.path for shard in self.shards}
        nbytes, to_come, owners, left = 0, 0, set(), {}
        for name in shard_names(self.path):
            path = os.path.join(self.path, name)
            if path in mine:
                continue
            try:
                size = sum(segment_sizes(path).values())
                nbytes += size
                to_come += bytes_to_come(path)
                lock = FileLock.attempt(os.path.join(path, LOCK))
                if lock is None:
                    owners.add(lock_text(os.path.join(path, LOCK)) or name)
                    continue
            except OSError as error:
                if error.errno not in ODD:
                    raise
                continue  # nobody can tell whether it is anybody's
            lock.release()
            if size:
                left[path] = size
        return _Others(nbytes, to_come, len(owners), left)

    def _drop_empty(self) -> None:
        """Keep one shard, and those in which something lies; the fullest first. Under the node's lock."""
        self.shards.sort(key=lambda shard: -len(shard.entries))
        while len(self.shards) > 1 and not self.shards[-1].entries:
            empty = self.shards.pop()
            remove_shard(empty.path)
            empty.close()

    def _node_lock(self) -> FileLock:
        """Whoever has waited for it in vain waits no more until it is free again."""
        try:
            lock = FileLock.wait(self._node, 0.0 if self._hung else PATIENCE)
        except TimeoutError:
            self._hung = True
            raise
        self._hung = False
        return lock

    def _claim(self, path: str, lock: FileLock) -> bool:
        """Own the shard at `path` and its lock, unless its log is none that can be read."""
        try:
            readable = is_readable(path)
        except BaseException:  # whatever it was, the shard must not stay locked
            lock.release()
            raise
        if not readable:
            lock.release()
            return False
        self.shards.append(Shard(path, lock, self._options.direct, self._tally))
        with contextlib.suppress(OSError):  # a full disk can still be read
            lock.label(self._owner)
        return True
