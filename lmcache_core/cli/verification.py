"""Reads every stored frame and checks all of its checksums; bounded by the memory of one chunk."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from lmcache_core import frame
from lmcache_core.cli.disk_cache import Entry, look
from lmcache_core.errors import FrameError
from lmcache_core.protocols import Stored

__all__ = ["Damage", "verify_entries"]

ROUNDS = 3
"""How often what looks damaged in a cache that is in use is looked for and read again."""

_Place = tuple[Path, int, bytes, bytes]


class Damage(NamedTuple):
    """A chunk that a cache would not serve."""

    entry: Entry
    problem: str


def verify_entries(path: Path, entries: Iterable[Entry], advance: Callable[[int], None]) -> list[Damage]:
    """Check chunks that were found below `path`; `advance` is told the bytes of each one that has been read.

    A place may have been given to another chunk since, if the cache is in use. So what looks damaged counts only if it
    is still listed at its place afterwards.

    Raises:
        OSError: A file cannot be read, though it is there.
        BackendError: The path cannot be read any more.
    """
    reader = _Reader()
    suspects: list[Damage] = []
    for entry in sorted(entries, key=lambda entry: (entry.file, entry.offset)):
        problem = reader.check(entry)
        if problem is not None:
            suspects.append(Damage(entry, problem))
        advance(entry.stored.nbytes)
    for _ in range(ROUNDS):
        if not suspects:
            break
        wanted = {_place(suspect.entry) for suspect in suspects}
        listed = [entry for entry in look(path).entries() if _place(entry) in wanted]
        suspects = [Damage(entry, problem) for entry in listed if (problem := reader.check(entry)) is not None]
    reader.close()
    return suspects


def _place(entry: Entry) -> _Place:
    return entry.file, entry.offset, *entry.stored.key


class _Reader:
    """Reads frames into one buffer that is as large as the largest of them."""

    def __init__(self) -> None:
        self._buffer = mmap.mmap(-1, mmap.PAGESIZE)
        self._file = Path()
        self._fd = -1

    def check(self, entry: Entry) -> str | None:
        """What is wrong with a chunk, if anything."""
        try:
            fd = self._open(entry.file)
        except FileNotFoundError:
            return "its file is gone"
        nbytes = entry.stored.nbytes
        if len(self._buffer) < nbytes:
            self._buffer.close()
            self._buffer = mmap.mmap(-1, nbytes)
        view = memoryview(self._buffer)[:nbytes]
        try:
            if not _fill(fd, entry.offset, view):
                return "its file is too short"
            return damage(entry.stored, view)
        finally:
            view.release()

    def close(self) -> None:
        """Let go of file and buffer."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._buffer.close()

    def _open(self, file: Path) -> int:
        if self._fd < 0 or file != self._file:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            self._fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            self._file = file
        return self._fd


def _fill(fd: int, offset: int, view: memoryview) -> bool:
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if not count:
            return False
        done += count
    # Leave the page cache to those who use this machine, and read from the drive if it is looked at again.
    os.posix_fadvise(fd, offset, len(view), os.POSIX_FADV_DONTNEED)
    return True


def damage(stored: Stored, view: memoryview) -> str | None:
    """What is wrong with the bytes of a chunk, as they are stored, if anything."""
    try:
        header = frame.read_header(view)
        if header.nbytes != len(view) or header.form.pages != len(stored.pages):
            return "the frame is of another size than the log says"
        frame.verify_stored(view, header.form, stored.key.space, stored.parent, stored.pages)
    except FrameError as error:
        return str(error)
    return None
