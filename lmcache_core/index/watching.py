"""Watches: who wants to hear which pages of a namespace come to a place and leave it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["MOST_CHANGES", "Change", "Watch"]

MOST_CHANGES = 100_000
"""Changes that wait to be taken; older ones are lost beyond."""


class Change(NamedTuple):
    """A chunk has come to a place, or has left it."""

    pages: Sequence[bytes]
    """Keys of its pages."""
    place: int
    there: bool


class Watch:
    """Changes of one group, in order. Written under the index's mutex, taken by one thread."""

    def __init__(self) -> None:
        self.lost = 0
        """Changes that nobody has taken in time."""
        self._changes: deque[Change] = deque()

    def changed(self, pages: Sequence[bytes], place: int, there: bool) -> None:
        """Note a change."""
        if len(self._changes) >= MOST_CHANGES:
            self._changes.popleft()
            self.lost += 1
        self._changes.append(Change(pages, place, there))

    def take(self) -> list[Change]:
        """Changes since this was last asked, the oldest first."""
        changes = []
        for _ in range(len(self._changes)):
            try:
                changes.append(self._changes.popleft())
            except IndexError:  # the index has dropped it meanwhile
                break
        return changes
