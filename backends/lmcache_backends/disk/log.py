"""The log of one shard: appending records, and rewriting it without what is out of date.

The file is longer than its content: zeros are allocated ahead, so that chunks can still be evicted when the file
system is full. Everything raises `OSError`.

A log whose fsync failed is not synced again: the kernel reports pages that it could not write once, and takes them for
written from then on. Until a rewrite has put all of it into a new file, nothing in it counts as durable.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterable

from lmcache_backends.disk.files import close_quietly, lengthen, open_file, sync_directory
from lmcache_backends.disk.records import HEAD

__all__ = ["NEW", "Log", "Rewrite"]

NEW = ".new"
"""Suffix of a log that is not in use yet."""

_STEP = 256 << 10
_RESERVE = 32 << 10
"""Bytes that only `append(..., reserve=True)` may use."""
_FLOOR = 256 << 10
"""Bytes below which a log is not worth rewriting."""


class Log:
    """An open log. `append` and `replace` are under the owner's lock; `sync` is not."""

    def __init__(self, path: str, seed: int) -> None:
        """Open or create the file. Read it before anything is appended."""
        self.path = path
        self._fd = open_file(path, os.O_RDWR | os.O_CREAT)
        status = os.fstat(self._fd)
        self._identity = (status.st_dev, status.st_ino)
        self._allocated = status.st_size
        self.seed = seed
        self.end = 0
        """Offset of the next record."""
        self.damaged = False
        """Some of what is in it is no record, or speaks of what is gone."""
        self.failed = False
        """The drive may lack some of it, nobody knows which."""
        self._appended = 0  # bytes in all, never set back: what a call to sync waits for
        self._synced = 0
        self.sync_lock = threading.Lock()
        """Held while it is made durable or replaced; taken before the owner's lock."""
        self._rewrite_at = _FLOOR

    @property
    def fd(self) -> int:
        """To read it with."""
        return self._fd

    def resume(self, end: int, torn: bool) -> None:
        """Go on behind the last good record, `end`. What follows is zeros; it is cut off if it is `torn`, or
        more than we put there."""
        self.end = end
        if torn or self._allocated > end + 2 * _STEP:  # more than we lengthen it by: a hole, no room of its own
            os.ftruncate(self._fd, end)
            self._allocated = end
        with contextlib.suppress(OSError):  # it is tried again by each append
            self._reserve()

    def append(self, record: bytes, reserve: bool = False) -> int:
        """Write a record, or several, and return what to give to `sync`. Nothing counts as written when it fails.
        `reserve` is for records that make room, so that they work on a full file system."""
        if not self.end:
            record = HEAD + record
        end = self.end + len(record)
        try:
            self._reserve(len(record))
        except OSError:
            if not reserve:
                raise
        write_all(self._fd, record, self.end)
        self.end = end
        self._appended += len(record)
        return self._appended

    def sync(self, ticket: int) -> None:
        """Wait until the drive has all up to the `append` that returned `ticket`. One wait serves many. When it has
        failed it fails until the log is rewritten."""
        with self.sync_lock:
            if self._synced >= ticket:
                return
            if self.failed:
                raise OSError(errno.EIO, "could not be made durable", self.path)
            upto = self._appended
            try:
                os.fdatasync(self._fd)
            except OSError:
                self.failed = True
                raise
            self._synced = upto

    def check(self) -> None:
        """Fail with ENOENT if a restart would not find this file: removed, moved, or hidden by a mount."""
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            raise OSError(errno.ENOENT, "was removed while in use", self.path) from None
        if (status.st_dev, status.st_ino) != self._identity:
            raise OSError(errno.ENOENT, "was replaced while in use", self.path)

    def due(self, live: int) -> bool:
        """Is it time to rewrite it, if `live` bytes of it are not out of date?"""
        return self.damaged or self.failed or self.end > max(self._rewrite_at, 2 * live)

    def _reserve(self, nbytes: int = 0) -> None:
        """Have zeros ahead, behind `nbytes` more."""
        needed = self.end + nbytes + _RESERVE
        if needed > self._allocated:
            self._allocated = allocate(self._fd, self._allocated, needed)

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        close_quietly(fd)


class Rewrite:
    """A new log in the making: `fill` it with what is live, without the owner's lock, then `swap` under it. A crash
    at any point leaves the old log or the new one, whole. A failure before the end of `swap` leaves the old one in
    use; `abandon` then removes what was made."""

    def __init__(self, log: Log) -> None:
        """Under the owner's lock: `fill` must be given what the log says now."""
        self._log = log
        self._from = max(log.end, len(HEAD))
        self._upto = 0
        self._path = log.path + NEW
        self._fd = -1
        self._swapped = False
        self._end = 0
        self._allocated = 0

    def fill(self, live: Iterable[bytes]) -> None:
        """Write `live`, the records to keep, and wait until the drive has them."""
        self._fd = open_file(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        pending, size = [HEAD], len(HEAD)
        for record in live:
            pending.append(record)
            size += len(record)
            if size > _STEP:
                self._write(b"".join(pending))
                pending, size = [], 0
        self._write(b"".join(pending))
        os.fsync(self._fd)

    def swap(self, durable: bool) -> None:
        """Add what was appended meanwhile, and put the new log in the old one's place. Under the owner's lock, and
        `sync_lock` of the log."""
        log = self._log
        at = self._from
        while at < log.end:
            moved = os.pread(log._fd, min(_STEP, log.end - at), at)
            if not moved:
                raise OSError(errno.EIO, "is shorter than what was written to it", log.path)
            self._write(moved)
            at += len(moved)
        self._reserve()
        if durable:
            os.fdatasync(self._fd)
        self._upto = log._appended
        status = os.fstat(self._fd)
        os.rename(self._path, log.path)
        self._swapped = True
        log.failed = durable  # until its name is durable as well
        old, log._fd = log._fd, self._fd
        log.end, log._allocated = self._end, self._allocated
        log._identity = (status.st_dev, status.st_ino)
        log._rewrite_at = _FLOOR
        log.damaged = False
        close_quietly(old)

    def settle(self) -> None:
        """Wait until the drive knows the new log by its name. Under `sync_lock` still."""
        sync_directory(os.path.dirname(self._path))
        self._log._synced = self._upto
        self._log.failed = False

    def abandon(self) -> None:
        """Remove the new log if it is not in use, and leave the old one alone until it has grown further."""
        log = self._log
        if self._swapped:
            return
        log._rewrite_at = log.end + log.end // 2
        log.damaged = False
        close_quietly(self._fd)
        self._fd = -1
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _write(self, data: bytes) -> None:
        write_all(self._fd, data, self._end)
        self._end += len(data)

    def _reserve(self) -> None:
        """The new log has zeros ahead as well: rather no new log than none that an eviction finds full."""
        self._allocated = allocate(self._fd, self._end, self._end + _RESERVE)


def allocate(fd: int, size: int, needed: int) -> int:
    """Lengthen a file of `size` bytes to `needed` or somewhat more, and return its new size."""
    target = -(-needed // _STEP) * _STEP
    lengthen(fd, size, target)
    return target


def write_all(fd: int, data: bytes, offset: int) -> None:
    """Write `data` at `offset`, in as many calls as it takes."""
    view = memoryview(data)
    while view:
        moved = os.pwrite(fd, view, offset)
        offset += moved
        view = view[moved:]
