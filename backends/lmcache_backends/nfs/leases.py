"""Who sweeps what: files that say so, for hosts whose clocks need not agree. Blocks, and raises `OSError`.

A lease is a file that only one can make. Its holder renews it. Whoever wants it and finds it unchanged for as long as
`DEAD`, by a clock of its own, takes it for that of a process that has died. Two may do so at the same time, or a holder
that was stopped may go on: the order in which chunks are removed is the same for all, so that costs work and no chunk.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import NamedTuple

from lmcache_backends.nfs.directory import FILE_MODE, make_below
from lmcache_backends.nfs.naming import SWEEPS
from lmcache_backends.nfs.tally import Tally

__all__ = ["DEAD", "Lease", "Leases"]

RENEW = 15.0
DEAD = 150.0
"""Seconds; more than `RENEW` and the time (a minute) for which an NFS client may believe what it knows of a file."""
_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LONGEST = 1 << 10


class _Seen(NamedTuple):
    holder: bytes
    changed: int
    since: float


class Leases:
    """The leases and times of sweeps below an open directory, for one that wants to sweep."""

    def __init__(self, root: int, holder: str, tally: Tally) -> None:
        self._root = root
        self._holder = holder.encode()
        self._tally = tally
        self._seen: dict[str, _Seen] = {}

    def take(self, part: str) -> Lease | None:
        """The lease of a part, unless another one has it."""
        name = f"{SWEEPS}/{part}.lease"
        make_below(self._root, SWEEPS)
        lease = self._make(name)
        if lease is None and self._is_dead(part, name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._root)
            lease = self._make(name)
            if lease is not None:
                self._tally.add("leases_taken_over")
        if lease is not None:
            self._seen.pop(part, None)
        return lease

    def _make(self, name: str) -> Lease | None:
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, FILE_MODE, dir_fd=self._root)
        except FileExistsError:
            return None
        try:
            os.write(fd, self._holder)
        finally:
            os.close(fd)
        return Lease(self._root, name, self._holder)

    def _is_dead(self, part: str, name: str) -> bool:
        try:
            fd = os.open(name, os.O_RDONLY | _SAFE, dir_fd=self._root)
        except FileNotFoundError:
            return False  # just given up: at the next round
        try:
            found = (os.read(fd, _LONGEST), os.fstat(fd).st_mtime_ns)
        finally:
            os.close(fd)
        seen = self._seen.get(part)
        if seen is None or seen[:2] != found:
            self._seen[part] = _Seen(*found, time.monotonic())
            return False
        return time.monotonic() - seen.since >= DEAD

    def last_sweep(self, part: str) -> float | None:
        """When somebody last swept a part to its end, by the file system's clock; None if nobody has."""
        try:
            return os.stat(f"{SWEEPS}/{part}.done", dir_fd=self._root).st_mtime
        except FileNotFoundError:
            return None

    def swept(self, part: str) -> None:
        """Say that a part has been swept to its end."""
        os.close(os.open(f"{SWEEPS}/{part}.done", os.O_WRONLY | os.O_CREAT | _SAFE, FILE_MODE, dir_fd=self._root))
        os.utime(f"{SWEEPS}/{part}.done", dir_fd=self._root)


class Lease:
    """A part is this process's to sweep."""

    def __init__(self, root: int, name: str, holder: bytes) -> None:
        self._root = root
        self._name = name
        self._holder = holder
        self._renewed = time.monotonic()

    def now(self) -> float:
        """The time by the clock that the file system gives files: the server's own, or where there is none this host's.
        Renews the lease."""
        os.utime(self._name, dir_fd=self._root)
        self._renewed = time.monotonic()
        return os.stat(self._name, dir_fd=self._root).st_mtime

    def hold(self) -> bool:
        """Renew it if it is time. False if another one has it now."""
        if time.monotonic() - self._renewed < RENEW:
            return True
        if not self._is_ours():
            return False
        self.now()
        return True

    def release(self) -> None:
        """Let others have it."""
        with contextlib.suppress(FileNotFoundError):
            if self._is_ours():
                os.unlink(self._name, dir_fd=self._root)

    def _is_ours(self) -> bool:
        try:
            fd = os.open(self._name, os.O_RDONLY | _SAFE, dir_fd=self._root)
        except FileNotFoundError:
            return False
        try:
            return os.read(fd, _LONGEST) == self._holder
        finally:
            os.close(fd)
