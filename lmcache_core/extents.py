"""Which parts of a range of bytes are free: best-fit allocation of extents, by plain arithmetic without I/O.

Free extents are kept three times: by start and by end, so that a freed extent finds its neighbours, and by size, so
that an allocation finds the smallest that fits. By size they lie in buckets, one for each power of two, and in a
bucket in order, as one number each: the largest first, of equal ones the last. What is allocated next is then at a
bucket's end, where removing it moves nothing. So no operation looks at all extents; only `take` needs them in order of
offset, and sorts them once for a run of `take`s.

Not thread-safe: the owner has a lock of its own around it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from lmcache_core.errors import UsageError

__all__ = ["ExtentAllocator"]

_SHIFT = 64
_START = (1 << _SHIFT) - 1
_TOO_SMALL = "an extent has at least one byte, not {}"


class ExtentAllocator:
    """Hands out extents of `[0, capacity)`, each starting at and as long as a multiple of `unit` bytes.

    The smallest free extent that fits is cut, at its start; of several, the one at the lowest offset.
    """

    __slots__ = ("_buckets", "_capacity", "_ends", "_filled", "_free", "_free_bytes", "_ordered", "_used", "unit")

    def __init__(self, capacity: int = 0, unit: int = 4096) -> None:
        """Start with `capacity` bytes, all free; what is beyond the last whole `unit` is not used.

        Raises:
            UsageError: `unit` is not positive, or `capacity` is negative.
        """
        if unit < 1:
            raise UsageError(f"unit must be at least 1, not {unit}")
        self.unit = unit
        self._capacity = 0
        self._free_bytes = 0
        self._free: dict[int, int] = {}  # start -> size
        self._ends: dict[int, int] = {}  # end -> start
        self._used: dict[int, int] = {}  # start -> size
        self._buckets: dict[int, list[int]] = {}  # by size: -(size << _SHIFT | start), ascending
        self._filled = 0  # bit n: bucket n is not empty
        self._ordered: list[int] | None = None  # keys of _free in order, while only `take` is called
        self.grow(capacity)

    @property
    def capacity(self) -> int:
        """Bytes in all, free or not."""
        return self._capacity

    @property
    def free_bytes(self) -> int:
        """Bytes that are free, in however many extents."""
        return self._free_bytes

    @property
    def largest(self) -> int:
        """Size of the largest free extent in bytes: what can be allocated in one piece. 0 when all is taken."""
        return -self._buckets[self._filled.bit_length() - 1][0] >> _SHIFT if self._filled else 0

    def allocate(self, nbytes: int) -> int | None:
        """Take `nbytes`, rounded up to whole units, and return the offset; None when no free extent is that large.

        Raises:
            UsageError: `nbytes` is not positive.
        """
        if nbytes < 1:
            raise UsageError(_TOO_SMALL.format(nbytes))
        size = -(-nbytes // self.unit) * self.unit
        number = size.bit_length()
        bucket = self._buckets.get(number)
        at = bisect_right(bucket, -(size << _SHIFT)) - 1 if bucket else -1
        if not bucket or at < 0:  # from the next bucket that has anything, the smallest
            larger = self._filled >> (number + 1)
            if not larger:
                return None
            number += (larger & -larger).bit_length()
            bucket = self._buckets[number]
            at = -1
        key = -bucket.pop(at)
        if not bucket:
            self._filled ^= 1 << number
        start, found = key & _START, key >> _SHIFT
        self._ordered = None
        del self._free[start]
        if found > size:
            self._put(start + size, start + found)
        else:
            del self._ends[start + size]
        self._used[start] = size
        self._free_bytes -= size
        return start

    def free(self, offset: int, nbytes: int) -> None:
        """Give back what `allocate` or `take` gave: the whole extent, `nbytes` as it was asked for.

        Raises:
            UsageError: No extent of that size was handed out at `offset`, or it has been freed already.
        """
        size = -(-nbytes // self.unit) * self.unit
        held = self._used.pop(offset, 0)
        if held != size or not held:
            if held:
                self._used[offset] = held
            raise UsageError(f"cannot free {nbytes} bytes at {offset}: {held} bytes are taken there")
        self._free_bytes += size
        self._ordered = None
        self._join(offset, offset + size)

    def take(self, offset: int, nbytes: int) -> None:
        """Claim the extent at `offset`, as when what was handed out is learnt again after a restart.

        Raises:
            UsageError: Part of it is not free or outside the capacity, or `offset` is no multiple of `unit`.
        """
        if nbytes < 1:
            raise UsageError(_TOO_SMALL.format(nbytes))
        size = -(-nbytes // self.unit) * self.unit
        if offset % self.unit:
            raise UsageError(f"offset {offset} is not a multiple of {self.unit}")
        ordered = self._ordered
        if ordered is None:
            ordered = self._ordered = sorted(self._free)
        at = bisect_right(ordered, offset) - 1
        start = ordered[at] if at >= 0 else 0
        held = self._free.get(start, 0)
        if offset < start or offset + size > start + held:
            raise UsageError(f"cannot take {nbytes} bytes at {offset}: not all of it is free")
        del self._free[start], self._ends[start + held]
        self._remove(start, held)
        del ordered[at]
        if start < offset:
            self._put(start, offset)
            insort(ordered, start)
        if offset + size < start + held:
            self._put(offset + size, start + held)
            insort(ordered, offset + size)
        self._used[offset] = size
        self._free_bytes -= size

    def take_all(self, extents: Sequence[tuple[int, int]]) -> None:
        """Claim many extents (offset, bytes) at once, in ascending order; nothing else is taken yet. Faster than as
        many `take`s.

        Raises:
            UsageError: They overlap, are out of order or outside the capacity, or something is taken already. What
                is taken then is undefined.
        """
        unit = self.unit
        used = {offset: -(-nbytes // unit) * unit for offset, nbytes in extents}
        if self._used or len(used) < len(extents) or any(nbytes < 1 or offset % unit for offset, nbytes in extents):
            raise UsageError("cannot take these extents: not all of them are free, or they are no extents")
        self._free, self._ends, self._buckets, self._filled, self._ordered = {}, {}, {}, 0, None
        self._used = used
        self._free_bytes = self._capacity - sum(used.values())
        last = 0
        for offset, size in used.items():
            if offset > last:
                self._put(last, offset)
            elif offset < last:
                raise UsageError(f"cannot take {size} bytes at {offset}: it is taken up to {last}")
            last = offset + size
        if last < self._capacity:
            self._put(last, self._capacity)
        elif last > self._capacity:
            raise UsageError(f"cannot take up to {last}: there are {self._capacity} bytes")

    def grow(self, nbytes: int) -> None:
        """Add `nbytes` of free space at the end; what is beyond the last whole `unit` is not used.

        Raises:
            UsageError: `nbytes` is negative.
        """
        if nbytes < 0:
            raise UsageError(f"cannot grow by {nbytes} bytes")
        size = nbytes // self.unit * self.unit
        if not size:
            return
        start = self._capacity
        self._capacity += size
        self._free_bytes += size
        self._ordered = None
        self._join(start, start + size)

    def _join(self, start: int, end: int) -> None:
        """Make `[start, end)` free, as one with the free extents it touches."""
        free, ends = self._free, self._ends
        after = free.pop(end, None)
        if after is not None:
            self._remove(end, after)
            end += after
        before = ends.pop(start, None)
        if before is not None:
            self._remove(before, start - before)
            start = before
        self._put(start, end)

    def _put(self, start: int, end: int) -> None:
        size = end - start
        self._free[start] = size
        self._ends[end] = start
        number = size.bit_length()
        key = -(size << _SHIFT | start)
        bucket = self._buckets.get(number)
        if bucket:
            insort(bucket, key)
        else:
            self._buckets[number] = [key]
            self._filled |= 1 << number

    def _remove(self, start: int, size: int) -> None:
        """Forget a free extent's size."""
        number = size.bit_length()
        bucket = self._buckets[number]
        del bucket[bisect_left(bucket, -(size << _SHIFT | start))]
        if not bucket:
            self._filled ^= 1 << number
