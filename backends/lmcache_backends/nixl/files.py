"""Chunks as files: written beside their place and renamed to it, read from one descriptor. Blocks.

A rename swaps the file behind a name and leaves the old one to those who have it open: a reader gets one value, the old
or the new one, and of many writers the last one's stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from uuid import uuid4

from lmcache_backends.nixl.mover import Mover
from lmcache_backends.nixl.tally import Tally
from lmcache_core.errors import BackendError
from lmcache_core.names import object_name
from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, WriteResult

__all__ = ["Files"]

_UNFINISHED = "unfinished"
_FORGOTTEN = 3600.0
"""Seconds after which what is unfinished was left behind by a crash."""
_DIRECTORY, _FILE = 0o770, 0o660
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_GONE = (FileNotFoundError, NotADirectoryError)


class Files:
    """Below one directory. All methods may be called from many threads at once, and raise `BackendError`."""

    def __init__(self, path: str, mover: Mover, tally: Tally, *, direct: bool) -> None:
        self._path = path
        self._mover = mover
        self._tally = tally
        self._direct = os.O_DIRECT if direct else 0

    def open(self) -> None:
        """Make what is missing, and remove what crashes have left."""
        with self._told():
            os.makedirs(self._at(_UNFINISHED), _DIRECTORY, exist_ok=True)
            before = time.time() - _FORGOTTEN
            for entry in os.scandir(self._at(_UNFINISHED)):
                with contextlib.suppress(FileNotFoundError):  # another host was faster
                    if entry.stat(follow_symlinks=False).st_mtime < before:
                        os.unlink(entry.path)
        self._mover.check()

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        with self._told():
            return [self._is_there(self._at(object_name(key))) for key in keys]

    def _is_there(self, name: str) -> bool:
        try:
            return stat.S_ISREG(os.lstat(name).st_mode)
        except _GONE:
            return False

    def read(self, key: ChunkKey, into: memoryview) -> ReadResult:
        result = self._read(key, into, exact=True)
        return ReadResult.HIT if isinstance(result, int) else result

    def read_any(self, key: ChunkKey, into: memoryview) -> int | ReadResult:
        return self._read(key, into, exact=False)

    def _read(self, key: ChunkKey, into: memoryview, *, exact: bool) -> int | ReadResult:
        with self._told():
            try:
                fd = self._open(self._at(object_name(key)), os.O_RDONLY)
            except _GONE:
                return ReadResult.MISS
            try:
                size = os.fstat(fd).st_size
                if size != into.nbytes if exact else not 0 < size <= into.nbytes:
                    self._tally.add("values_of_another_size")
                    return ReadResult.CORRUPT
                self._mover.read(fd, into[:size])
            finally:
                os.close(fd)
        self._tally.add("bytes_read", size)
        return size

    def write(self, chunk: Chunk) -> WriteResult:
        place = self._at(object_name(chunk.key))
        beside = self._at(f"{_UNFINISHED}/{socket.gethostname()}-{uuid4().hex}")
        try:
            with self._told():
                try:
                    self._fill(beside, chunk.data)
                    os.makedirs(os.path.dirname(place), _DIRECTORY, exist_ok=True)
                    os.rename(beside, place)
                except BaseException:  # whatever it was, nothing half written may stay
                    with contextlib.suppress(OSError):
                        os.unlink(beside)
                    raise
        except BackendError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL:
                self._tally.add("full")
                return WriteResult.FULL
            raise
        self._tally.add("bytes_written", chunk.data.nbytes)
        return WriteResult.STORED

    def _fill(self, name: str, data: memoryview) -> None:
        fd = self._open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.posix_fallocate(fd, 0, data.nbytes)  # tells what NIXL does not: that there is no room
            self._mover.write(fd, data)
        finally:
            os.close(fd)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        with self._told():
            for key in keys:
                with contextlib.suppress(*_GONE):
                    os.unlink(self._at(object_name(key)))

    def _open(self, name: str, flags: int) -> int:
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(name, flags | self._direct, _FILE)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
        self._tally.add("buffered_fallback")
        with contextlib.suppress(FileNotFoundError):
            if flags & os.O_EXCL:
                os.unlink(name)  # some file systems make it and refuse it then
        return os.open(name, flags, _FILE)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or str(error)
            advice = "see to the file system and to who may write there; the tier tries again by itself"
            raise BackendError(f"nixl: {self._path}: {why}; {advice}") from error
