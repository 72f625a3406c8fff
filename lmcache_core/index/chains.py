"""Which chunks need which: a prefix is a chain, and what makes room is a chunk that no other needs.

The way from a chunk to one that nothing needs is not walked, which takes as many steps as a prompt has chunks, at every
eviction. Chunks that follow each other are on one `Line`, which knows the last of them. Lines are joined as in
union-find, so that a step costs next to nothing on average, whatever the order in which chunks come and go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_core.index.entries import Entry


class Table:
    """Entries by key. Nearly all keys have one entry, which then takes no collection of its own; where many share a
    key, the first is found at once however many have gone before it."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[bytes, Entry | OrderedDict[Entry, None]] = {}

    def add(self, key: bytes, entry: Entry) -> None:
        """Put an entry under a key."""
        held = self._found.setdefault(key, entry)
        if held is not entry:
            if not isinstance(held, OrderedDict):
                held = self._found[key] = OrderedDict.fromkeys([held])
            held[entry] = None

    def add_all(self, keys: tuple[bytes, ...], entry: Entry) -> None:
        """Put an entry under several keys."""
        put = self._found.setdefault
        for key in keys:
            if put(key, entry) is not entry:
                self.add(key, entry)

    def discard_all(self, keys: tuple[bytes, ...], entry: Entry) -> None:
        """Undo `add_all`."""
        found = self._found
        for key in keys:
            if found.get(key) is entry:
                del found[key]
            else:
                self.discard(key, entry)

    def discard(self, key: bytes, entry: Entry) -> bool:
        """Undo `add`; returns whether it was there."""
        held = self._found.get(key)
        if held is entry:
            del self._found[key]
            return True
        if not isinstance(held, OrderedDict) or entry not in held:
            return False
        del held[entry]
        if len(held) == 1:
            self._found[key] = next(iter(held))
        return True

    def first(self, key: bytes) -> Entry | None:
        """One of the entries of a key."""
        held = self._found.get(key)
        return next(iter(held)) if isinstance(held, OrderedDict) else held

    def of(self, key: bytes) -> Iterator[Entry]:
        """All entries of a key."""
        held = self._found.get(key)
        if isinstance(held, OrderedDict):
            yield from held
        elif held is not None:
            yield held

    def __contains__(self, key: bytes) -> bool:
        return key in self._found

    def __len__(self) -> int:
        return len(self._found)


class Line:
    """Chunks of which each needs one in front of it, down to `tip`. `into` is the line it has become a part of."""

    __slots__ = ("into", "length", "tip")

    def __init__(self, tip: Entry) -> None:
        self.tip: Entry | None = tip
        self.into: Line | None = None
        self.length = 1


class Chains(Table):
    """Chunks by the one that they need.

    Args:
        chunks, staged: Where the chunk that another needs is looked up by its key.
    """

    __slots__ = ("_chunks", "_staged", "steps")

    def __init__(self, chunks: Mapping[bytes, Entry], staged: Mapping[bytes, Entry]) -> None:
        super().__init__()
        self._chunks = chunks
        self._staged = staged
        self.steps = 0
        """Steps from chunk to chunk so far, which is what would grow if a chain were walked."""

    def adopt(self, entry: Entry) -> None:
        """Note that `entry` needs the chunk in front of it."""
        parent = entry.parent
        if entry.key in self._found and entry.line is None:
            behind = self.first(entry.key)
            assert behind is not None
            entry.line = self._line(behind)
            entry.line.length += 1
        if not parent:
            return
        if self._found.setdefault(parent, entry) is not entry:
            self.add(parent, entry)
        front = self._staged.get(parent) or self._chunks.get(parent)
        if front is None:
            return
        line = front.line
        if line is None or line.into is not None:
            line = self._line(front)
        if line.tip is not front:
            return  # a fork: the lines are joined when the tip has gone
        if entry.line is None:
            entry.line = line
            line.length += 1
            line.tip = entry
        else:
            own = self._line(entry)
            self._join(line, own, own.tip)

    def orphan(self, entry: Entry) -> bool:
        """Undo `adopt`; returns whether there was anything to undo."""
        parent, line = entry.parent, entry.line
        if line is not None:
            if line.into is not None:
                line = self._line(entry)
            entry.line = None
            if line.tip is entry:
                front = self._chunks.get(parent) or self._staged.get(parent)
                line.tip = front if front is not None and front.line and self._line(front) is line else None
        if parent:
            if self._found.get(parent) is entry:
                del self._found[parent]
                return True
            return self.discard(parent, entry) or line is not None
        return line is not None

    def leaf(self, entry: Entry) -> Entry:
        """A chunk behind `entry` that no other needs; `entry` itself if none needs it. What a tier tells of its chunks
        may be nonsense: a chunk that is its own ancestor ends the search."""
        line = self._line(entry)
        tip = line.tip or entry
        seen = {entry}
        while (behind := self.first(tip.key)) is not None and behind not in seen:
            self.steps += 1
            seen.add(behind)
            other = self._line(behind)
            tip = behind if other is line else other.tip or behind
            line = self._join(line, other, tip)
        line.tip = tip
        return tip

    def _line(self, entry: Entry) -> Line:
        line = entry.line
        if line is None:
            line = entry.line = Line(entry)
        elif line.into is not None:
            while line.into is not None:
                self.steps += 1
                if line.into.into is not None:
                    line.into = line.into.into
                line = line.into
            entry.line = line
        return line

    @staticmethod
    def _join(one: Line, other: Line, tip: Entry | None) -> Line:
        if one is not other:
            if one.length < other.length:
                one, other = other, one
            other.into = one
            other.tip = None
            one.length += other.length
        one.tip = tip
        return one
