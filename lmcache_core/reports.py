"""What tiers report (`TierEvents`), told to the index and to whoever waits. Runs on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from lmcache_core.counts import Counts
from lmcache_core.guard import IndexGuard, batches
from lmcache_core.index import Index, Space
from lmcache_core.index.decisions import Load, Write
from lmcache_core.protocols import ReadResult, Stored, Usage, WriteResult


class Reports:
    """Of all tiers of a node. Once its index cannot be trusted any more, reports only end waiting.

    Args:
        guard: The index.
        counts: Where to count.
        usage: What the backend of a tier, by number, tells of its usage.
    """

    def __init__(self, guard: IndexGuard, counts: Counts, usage: Callable[[int], Usage | None]) -> None:
        self._guard = guard
        self._counts = counts
        self._usage = usage
        self.manifests: dict[bytes, bytes] = {}
        """What tiers say of spaces of which they have chunks, by digest. Guarded by the mutex."""

    @contextmanager
    def _report(self) -> Iterator[Index | None]:
        guard = self._guard
        with guard.mutex:
            yield None if guard.broken else guard.index
        guard.wake()

    def _name(self, number: int) -> str:
        return self._guard.index.tiers[number].rules.name

    def loaded(self, load: Load, result: ReadResult | None, seconds: float) -> None:
        """See `TierEvents`."""
        told, hit = True, False
        with self._report() as index:
            if index is not None:
                told = index.loaded(load, result)
                if result is ReadResult.HIT:
                    self._counts.add("read_seconds", self._name(load.tier), seconds)
                hit = load.entry.slot is load.slot
            waiters = _pop(load) if told else []
        _tell(waiters, hit)

    def measured(self, number: int, nbytes: int, seconds: float) -> None:
        """See `TierEvents`."""
        with self._guard.mutex:
            if not self._guard.broken:
                self._guard.index.measured(self._guard.index.tiers[number], nbytes, seconds)

    def patience(self, number: int, nbytes: int) -> float | None:
        """See `TierEvents`."""
        with self._guard.mutex:
            index = self._guard.index
            return None if self._guard.broken else index.patience(index.tiers[number], nbytes)

    def overdue(self, load: Load) -> bool:
        """See `TierEvents`."""
        with self._report() as index:
            return index is not None and index.overdue(load)

    def dropped(self, load: Load) -> None:
        """See `TierEvents`."""
        with self._report() as index:
            if index is not None:
                index.dropped(load)
            waiters = _pop(load)
        _tell(waiters, False)

    def gave_up(self, load: Load) -> None:
        """See `TierEvents`."""
        with self._report() as index:
            waiters = _pop(load) if index is None or index.gave_up(load) else []
        _tell(waiters, False)

    def wrote(self, write: Write, result: WriteResult | None, seconds: float) -> None:
        """See `TierEvents`."""
        told = True
        with self._report() as index:
            if index is not None:
                told = index.wrote(write, result)
                if result is WriteResult.STORED:
                    self._counts.add("write_seconds", self._name(write.tier), seconds)
                elif result is None:
                    self._counts.add("failed_writes", self._name(write.tier))
            waiters = _pop(write) if told else []
        _tell(waiters, result is WriteResult.STORED)

    def late_write(self, write: Write) -> None:
        """See `TierEvents`."""
        with self._report() as index:
            write.late = True
            if index is not None:
                self._counts.add("late_writes", self._name(write.tier))
            waiters = _pop(write)
        _tell(waiters, False)

    def counted(self, number: int, counts: Mapping[str, float]) -> None:
        """See `TierEvents`."""
        with self._guard.mutex:
            for name, amount in counts.items():
                self._counts.add(name, self._name(number), amount)

    def opened(self, number: int) -> None:
        """See `TierEvents`."""
        with self._report() as index:
            if index is not None:
                index.tier_opened(index.tiers[number])
                self.measure(index, number)

    def lost(self, number: int) -> None:
        """See `TierEvents`."""
        with self._report() as index:
            if index is not None:
                index.set_up(index.tiers[number], False)
                self._counts.add("opened_breakers", self._name(number))

    async def reset(self, number: int) -> None:
        """See `TierEvents`. The loop and the mutex are others' between turns; the tier is down, so that it gets nothing
        new meanwhile."""
        with self._guard.mutex:
            spaces = list(self._guard.index.spaces.values())
        for space in spaces:
            with self._guard.mutex:
                entries = list(space.chunks.values())
            for batch in batches(entries):
                with self._report() as index:
                    if index is not None:
                        index.reset_tier(index.tiers[number], batch)
                await asyncio.sleep(0)

    def learned(self, number: int, space: Space, found: Sequence[tuple[tuple[bytes, ...], bytes]]) -> None:
        """A tier that cannot be listed holds chunks of those pages and parents."""
        with self._report() as index:
            if index is not None:
                for pages, parent in found:
                    index.learned(index.tiers[number], space, pages, parent)

    def described(self, manifests: Mapping[bytes, bytes]) -> None:
        """See `TierEvents`."""
        with self._report() as index:
            if index is not None:
                self.manifests |= {digest: each for digest, each in manifests.items() if digest in index.spaces}

    def scanned(self, number: int, batch: Sequence[Stored]) -> None:
        """See `TierEvents`."""
        with self._report() as index:
            if index is not None:
                index.scanned(index.tiers[number], batch)

    def tick(self) -> None:
        """Time has passed."""
        with self._report() as index:
            if index is not None:
                for tier in index.tiers:
                    self.measure(index, tier.number)
                index.tick()

    def measure(self, index: Index, number: int) -> None:
        """A backend's own word on its capacity goes before the configured one if it is smaller."""
        tier, usage = index.tiers[number], self._usage(number)
        if usage is not None and usage.capacity is not None:
            configured = tier.rules.capacity
            tier.capacity = usage.capacity if configured is None else min(configured, usage.capacity)


def _pop(work: Load | Write) -> list[Callable[[bool], None]]:
    """Who waits, taken under the mutex: nobody can be added unseen, or be told twice."""
    waiters, work.waiters = work.waiters, []
    return waiters


def _tell(waiters: list[Callable[[bool], None]], outcome: bool) -> None:
    for waiter in waiters:
        waiter(outcome)
