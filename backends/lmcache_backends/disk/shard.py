"""One shard: a directory with a lock, a log and segments, written by the one process that holds the lock.

<path>/<16 hex digits>/lock                   held by flock; says which owner
                      /log, log.new           records; the second while the first is being rewritten
                      /segment-<8 hex digits> values
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Literal

from lmcache_backends.disk import records
from lmcache_backends.disk.files import open_file
from lmcache_backends.disk.locks import FileLock
from lmcache_backends.disk.log import NEW, Log
from lmcache_backends.disk.options import UNIT
from lmcache_backends.disk.replay import Entry, replay_log, rounded
from lmcache_backends.disk.segments import Segment
from lmcache_backends.disk.tally import Tally

__all__ = [
    "LOCK",
    "LOG",
    "Shard",
    "bytes_to_come",
    "is_readable",
    "remove_shard",
    "seed_of",
    "segment_path",
    "segment_sizes",
    "shard_names",
]

LOCK, LOG = "lock", "log"
_SHARD = re.compile(r"[0-9a-f]{16}")
_SEGMENT = re.compile(r"segment-([0-7][0-9a-f]{7})")  # up to HIGHEST


class Shard:
    """A shard this process holds. All but `load` and `sync` is under the owner's lock. Everything raises `OSError`."""

    def __init__(self, path: str, lock: FileLock, mode: Literal["auto", "always", "never"], tally: Tally) -> None:
        self.path = path
        self._lock = lock
        self._mode = mode
        self._tally = tally
        self._highest = 0
        self.segments: dict[int, Segment] = {}
        """By number."""
        self.entries: dict[int, Entry] = {}
        """What is found here, by place."""
        self.live = 0
        """Bytes of the log that are not out of date."""
        self.taken = 0
        """Bytes of places that are not free."""
        self.compacting = False
        self.unfreed: list[Entry] = []
        """Entries that are gone, but nobody knows whether the drive has been told: their places wait for that."""
        self.log: Log

    def load(self) -> dict[tuple[bytes, bytes], Entry]:
        """Learn what is there, by key, and remove what no log speaks of."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, LOG + NEW))
            self._tally.add("orphans_removed")
        self.log = Log(os.path.join(self.path, LOG), seed_of(self.path))
        sizes = segment_sizes(self.path)
        replay, reader = replay_log(self.log.fd, self.log.seed, sizes)
        self.log.resume(reader.end, reader.torn)
        damaged = reader.gaps + replay.odd
        self.log.damaged = damaged + replay.lost > 0
        self._tally.add("log_records_damaged", damaged)
        self._tally.add("log_tails_cut", reader.torn)
        self._tally.add("entries_lost", replay.lost)
        self._highest = max(replay.highest, *sizes, 0)
        self.entries = replay.by_place
        self.live = sum([records.put_size(entry.chain) for entry in self.entries.values()])
        taken: dict[int, list[tuple[int, int]]] = {}
        for _, entry in sorted(self.entries.items()):
            taken.setdefault(entry.segment, []).append((entry.offset, entry.nbytes))
        for number in sizes:
            if number in taken:
                self.segments[number] = Segment(segment_path(self.path, number), number, self._mode, self._fallback)
                extents = self.segments[number].extents
                extents.take_all(taken[number])
                self.taken += extents.capacity - extents.free_bytes
            else:
                os.unlink(segment_path(self.path, number))
                self._tally.add("orphans_removed")
        return replay.by_key

    @property
    def nbytes(self) -> int:
        """Bytes of the file system that are taken for values."""
        return sum(segment.size for segment in self.segments.values())

    def allocate(self, nbytes: int) -> tuple[Segment, int] | None:
        """A place, in the oldest segment that has one, so that the others become empty."""
        for segment in self.segments.values():
            if not segment.lost and (offset := segment.extents.allocate(nbytes)) is not None:
                self.taken += rounded(nbytes)
                return segment, offset
        return None

    def reserve_segment(self, size: int) -> Segment:
        """Claim `size` bytes of the file system; `fill` takes them. Not under the owner's lock, but never twice at
        once."""
        while True:
            number = self._highest + 1
            path = segment_path(self.path, number)
            try:
                segment = Segment.reserve(path, number, size, self._mode, self._fallback)
            except FileExistsError:  # something odd that somebody put there
                self._highest = number
                continue
            self._highest = number
            return segment

    def add_segment(self, segment: Segment) -> None:
        """Use a segment that was made."""
        self.segments[segment.ident] = segment
        self._tally.add("segments_taken")

    def put(self, entry: Entry) -> int:
        """Record an entry; it is found from now on. Returns what `log.sync` wants."""
        ticket = self.log.append(self._record(entry))
        self.entries[entry.place] = entry
        self.live += records.put_size(entry.chain)
        return ticket

    def evict(self, entries: Sequence[Entry]) -> int:
        """Record that entries are gone; their places are still theirs. Returns what `log.sync` wants."""
        seed = self.log.seed
        gone = [records.evict(seed, entry.segment, entry.offset, *entry.key) for entry in entries]
        ticket = self.log.append(b"".join(gone), reserve=True)
        for entry in entries:
            self.forget(entry)
        return ticket

    def forget(self, entry: Entry) -> None:
        """An entry is gone by the log's last record."""
        del self.entries[entry.place]
        self.live -= records.put_size(entry.chain)

    def touch(self, entries: Sequence[Entry], epoch: int) -> None:
        """Record that entries were used, one after another from `epoch` on."""
        places = [(entry.segment, entry.offset // UNIT) for entry in entries]
        for start in range(0, len(places), records.LARGEST_TOUCH):
            self.log.append(records.touch(self.log.seed, epoch + start, places[start : start + records.LARGEST_TOUCH]))
        for later, entry in enumerate(entries):
            entry.epoch = epoch + later

    def free(self, entry: Entry) -> None:
        """Nobody uses an entry's place any more."""
        self.segments[entry.segment].extents.free(entry.offset, entry.nbytes)
        self.taken -= rounded(entry.nbytes)

    def records(self, entries: Sequence[Entry]) -> Iterator[bytes]:
        """What a log that says just this consists of."""
        return map(self._record, entries)

    def unused_segments(self) -> list[Segment]:
        """Segments that nothing lies in, newest first."""
        return [segment for segment in reversed(self.segments.values()) if segment.unused and not segment.lost]

    def drop_segment(self, segment: Segment) -> None:
        """A segment that nothing lies in is no more."""
        del self.segments[segment.ident]
        segment.close()

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        for segment in self.segments.values():
            segment.close()
        if hasattr(self, "log"):
            self.log.close()
        self._lock.release()

    def _fallback(self) -> None:
        self._tally.add("buffered_fallback")

    def _record(self, entry: Entry) -> bytes:
        seed, place = self.log.seed, (entry.segment, entry.offset)
        return records.put(seed, *place, entry.nbytes, entry.epoch, entry.check, entry.space, entry.chain, entry.rooted)


def seed_of(path: str) -> int:
    """What the checksums in this shard's log start from."""
    return zlib.crc32(os.path.basename(path).encode())


def is_readable(path: str) -> bool:
    """Whether the shard at `path` has a log that this version understands, or none at all.

    Raises:
        OSError: It cannot be told; `ODD` if something else is in the log's place.
    """
    if os.path.isdir(os.path.join(path, LOG + NEW)):
        raise OSError(errno.EISDIR, "is no file", os.path.join(path, LOG + NEW))
    try:
        fd = open_file(os.path.join(path, LOG), os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        return records.format_of(fd) == records.FORMAT
    finally:
        os.close(fd)


def shard_names(root: str) -> list[str]:
    """Names of the shards below a path that belong to this user, in order."""
    user, names = os.geteuid(), []
    with os.scandir(root) as found:
        for item in found:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                if (
                    _SHARD.fullmatch(item.name)
                    and item.is_dir(follow_symlinks=False)
                    and item.stat(follow_symlinks=False).st_uid == user
                ):
                    names.append(item.name)
    return sorted(names)


def segment_path(path: str, number: int) -> str:
    """The file of a segment of the shard at `path`."""
    return os.path.join(path, f"segment-{number:08x}")


def segment_sizes(path: str) -> dict[int, int]:
    """Segments in a shard's directory: number and whole units in bytes."""
    sizes = {}
    with os.scandir(path) as found:
        for item in found:
            with contextlib.suppress(FileNotFoundError):  # given back meanwhile
                if (match := _SEGMENT.fullmatch(item.name)) and item.is_file(follow_symlinks=False):
                    sizes[int(match[1], 16)] = item.stat(follow_symlinks=False).st_size // UNIT * UNIT
    return dict(sorted(sizes.items()))


def bytes_to_come(path: str) -> int:
    """Bytes that the segments in a shard's directory claim and the file system has not given them yet."""
    lacking = 0
    for number in segment_sizes(path):
        with contextlib.suppress(FileNotFoundError):  # given back meanwhile
            status = os.stat(segment_path(path, number), follow_symlinks=False)
            lacking += max(0, status.st_size - 512 * status.st_blocks)
    return lacking


def remove_shard(path: str) -> None:
    """Delete a shard whose lock the caller holds, values first, lock last."""
    for number in segment_sizes(path):
        os.unlink(segment_path(path, number))
    for name in (LOG + NEW, LOG, LOCK):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(os.path.join(path, name))
    with contextlib.suppress(OSError):  # something of somebody's own in it
        os.rmdir(path)
