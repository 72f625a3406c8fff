"""Which parts of a range of bytes are free: best-fit allocation of extents, by plain arithmetic without I/O.

Free extents are kept three times: by start and by end, so that a freed extent finds its neighbours, and by size, so
that an allocation finds the smallest that fits. Each size has a heap of starts. An extent that is cut or joined stays
in its heap, out of date, until the heap's top is looked at or half of all entries are out of date. So no operation
looks at all extents; only `take` needs them in order, and sorts them once for a run of `take`s.

Not thread-safe: the owner has a lock of its own around it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from heapq import heappop, heappush

from lmcache_core.errors import UsageError

__all__ = ["ExtentAllocator"]

_STALE_LIMIT = 256
_TOO_SMALL = "an extent has at least one byte, not {}"


class ExtentAllocator:
    """Hands out extents of `[0, capacity)`, each starting at and as long as a multiple of `unit` bytes.

    The smallest free extent that fits is cut, at its start; of several, the one at the lowest offset.
    """

    __slots__ = (
        "_capacity",
        "_ends",
        "_entries",
        "_free",
        "_free_bytes",
        "_heaps",
        "_ordered",
        "_sizes",
        "_used",
        "unit",
    )

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
        self._heaps: dict[int, list[int]] = {}  # size -> starts, some of them out of date
        self._sizes: list[int] = []  # keys of _heaps in order
        self._entries = 0  # in all heaps
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
        sizes = self._sizes
        while sizes and self._lowest(sizes[-1]) is None:
            pass
        return sizes[-1] if sizes else 0

    def allocate(self, nbytes: int) -> int | None:
        """Take `nbytes`, rounded up to whole units, and return the offset; None when no free extent is that large.

        Raises:
            UsageError: `nbytes` is not positive.
        """
        if nbytes < 1:
            raise UsageError(_TOO_SMALL.format(nbytes))
        size = -(-nbytes // self.unit) * self.unit
        sizes = self._sizes
        at = bisect_left(sizes, size)
        while at < len(sizes):
            found = sizes[at]
            start = self._lowest(found)  # when there is none, sizes[at] is the next size now
            if start is not None:
                self._ordered = None
                del self._free[start]
                if found > size:
                    self._put(start + size, start + found)
                else:
                    del self._ends[start + size]
                self._used[start] = size
                self._free_bytes -= size
                return start
        return None

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
        self._free, self._ends, self._entries, self._ordered = {}, {}, 0, None
        self._used = used
        self._free_bytes = self._capacity - sum(used.values())
        last = 0
        for offset, size in used.items():
            if offset > last:
                self._free[last] = offset - last
                self._ends[offset] = last
            elif offset < last:
                raise UsageError(f"cannot take {size} bytes at {offset}: it is taken up to {last}")
            last = offset + size
        if last < self._capacity:
            self._free[last] = self._capacity - last
            self._ends[self._capacity] = last
        elif last > self._capacity:
            raise UsageError(f"cannot take up to {last}: there are {self._capacity} bytes")
        self._rebuild()

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
            end += after
        before = ends.pop(start, None)
        if before is not None:
            start = before
        self._put(start, end)

    def _put(self, start: int, end: int) -> None:
        size = end - start
        self._free[start] = size
        self._ends[end] = start
        heap = self._heaps.get(size)
        if heap is None:
            self._heaps[size] = [start]
            insort(self._sizes, size)
        else:
            heappush(heap, start)
        self._entries += 1
        if self._entries > 2 * len(self._free) + _STALE_LIMIT:
            self._rebuild()

    def _lowest(self, size: int) -> int | None:
        """Where the first free extent of exactly `size` starts. A size that has none is forgotten."""
        heap, free = self._heaps[size], self._free
        while heap:
            if free.get(heap[0]) == size:
                return heap[0]
            heappop(heap)
            self._entries -= 1
        del self._heaps[size]
        del self._sizes[bisect_left(self._sizes, size)]
        return None

    def _rebuild(self) -> None:
        """Drop all entries that are out of date."""
        heaps: dict[int, list[int]] = {}
        for start in sorted(self._free):  # a sorted list is a heap
            heaps.setdefault(self._free[start], []).append(start)
        self._heaps = heaps
        self._sizes = sorted(heaps)
        self._entries = len(self._free)
