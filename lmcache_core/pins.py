"""What has been pinned: by one client, whose pins end with it, or for good and within bounds, by anybody."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from lmcache_core.errors import UsageError
from lmcache_core.index import Entry, Index
from lmcache_core.index.decisions import Found
from lmcache_core.index.residency import CPU
from lmcache_core.units import format_size

MOST_KEPT = 4096
"""Pins that a node keeps."""
KEPT_PART = 2
"""The part of the smallest place, as a divisor, that they may hold: the rest stays room for what engines store."""
_LISTED = 5
"""Models that an error names."""

Name = tuple[bytes, ...]
"""Digest of a space, and the keys of a prompt."""


class Unpinned(NamedTuple):
    """Outcome of an unpin: pages of chunks that are pinned no longer, how often the prompt is still pinned by the same
    owner, and whether it had been."""

    pages: int
    left: int
    was: bool


class Pins:
    """Pins of one client. What each has found is kept: what is found when it ends may be something else. Guarded by the
    mutex."""

    def __init__(self) -> None:
        self._found: dict[Name, list[Found]] = {}

    def add(self, index: Index, name: Name, found: Found) -> None:
        """Pin what was found of a prompt."""
        if found.pieces:
            index.pin(piece.entry for piece in found.pieces)
            self._found.setdefault(name, []).append(found)

    def remove(self, index: Index, name: Name) -> Unpinned:
        """Undo one `add`."""
        pins = self._found.get(name)
        if pins is None:
            return Unpinned(0, 0, False)
        pieces = pins.pop().pieces
        if not pins:
            del self._found[name]
        last = [piece for piece in pieces if piece.entry.pins == 1 and piece.entry in index.pinned]
        freed = sum(piece.pages for piece in last if piece.group == 0)
        index.unpin(piece.entry for piece in pieces)
        return Unpinned(freed, len(pins), True)

    def clear(self, index: Index) -> int:
        """Undo all. Returns how many chunks are pinned no longer."""
        pieces = [piece for pins in self._found.values() for found in pins for piece in found.pieces]
        self._found.clear()
        return index.unpin(piece.entry for piece in pieces)


class KeptPins(Pins):
    """Pins that outlive who asked for them. Together they hold at most half of the smallest place."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: Counter[Entry] = Counter()

    def add(self, index: Index, name: Name, found: Found) -> None:
        """See `Pins`.

        Raises:
            UsageError: They would be too many, or hold too much.
        """
        self._check(index, found)
        super().add(index, name, found)
        self._entries.update(piece.entry for piece in found.pieces)

    def remove(self, index: Index, name: Name) -> Unpinned:
        """See `Pins`."""
        for piece in self._found[name][-1].pieces if name in self._found else ():
            self._entries[piece.entry] -= 1
            if self._entries[piece.entry] < 1:
                del self._entries[piece.entry]
        return super().remove(index, name)

    def clear(self, index: Index) -> int:
        """See `Pins`."""
        self._entries.clear()
        return super().clear(index)

    def entries(self, index: Index) -> list[Entry]:
        """The chunks that are pinned so, without those that have gone since."""
        return [entry for entry in self._entries if entry in index.pinned]

    @staticmethod
    def room(index: Index) -> tuple[int, str]:
        """Most bytes that they may hold, and the place whose size says so. A chunk may come to be in every place."""
        rooms = [(index.pool.capacity, CPU)]
        for tier in index.tiers:
            if tier.rules.evictable and tier.capacity is not None:
                rooms.append((tier.capacity, tier.rules.name))
        nbytes, place = min(rooms, key=lambda room: room[0])
        return nbytes // KEPT_PART, place

    def _check(self, index: Index, found: Found) -> None:
        if sum(map(len, self._found.values())) >= MOST_KEPT:
            self._forget_gone(index)
        pins = sum(map(len, self._found.values()))
        if pins >= MOST_KEPT:
            raise UsageError(f"the node keeps {pins} pins, and no more; {_ADVICE}")
        kept = self.entries(index)
        new = {piece.entry for piece in found.pieces}.difference(kept)
        held, more = sum(entry.nbytes for entry in kept), sum(entry.nbytes for entry in new)
        most, place = self.room(index)
        if new and held + more > most:
            raise UsageError(
                f"kept pins hold at most {format_size(most)}, half of {place}: they hold {_by_model(kept)}, and this "
                f"prompt needs {format_size(more)} more; {_ADVICE}"
            )

    def _forget_gone(self, index: Index) -> None:
        """Forget pins of which nothing is there."""
        for name, pins in list(self._found.items()):
            if not any(piece.entry in index.pinned for found in pins for piece in found.pieces):
                del self._found[name]
        self._entries = Counter(
            piece.entry for pins in self._found.values() for found in pins for piece in found.pieces
        )


_ADVICE = "undo some with: lmcache-core unpin FILE; or all with: lmcache-core unpin --all"


def _by_model(entries: list[Entry]) -> str:
    held: Counter[str] = Counter()
    for entry in entries:
        held[entry.space.owner.name] += entry.nbytes
    if not held:
        return "nothing"
    told = ", ".join(f"{format_size(nbytes)} of {model}" for model, nbytes in held.most_common(_LISTED))
    return told + (f" and of {len(held) - _LISTED} more models" if len(held) > _LISTED else "")
