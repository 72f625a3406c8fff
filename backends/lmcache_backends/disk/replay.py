"""What a log says is there: its records in order, applied to nothing but memory."""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping

import msgspec

from lmcache_backends.disk.options import UNIT
from lmcache_backends.disk.records import EVICT, KEY, PARENT, PLACE, PUT, TOUCH, Reader, Record, touched
from lmcache_core.protocols import ChunkKey, Stored

__all__ = ["HIGHEST", "Entry", "Replay", "check_of", "replay_log", "rounded"]

HIGHEST = 2**31 - 1
"""Largest number that a segment may have: far from what its field can hold, so that there is always a next one."""
_LATEST = 2**62
"""Microseconds. No chunk was used later; far from what the field can hold as well."""


class Entry(msgspec.Struct, eq=False, gc=False):
    """A chunk and where its value lies. Refers to numbers and bytes only, so the garbage collector need not look."""

    space: bytes
    chain: bytes
    """Parent (unless `rooted`) and pages, one after another."""
    rooted: bool
    """It starts a prompt: it has no parent."""
    segment: int
    offset: int
    nbytes: int
    epoch: int
    check: int
    """Of the value, from `check_of`."""
    readers: int = 0
    dead: bool = False
    """It is no longer found; its place is free when `readers` is 0."""

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Equal to the `ChunkKey`."""
        return self.space, self.chain[-KEY:]

    @property
    def place(self) -> int:
        """Segment and unit in one number."""
        return self.segment << 32 | self.offset // UNIT

    def stored(self) -> Stored:
        """As a scan yields it."""
        chain, start = self.chain, 0 if self.rooted else KEY
        pages = tuple([chain[at : at + KEY] for at in range(start, len(chain), KEY)])
        return Stored(ChunkKey(self.space, pages[-1]), pages, self.nbytes, chain[:start])


def check_of(value: memoryview) -> int:
    """By what the beginning of a value is known."""
    return zlib.crc32(value.cast("B")[:UNIT])


def rounded(nbytes: int) -> int:
    """Bytes that a value of `nbytes` takes of a segment."""
    return -(-nbytes // UNIT) * UNIT


class Replay:
    """The state after the records of a log.

    `sizes` are the segments that exist; what lies outside of them is not there. Where an evict record was lost, a
    later put shows it: it has the same key, or lies on the same place, and wins. Only `careful` looks for the latter.
    """

    def __init__(self, sizes: Mapping[int, int], careful: bool = False) -> None:
        self._sizes = sizes
        self.by_key: dict[tuple[bytes, bytes], Entry] = {}
        """What is there."""
        self.by_place: dict[int, Entry] = {}
        """The same by place."""
        self._starts: dict[int, list[int]] | None = {number: [] for number in sizes} if careful else None
        self.highest = 0
        """Largest number of a segment that the log speaks of."""
        self.odd = 0
        """Whole records that nobody writes: of a later kind, or of a shape that makes no sense."""
        self._lost: set[tuple[bytes, bytes]] = set()

    @property
    def lost(self) -> int:
        """Chunks that should be there, but their segment is missing or too short."""
        return len(self._lost)

    def apply(self, log: Iterable[Record]) -> None:
        """Raises what `log` raises."""
        by_key, by_place, sizes, lost = self.by_key, self.by_place, self._sizes, self._lost
        careful = self._starts is not None
        spaces: dict[bytes, bytes] = {}  # each of them in memory once
        for kind, flags, count, segment, offset, nbytes, epoch, check, body in log:
            if kind == PUT:
                rooted = not flags & PARENT
                shaped = count and len(body) == KEY * (2 - rooted + count) and flags <= PARENT
                if not (shaped and nbytes and not offset % UNIT and segment <= HIGHEST and epoch <= _LATEST):
                    self.odd += 1
                    continue
                if segment > self.highest:
                    self.highest = segment
                space = body[:KEY]
                space = spaces.setdefault(space, space)
                key = (space, body[-KEY:])
                if key in by_key:
                    self._drop(by_key[key])
                if offset + nbytes > sizes.get(segment, 0):
                    lost.add(key)
                    continue
                if lost:
                    lost.discard(key)
                place = segment << 32 | offset // UNIT
                if careful:
                    self._clear(segment, offset, offset + nbytes)
                elif place in by_place:
                    self._drop(by_place[place])
                by_key[key] = by_place[place] = Entry(space, body[KEY:], rooted, segment, offset, nbytes, epoch, check)
            elif kind == EVICT and len(body) == 2 * KEY:
                key = body[:KEY], body[KEY:]
                lost.discard(key)
                for gone in (by_key.get(key), by_place.get(segment << 32 | offset // UNIT)):
                    if gone is not None and by_place.get(gone.place) is gone:
                        self._drop(gone)
            elif kind == TOUCH and len(body) == PLACE.size * count and epoch <= _LATEST:
                for number, unit in touched(body):
                    if (used := by_place.get(number << 32 | unit)) is not None:
                        used.epoch = epoch
                    epoch += 1
            else:
                self.odd += 1

    def _clear(self, segment: int, start: int, end: int) -> None:
        """Something new lies at `[start, end)`: drop what overlaps it."""
        assert self._starts is not None
        known = self._starts[segment]
        first = bisect_right(known, start) - 1
        if first < 0 or known[first] + self.by_place[segment << 32 | known[first] // UNIT].nbytes <= start:
            first += 1
        for offset in known[first : bisect_left(known, end, first)]:
            self._drop(self.by_place[segment << 32 | offset // UNIT])
        insort(known, start)

    def _drop(self, entry: Entry) -> None:
        del self.by_key[entry.key]
        del self.by_place[entry.place]
        if self._starts is not None:
            known = self._starts[entry.segment]
            del known[bisect_left(known, entry.offset)]


def replay_log(fd: int, seed: int, sizes: Mapping[int, int]) -> tuple[Replay, Reader]:
    """The state after the log in `fd`, which has our `FORMAT`, and what was noticed on the way.

    Raises:
        OSError: It cannot be read.
    """
    replay, reader = Replay(sizes), Reader(fd, seed)
    replay.apply(reader)
    if reader.gaps or replay.odd or _overlaps(replay):
        replay, reader = Replay(sizes, careful=True), Reader(fd, seed)
        replay.apply(reader)
    return replay, reader


def _overlaps(replay: Replay) -> bool:
    """Do two values lie on one place? Only where a record is missing."""
    segment, end = -1, 0
    for _, entry in sorted(replay.by_place.items()):
        if entry.segment == segment and entry.offset < end:
            return True
        segment, end = entry.segment, entry.offset + entry.nbytes
    return False
