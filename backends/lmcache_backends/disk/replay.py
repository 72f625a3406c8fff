"""What a log says is there: its records in order, applied to nothing but memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping

from lmcache_backends.disk import records
from lmcache_backends.disk.options import UNIT
from lmcache_backends.disk.records import KEY

__all__ = ["Entry", "Replay", "rounded"]


class Entry:
    """A chunk and where its value lies."""

    __slots__ = ("chain", "dead", "epoch", "nbytes", "offset", "readers", "rooted", "segment", "space")

    def __init__(
        self, space: bytes, chain: bytes, rooted: bool, segment: int, offset: int, nbytes: int, epoch: int
    ) -> None:
        self.space = space
        self.chain = chain
        """Parent (unless `rooted`) and pages, one after another."""
        self.rooted = rooted
        """It starts a prompt: it has no parent."""
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        self.epoch = epoch
        self.readers = 0
        self.dead = False
        """It is no longer found; its place is free when `readers` is 0."""

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Equal to the `ChunkKey`."""
        return self.space, self.chain[-KEY:]

    @property
    def place(self) -> int:
        """Segment and unit in one number."""
        return self.segment << 32 | self.offset // UNIT

    @property
    def parent(self) -> bytes:
        return b"" if self.rooted else self.chain[:KEY]

    @property
    def pages(self) -> tuple[bytes, ...]:
        chain = self.chain
        return tuple([chain[at : at + KEY] for at in range(0 if self.rooted else KEY, len(chain), KEY)])


def rounded(nbytes: int) -> int:
    """Bytes that a value of `nbytes` takes of a segment."""
    return -(-nbytes // UNIT) * UNIT


class Replay:
    """The state after the records of a log.

    `sizes` are the segments that exist; what lies outside of them is not there. Where an evict record was lost, a
    later put shows it: it has the same key, or lies on the same place, and wins.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self._sizes = sizes
        self._by_key: dict[tuple[bytes, bytes], Entry] = {}
        self._by_place: dict[int, Entry] = {}
        self._starts: dict[int, list[int]] = {number: [] for number in sizes}
        self.highest = 0
        """Largest number of a segment that the log speaks of."""
        self.lost = 0
        """Chunks whose segment is missing or too short."""

    @property
    def entries(self) -> list[Entry]:
        """What is there, in no order."""
        return list(self._by_place.values())

    def apply(self, log: Iterable[records.Record]) -> None:
        """Raises what `log` raises."""
        by_key, by_place, sizes, starts = self._by_key, self._by_place, self._sizes, self._starts
        spaces: dict[bytes, bytes] = {}
        for kind, flags, count, segment, offset, nbytes, epoch, body in log:
            if kind == records.PUT:
                rooted = not flags & records.PARENT
                if not count or len(body) != KEY * (2 - rooted + count):
                    continue
                if segment > self.highest:
                    self.highest = segment
                space = body[:KEY]
                space = spaces.setdefault(space, space)
                key = (space, body[-KEY:])
                if key in by_key:
                    self._drop(by_key[key])
                if offset % UNIT or not nbytes or offset + nbytes > sizes.get(segment, 0):
                    self.lost += 1
                    continue
                known = starts[segment]
                if known and offset < self._end(segment, known[-1]):
                    self._clear(segment, known, offset, offset + nbytes)
                    insort(known, offset)
                else:
                    known.append(offset)
                by_key[key] = by_place[segment << 32 | offset // UNIT] = Entry(
                    space, body[KEY:], rooted, segment, offset, nbytes, epoch
                )
            elif kind == records.EVICT:
                if (entry := by_key.get((body[:KEY], body[KEY:]))) is not None:
                    self._drop(entry)
                if (entry := by_place.get(segment << 32 | offset // UNIT)) is not None:
                    self._drop(entry)
            elif kind == records.TOUCH:
                for number, unit in records.touched(body):
                    if (entry := by_place.get(number << 32 | unit)) is not None:
                        entry.epoch = epoch
                    epoch += 1

    def _end(self, segment: int, offset: int) -> int:
        return offset + self._by_place[segment << 32 | offset // UNIT].nbytes

    def _clear(self, segment: int, known: list[int], start: int, end: int) -> None:
        """Drop what overlaps `[start, end)`. Places are exact multiples, so whole units need not be looked at."""
        first = bisect_right(known, start) - 1
        if first < 0 or self._end(segment, known[first]) <= start:
            first += 1
        for offset in known[first : bisect_left(known, end, first)]:
            self._drop(self._by_place[segment << 32 | offset // UNIT])

    def _drop(self, entry: Entry) -> None:
        del self._by_key[entry.key]
        del self._by_place[entry.place]
        known = self._starts[entry.segment]
        del known[bisect_left(known, entry.offset)]
