"""Eviction order of one tier: LRU, and S3-FIFO, which one long scan cannot flush.

A policy only orders; the index decides whether a candidate may go. Nothing here locks: the index's mutex guards it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from lmcache_core.index.entries import Entry

PolicyName = Literal["lru", "s3fifo"]
_BATCH = 32


class Policy(Protocol):
    """Orders the entries of a tier for eviction."""

    def add(self, entry: Entry) -> None:
        """Take in an entry that became resident. Adding it again is a touch."""
        ...

    def touch(self, entry: Entry) -> None:
        """Note a use. Unknown entries are passed over."""
        ...

    def discard(self, entry: Entry) -> None:
        """Forget an entry that is resident no longer, if it is known."""
        ...

    def candidates(self) -> Iterator[Entry]:
        """Entries in the order in which they should go. The caller may discard each one that it is given, or others in
        its place, and stops when it has enough. Ends after having offered every entry that is left once."""
        ...

    def defer(self, entry: Entry) -> None:
        """The entry just offered cannot go for long: from now on it is offered after all others."""
        ...

    def put_back(self, entries: Sequence[Entry]) -> None:
        """Entries that were offered and discarded, in that order, stay after all: they are the next to be offered."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Entry]:
        """All entries, about in the order in which they should go."""
        ...


class Lru:
    """Least recently used first."""

    def __init__(self) -> None:
        self._order: OrderedDict[Entry, None] = OrderedDict()

    def add(self, entry: Entry) -> None:
        """See `Policy`."""
        self._order[entry] = None
        self._order.move_to_end(entry)

    def touch(self, entry: Entry) -> None:
        """See `Policy`."""
        if entry in self._order:
            self._order.move_to_end(entry)

    def discard(self, entry: Entry) -> None:
        """See `Policy`."""
        self._order.pop(entry, None)

    def candidates(self) -> Iterator[Entry]:
        """See `Policy`."""
        order = self._order
        left = len(order)
        while left:  # mostly the first may go
            entry = next(iter(order), None)
            if entry is None:
                return
            left -= 1
            yield entry
            if next(iter(order), None) is entry:
                break
        kept = 1
        while batch := list(islice(order, kept, kept + min(_BATCH, left))):
            left -= len(batch)
            for entry in batch:
                if entry not in order:  # it has gone in the place of one before it
                    continue
                last = next(reversed(order)) is entry
                yield entry
                if entry in order and (last or next(reversed(order)) is not entry):
                    kept += 1  # neither discarded nor deferred

    def defer(self, entry: Entry) -> None:
        """See `Policy`."""
        self._order.move_to_end(entry)

    def put_back(self, entries: Sequence[Entry]) -> None:
        """See `Policy`."""
        for entry in reversed(entries):
            self._order[entry] = None
            self._order.move_to_end(entry, last=False)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._order)


class S3Fifo:
    """S3-FIFO (Yang et al., SOSP 2023, "FIFO queues are all you need for cache eviction").

    New entries enter a small queue, a tenth of all bytes. Those not used while there leave first, and are remembered
    as ghosts; those used, and ghosts that return, live in the main queue, where each use (three at most) is one more
    round. Queues are measured in bytes, since a tail is smaller than a full chunk.
    """

    SMALL_SHARE = 0.1
    MOST_USES = 3
    MOST_SPARED = 1024
    """Entries that one search may give another round: it must end soon even if everything has been used."""

    def __init__(self) -> None:
        self._small: OrderedDict[Entry, int] = OrderedDict()
        self._main: OrderedDict[Entry, int] = OrderedDict()
        self._ghosts: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()
        self._small_bytes = 0
        self._main_bytes = 0

    def add(self, entry: Entry) -> None:
        """See `Policy`."""
        if entry in self._small or entry in self._main:
            self.touch(entry)
        elif self._ghosts.pop(entry.ident, 0) is None:
            self._main[entry] = 0
            self._main_bytes += entry.nbytes
        else:
            self._small[entry] = 0
            self._small_bytes += entry.nbytes

    def touch(self, entry: Entry) -> None:
        """See `Policy`."""
        queue = self._small if entry in self._small else self._main
        uses = queue.get(entry)
        if uses is not None:
            queue[entry] = min(uses + 1, self.MOST_USES)

    def discard(self, entry: Entry) -> None:
        """See `Policy`."""
        uses = self._small.pop(entry, None)
        if uses is not None:
            self._small_bytes -= entry.nbytes
            if not uses:
                self._remember(entry)
        elif self._main.pop(entry, None) is not None:
            self._main_bytes -= entry.nbytes

    def candidates(self) -> Iterator[Entry]:
        """See `Policy`."""
        kept: set[Entry] = set()
        spared = 0
        while self._small or self._main:
            total = self._small_bytes + self._main_bytes
            from_small = self._small and (self._small_bytes > total * self.SMALL_SHARE or not self._main)
            queue = self._small if from_small else self._main
            entry = next(iter(queue))
            if entry in kept:
                yield from self._rest(kept)
                return
            if queue[entry] and spared < self.MOST_SPARED:
                self._another_round(entry)
                spared += 1
                continue
            yield entry
            if entry in queue:  # it may not go now: let those behind it come up
                queue.move_to_end(entry)
                kept.add(entry)

    def defer(self, entry: Entry) -> None:
        """See `Policy`. Whatever is offered and stays is behind the others then."""

    def put_back(self, entries: Sequence[Entry]) -> None:
        """See `Policy`."""
        for entry in reversed(entries):
            if self._ghosts.pop(entry.ident, 0) is None:
                queue = self._small
                self._small_bytes += entry.nbytes
            else:
                queue = self._main
                self._main_bytes += entry.nbytes
            queue[entry] = 0
            queue.move_to_end(entry, last=False)

    def _rest(self, kept: set[Entry]) -> Iterator[Entry]:
        for entry in [*self._small, *self._main]:
            if entry not in kept and (entry in self._small or entry in self._main):
                yield entry

    def _another_round(self, entry: Entry) -> None:
        uses = self._small.pop(entry, None)
        if uses is None:
            self._main[entry] -= 1
            self._main.move_to_end(entry)
            return
        self._small_bytes -= entry.nbytes
        self._main[entry] = 0
        self._main_bytes += entry.nbytes

    def _remember(self, entry: Entry) -> None:
        self._ghosts[entry.ident] = None
        while len(self._ghosts) > max(64, len(self)):
            self._ghosts.popitem(last=False)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __iter__(self) -> Iterator[Entry]:
        yield from self._small
        yield from self._main


def make_policy(name: PolicyName) -> Policy:
    """A new policy by its name in the configuration."""
    return Lru() if name == "lru" else S3Fifo()
