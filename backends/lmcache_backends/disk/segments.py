"""Segments: files of fixed size in which values lie, and moving bytes between them and memory.

Bytes go with `O_DIRECT` in a few large calls per value where the file system and the buffer allow it. What the kernel
refuses (EINVAL: tmpfs of old kernels, some FUSE, a buffer that is not aligned) goes through the page cache and is
counted.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Literal

from lmcache_backends.disk.files import close_quietly, lengthen, open_file, sync_directory
from lmcache_backends.disk.options import UNIT
from lmcache_core.extents import ExtentAllocator

__all__ = ["Segment"]

Direct = Literal["auto", "always", "never"]
_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
"""What `O_DIRECT` is answered with where it is not possible."""
_LARGEST_CALL = 8 << 20
"""ext4 lets nobody else write to a file during a write that crosses from one of its extents to the next, so the shorter
of two calls holds the others up for less; much shorter ones cost more than that."""


class Segment:
    """An open segment file. Reading and writing may go on in several threads at once; the rest is under the owner's
    lock. Everything raises `OSError`."""

    __slots__ = (
        "_buffered",
        "_direct",
        "_failures",
        "count_fallback",
        "extents",
        "ident",
        "lost",
        "mode",
        "path",
        "size",
    )

    def __init__(self, path: str, ident: int, mode: Direct, count_fallback: Callable[[], None]) -> None:
        """Open an existing file."""
        self.path = path
        self.ident = ident
        self.mode = mode
        self.count_fallback = count_fallback
        self.lost = False
        """Nothing new may be put into it."""
        self._failures = 0
        self._buffered = open_file(path, os.O_RDWR)
        self._direct = -1
        try:
            self.size = os.fstat(self._buffered).st_size // UNIT * UNIT
            if mode != "never":
                self._direct = _open_direct(path, mode)
        except BaseException:  # whatever it was, the descriptor must not stay open
            os.close(self._buffered)
            raise
        self.extents = ExtentAllocator(self.size, UNIT)

    @classmethod
    def reserve(cls, path: str, ident: int, size: int, mode: Direct, count_fallback: Callable[[], None]) -> Segment:
        """Make the file, `size` bytes long, so that other owners count them. Nothing is left of it when that fails."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, size)
            return cls(path, ident, mode, count_fallback)
        except BaseException:  # whatever it was, a segment nobody knows must not stay
            os.unlink(path)
            raise
        finally:
            os.close(fd)

    def fill(self, durable: bool) -> None:
        """Give a reserved file room of its own, or remove it: until then what it claims may not be there."""
        try:
            lengthen(self._buffered, 0, self.size)
            if durable:
                os.fsync(self._buffered)
                sync_directory(os.path.dirname(self.path))
        except BaseException:  # as above
            self.close()
            os.unlink(self.path)
            raise

    @property
    def unused(self) -> bool:
        """No place in it is taken."""
        return self.extents.free_bytes == self.extents.capacity

    def read(self, offset: int, into: memoryview) -> bool:
        """Fill `into` from `offset` on; False if the file ends before."""
        return self._move(_preadv, offset, into) == into.nbytes

    def write(self, offset: int, data: memoryview, durable: bool = False) -> None:
        """Write `data` at `offset`; wait until the drive has it if it shall be `durable`."""
        failures = self._failures
        if self._move(_pwritev, offset, data) < data.nbytes:
            raise OSError(errno.EIO, "wrote less than it was asked to", self.path)
        if durable:
            try:
                os.fdatasync(self._buffered)
            except OSError:
                self._failures += 1
                raise
            if failures != self._failures:  # the kernel reports a page that it could not write to one thread only
                raise OSError(errno.EIO, "could not be made durable", self.path)

    def check(self) -> None:
        """Fail with ENOENT if the file has been removed: what is written to it would be lost."""
        if not os.fstat(self._buffered).st_nlink:
            self.lost = True
            raise OSError(errno.ENOENT, "was removed while in use", self.path)

    def close(self) -> None:
        """Idempotent."""
        close_quietly(self._direct)
        close_quietly(self._buffered)
        self._direct = self._buffered = -1

    def _move(self, call: Callable[[int, memoryview, int], int], offset: int, view: memoryview) -> int:
        """Bytes moved, fewer than asked for only at the end of the file."""
        view = view.cast("B")
        done = 0
        if self._direct >= 0:
            done = _moved(call, self._direct, offset, view)
            if done == view.nbytes:
                return done
        if self.mode == "always":
            raise OSError(errno.EINVAL, "O_DIRECT is not possible", self.path)
        if self.mode == "auto":
            self.count_fallback()
        return done + _moved(call, self._buffered, offset + done, view[done:])


def _open_direct(path: str, mode: Direct) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if mode == "always" or error.errno not in _REFUSED:
            raise
        return -1


def _preadv(fd: int, view: memoryview, offset: int) -> int:
    return os.preadv(fd, [view], offset)


def _pwritev(fd: int, view: memoryview, offset: int) -> int:
    return os.pwritev(fd, [view], offset)


def _moved(call: Callable[[int, memoryview, int], int], fd: int, offset: int, view: memoryview) -> int:
    """Bytes moved until all are, the file ends, or the kernel refuses this way of moving them."""
    done = 0
    while done < view.nbytes:
        try:
            moved = call(fd, view[done : done + _LARGEST_CALL], offset + done)
        except OSError as error:
            if error.errno in _REFUSED:
                break
            raise
        if moved <= 0:
            break
        done += moved
    return done
