"""Chunks as files: written beside their place and renamed to it, read from one descriptor. Blocks.

A rename swaps the file behind a name and leaves the old one to those who have it open. So a reader gets one value, the
old or the new one, and of many writers the last one's stays. There is no lock. What another host has done may be seen
late, which is a miss meanwhile; what it has removed may be seen still, and is a stale handle when it is used.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from lmcache_backends.nfs.directory import FILE_MODE, is_removed, make_below, names_below
from lmcache_backends.nfs.errors import FULL, NOT_PERMITTED, failed
from lmcache_backends.nfs.moving import Mover
from lmcache_backends.nfs.naming import Maker, is_chunk, is_shard, is_space
from lmcache_backends.nfs.options import Settings
from lmcache_backends.nfs.tally import Tally
from lmcache_core.names import object_name, parse_object_name
from lmcache_core.protocols import Chunk, ChunkKey, Listed, ReadResult, WriteResult

__all__ = ["ChunkFiles"]

R = TypeVar("R")

_log = logging.getLogger(__name__)

ATTEMPTS = 4
"""Times a file is opened before what goes wrong there counts: once O_DIRECT is refused, once a directory is missing,
once another host has been at it."""
PAUSES = (0.1, 0.4, 1.0)
"""Seconds after which a write tries a directory again that another host has removed: until then this one believes that
it is there."""
TOLD_AGAIN = 600.0
"""Seconds after which it is said again that there is no room."""
_ALIGN = 4096
_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""What somebody else has put in a chunk's place (a link, a FIFO) is neither followed nor waited for."""


class ChunkFiles:
    """The chunks below an open directory. All methods may be called from many threads at once, and raise
    `BackendError`."""

    def __init__(self, root: int, options: Settings, tally: Tally, maker: Maker, mover: Mover) -> None:
        self._root = root
        self._name = options.name
        self._mover = mover
        self._path = options.directory()
        self._fsync = options.fsync
        self._always = options.direct == "always"
        self._direct = options.direct != "never"
        self._tally = tally
        self._maker = maker
        self._lock = threading.Lock()
        self._told = -TOLD_AGAIN

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of them are there, as far as this host sees it. Renews nothing."""
        found = [self._is_there(object_name(key)) for key in keys]
        if not any(found):
            self._check_root()
        return found

    def _is_there(self, name: str) -> bool:
        try:
            return stat.S_ISREG(os.stat(name, dir_fd=self._root, follow_symlinks=False).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            if error.errno == errno.ESTALE:
                return False  # the directory was removed under the name; the root says if all is lost
            raise self._failed(error, name, reading=True) from error

    def _check_root(self) -> None:
        """Nothing is found for ever in a directory that was removed, though another may be at its path."""
        try:
            if not is_removed(self._root):
                return
            error: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        except OSError as raised:
            error = raised
        raise failed(error, self._path, name=self._name) from error

    def read(self, key: ChunkKey, into: memoryview) -> ReadResult:
        """Fill `into` with one value of the key, if one of this size is there."""
        found = self._read(key, into, shorter=False)
        return found if isinstance(found, ReadResult) else ReadResult.HIT

    def read_any(self, key: ChunkKey, into: memoryview) -> int | ReadResult:
        """Put one value of the key at the start of `into`, and return its size, if that is no larger."""
        return self._read(key, into, shorter=True)

    def _read(self, key: ChunkKey, into: memoryview, *, shorter: bool) -> int | ReadResult:
        def fill(fd: int, size: int) -> int | ReadResult:
            if not 0 < size <= into.nbytes or (size < into.nbytes and not shorter):
                return ReadResult.CORRUPT
            return size if self._mover.read(fd, into[:size]) else ReadResult.CORRUPT

        found = self.visit(key, fill, into.nbytes)
        if not isinstance(found, ReadResult):
            self._tally.add("bytes_read", found)
        return found

    def visit(self, key: ChunkKey, look: Callable[[int, int], R], nbytes: int) -> R | ReadResult:
        """What `look` makes of the open file of a key and its size, or MISS if there is none. It is asked again where
        the file was changed by another host meanwhile. `nbytes` is what will be read at a time: of whole pages, the
        file is opened to go past the page cache."""
        name = object_name(key)
        found: R | ReadResult = ReadResult.MISS
        for attempt in range(ATTEMPTS):
            try:
                found = self._visit_once(name, look, nbytes)
            except FileNotFoundError:
                return ReadResult.MISS
            except OSError as error:
                if self._again(error, attempt):
                    continue
                if error.errno != errno.ESTALE:
                    raise self._failed(error, name, reading=True) from error
                self._check_root()
                return ReadResult.MISS  # this host still has the name for the old file: for a second, not for ever
            # A name may show the new file and still the old one's size; the second look is at what the server says.
            if found is not ReadResult.CORRUPT or attempt:
                break
        return found

    def _visit_once(self, name: str, look: Callable[[int, int], R], nbytes: int) -> R | ReadResult:
        fd = os.open(name, os.O_RDONLY | _SAFE | self._flag(nbytes), dir_fd=self._root)
        try:
            status = os.fstat(fd)
            return look(fd, status.st_size) if stat.S_ISREG(status.st_mode) else ReadResult.MISS
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)

    def spaces(self) -> list[str]:
        """Directories of chunks, each with those of one part of one space."""
        try:
            return [
                f"{space}/{shard}"
                for space in names_below(self._root, "")
                if is_space(space)
                for shard in names_below(self._root, space)
                if is_shard(shard)
            ]
        except OSError as error:
            raise failed(error, self._path, reading=True, name=self._name) from error

    def listed(self, directory: str) -> list[Listed]:
        """The chunks in one of them, with their sizes."""
        found = []
        try:
            for name in names_below(self._root, directory):
                path = f"{directory}/{name}"
                if is_chunk(name, directory.rpartition("/")[2]):
                    with contextlib.suppress(FileNotFoundError):  # removed just now
                        status = os.stat(path, dir_fd=self._root, follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode) and status.st_size:
                            found.append(Listed(parse_object_name(path), status.st_size))
        except OSError as error:
            raise self._failed(error, directory, reading=True) from error
        return found

    def write(self, chunk: Chunk) -> WriteResult:
        """Put a value in the place of the key's, or of none."""
        return self.put(chunk.key, lambda fd: self._mover.write(fd, chunk.data), chunk.data.nbytes)

    def put(self, key: ChunkKey, fill: Callable[[int], None], nbytes: int) -> WriteResult:
        """Put a file in the place of the key's, or of none, once `fill` has written all of it, which is `nbytes`."""
        name = object_name(key)
        try:
            self._put(name, fill, nbytes)
        except OSError as error:
            if error.errno not in FULL:
                raise self._failed(error, name) from error
            self._tell_full(error)
            return WriteResult.FULL
        self._tally.add("bytes_written", nbytes)
        return WriteResult.STORED

    def _put(self, name: str, fill: Callable[[int], None], nbytes: int) -> None:
        for attempt in range(ATTEMPTS):
            try:
                return self._put_once(name, fill, nbytes)
            except OSError as error:
                if not self._again(error, attempt):
                    raise
                if error.errno == errno.ENOENT:
                    make_below(self._root, os.path.dirname(name))
                elif error.errno == errno.ESTALE:
                    self._check_root()
                    time.sleep(PAUSES[attempt])
        return None

    def _put_once(self, name: str, fill: Callable[[int], None], nbytes: int) -> None:
        temporary = self._maker.temporary(name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE | self._flag(nbytes)
        try:
            fd = os.open(temporary, flags, FILE_MODE, dir_fd=self._root)
            try:
                fill(fd)
                if self._fsync:
                    os.fsync(fd)
            except BaseException:  # whatever it was, the descriptor must not stay open
                with contextlib.suppress(OSError):  # the first failure is the one to tell
                    os.close(fd)
                raise
            os.close(fd)  # only now some file systems say that there is no room
            os.rename(temporary, name, src_dir_fd=self._root, dst_dir_fd=self._root)
        except BaseException:  # whatever it was, no file stays behind: an opening that failed may leave an empty one
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._root)
            raise

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove what is there of them. What this user may not remove stays."""
        for name in map(object_name, keys):
            for attempt in range(ATTEMPTS):
                try:
                    os.unlink(name, dir_fd=self._root)
                except (FileNotFoundError, NotADirectoryError):
                    pass
                except OSError as error:
                    if error.errno in NOT_PERMITTED:
                        self._tally.add("not_permitted")
                    elif error.errno == errno.ESTALE and self._again(error, attempt):
                        continue
                    else:
                        raise self._failed(error, name) from error
                break

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Note that they are used now, the last of them most recently. The time is the server's own where it has one,
        which is what sweeps compare."""
        for name in map(object_name, keys):
            try:
                os.utime(name, dir_fd=self._root, follow_symlinks=False)
            except OSError as error:
                if error.errno in NOT_PERMITTED:
                    self._tally.add("not_permitted", len(keys))
                    return
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                    raise self._failed(error, name) from error
            else:
                self._tally.add("touches")

    def _flag(self, nbytes: int) -> int:
        return os.O_DIRECT if self._direct and nbytes % _ALIGN == 0 else 0

    def _again(self, error: OSError, attempt: int) -> bool:
        """Whether to open once more after `error`."""
        if attempt == ATTEMPTS - 1:
            return False
        if error.errno == errno.EINVAL and not self._always:
            if self._direct:
                self._direct = False
                self._tally.add("buffered_fallback")
            return True
        if error.errno not in (errno.ENOENT, errno.ESTALE, errno.EEXIST):
            return False
        if error.errno == errno.ESTALE:
            self._tally.add("stale_retries")
        return True

    def _tell_full(self, error: OSError) -> None:
        self._tally.add("full")
        with self._lock:
            tell = time.monotonic() - self._told >= TOLD_AGAIN
            if tell:
                self._told = time.monotonic()
        if tell:
            told = failed(error, self._path, name=self._name)
            _log.warning("%s; chunks are not stored there until there is room", told)

    def _failed(self, error: OSError, name: str, *, reading: bool = False) -> Exception:
        return failed(error, os.path.join(self._path, name), reading=reading, name=self._name)
