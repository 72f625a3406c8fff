"""Where a stored prefix ends, found with few questions: for tiers where each costs a round trip. Pure.

Chunks of a prompt are written from head to tail and expire in that order, so those that are stored are the first ones,
mostly none or all of them. A conclusion that is wrong all the same is found out when the chunk is read.
"""

from __future__ import annotations

from collections.abc import Sequence

QUESTIONS = 12
"""Enough for 1,024 chunks."""


class PrefixSearch:
    """The search for how many of `count` chunks are stored, in rounds: ask for `next()` at once, then `tell`.

    Args:
        count: Chunks of the prompt.
        questions: How many may be asked. If that is too few, what is surely stored counts only.
    """

    def __init__(self, count: int, questions: int = QUESTIONS) -> None:
        self.stored = 0
        """Chunks that are stored as far as is known."""
        self._limit = count
        """Chunks that may be stored."""
        self._left = questions
        self._first = True

    def next(self) -> list[int]:
        """Numbers of the chunks to ask for, ascending; none when the end is found."""
        low, high = self.stored, self._limit
        unknown = high - low
        if unknown < 1 or self._left < 1:
            return []
        if self._first:
            return sorted({low, high - 1})[: self._left]
        at_once = 1
        while _halvings(unknown // (at_once + 2)) <= self._left - at_once - 1:
            at_once += 1  # as many as leave enough for a search of the part that they leave
        at_once = min(at_once, unknown, self._left)
        return sorted({low + unknown * number // (at_once + 1) for number in range(1, at_once + 1)})

    def tell(self, asked: Sequence[int], stored: Sequence[bool]) -> None:
        """Which of the chunks `asked` for are stored."""
        self._first = False
        self._left -= len(asked)
        for number, there in zip(asked, stored, strict=True):
            if not there:
                self._limit = min(self._limit, number)
                break
            self.stored = max(self.stored, number + 1)


def _halvings(unknown: int) -> int:
    """Questions, one after the other, that find the end among so many chunks."""
    return unknown.bit_length()
