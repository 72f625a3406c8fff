"""KV that is stored late: not when it has been computed, but before the engine gives its blocks to others.

What an engine has computed it keeps for a while and finds again itself. Stored at once, all of that is in two memories;
stored just before it goes, little is. Here is known what is in which blocks, chunk by chunk, and in each step the
engine's free blocks are looked at, the one that it takes next first: chunks with a block within a window of them are
stored. The window follows from measured rates and from how much may be lost, see `lmcache_core.planning`. Where so few
are free that a request which ends may be overtaken by one that takes its blocks, all is stored as it is computed.

What is in a block is as the engine has it: a chunk is stored as long as its blocks hold what the engine would find
again in them. An engine does not wait for a store. What it takes before is lost, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from lmcache_core.connectors.vllm.counters import Counts
from lmcache_core.planning.stalls import smallest_window
from lmcache_core.planning.window import OffloadWindow

__all__ = ["Memory", "Offloading", "Piece", "Rate"]

SHARE = 0.5
"""Of the time of a step, for which stores of free blocks may copy."""
LATEST = 64
"""Steps, or copies, that count for a rate."""
LONG = 4096
"""Steps in which the most that one of them has taken is forgotten: prompts come after many steps that take little."""
EVERY = 32
"""Steps after which the window's size is chosen anew."""


class Memory(Protocol):
    """The blocks of an engine, as it tells of them."""

    blocks: int
    """How many there are."""

    def free(self) -> Iterator[int]:
        """Blocks that no request uses, the one that is taken next first."""
        ...

    def content(self, block: int) -> Any:
        """What the engine finds a block by whose KV it would use again; None if it would not."""
        ...


@dataclass(eq=False, slots=True)
class Piece:
    """A chunk, or the beginning of one, in blocks of the engine."""

    keys: Sequence[bytes]
    """Of the prompt's pages, up to `end` at least."""
    first: int
    end: int
    """Pages `[first, end)`."""
    blocks: tuple[int, ...]
    contents: tuple[Any, ...]
    places: Sequence[str] | None
    """Tiers that it is stored to."""
    step: int
    """When it was learned of last."""
    saved: bool = False

    @property
    def key(self) -> bytes:
        """That of its last page, which stands for all in front of it too."""
        return self.keys[self.end - 1]

    @property
    def pages(self) -> int:
        """How many."""
        return self.end - self.first


class Rate:
    """Pages a second, over the latest of whatever is measured."""

    def __init__(self) -> None:
        self._pages = self._seconds = 0.0

    def add(self, pages: int, seconds: float) -> None:
        """So many in so long."""
        keep = 1 - 1 / LATEST
        self._pages, self._seconds = self._pages * keep + pages, self._seconds * keep + seconds

    @property
    def value(self) -> float | None:
        """None while nothing has been measured."""
        return self._pages / self._seconds if self._pages > 0 and self._seconds > 0 else None


class Offloading:
    """See the module.

    Args:
        memory: Of the engine.
        counts: Where to count what has been lost.
        losses: The most that steps may be which lose something, of all, as far as a window can see to it.
        step_tokens: Most tokens that a step computes.
        page_tokens: Tokens of a page.
        page_blocks: Blocks of a page.
        chunk_pages: Pages of a chunk.
        clock: In seconds.
    """

    def __init__(
        self,
        memory: Memory,
        counts: Counts,
        *,
        losses: float,
        step_tokens: int,
        page_tokens: int,
        page_blocks: int,
        chunk_pages: int,
        clock: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._counts = counts
        self._losses = losses
        self._page_tokens = page_tokens
        self._page_blocks = page_blocks
        self._chunk_pages = chunk_pages
        self._clock = clock
        self._pieces: dict[bytes, Piece] = {}
        """By the key of their last page, those learned of last at the end."""
        self._by_block: dict[int, dict[bytes, int]] = {}
        """Of each block, pieces with it and its place in each."""
        self._window: OffloadWindow[bytes] = OffloadWindow(1)
        self._steps = 0
        self._in_flight = 0
        self._since = 0.0
        self._busy = Rate()
        """Steps by their time, in place of pages."""
        self._taken = Rate()
        self._copied = Rate()
        self._taken_now = 0
        self._fewest = max(1, -(-step_tokens // page_tokens))
        """Pages that a step may take, whatever steps have taken so far."""
        self._burst = float(self._fewest)
        self._blocks = 1
        """Size of the window."""

    @property
    def blocks(self) -> int:
        """Free blocks that are looked at."""
        return self._blocks

    # What is where

    def learn(
        self, keys: Sequence[bytes], first: int, end: int, blocks: Sequence[int], places: Sequence[str] | None
    ) -> None:
        """Pages `[first, end)` of a prompt will be in these blocks when this step has ended; `first` begins a chunk."""
        for start in range(first, end, self._chunk_pages):
            stop = min(start + self._chunk_pages, end)
            ids = tuple(blocks[(start - first) * self._page_blocks : (stop - first) * self._page_blocks])
            contents = tuple(self._memory.content(block) for block in ids)
            known = next((number for number, each in enumerate(contents) if each is None), len(ids))
            stop = start + known // self._page_blocks
            if stop > start:
                size = (stop - start) * self._page_blocks
                self._add(Piece(keys, start, stop, ids[:size], contents[:size], places, self._steps))

    def _add(self, piece: Piece) -> None:
        key = piece.key
        old = self._pieces.get(key)
        piece.saved = key in self._window or (old is not None and old.saved)
        if old is not None:
            self._drop(old)
        self._pieces[key] = piece
        for place, block in enumerate(piece.blocks):
            self._by_block.setdefault(block, {})[key] = place
        for block, content in zip(piece.blocks, piece.contents, strict=True):
            for other_key, place in list(self._by_block.get(block, {}).items()):
                other = self._pieces.get(other_key)
                if other is None or other_key == key:
                    continue
                if other.contents[place] != content:
                    self._lose(other)
                elif other.first == piece.first and other.end < piece.end:
                    self._drop(other)  # the same, and less of it

    def _drop(self, piece: Piece) -> None:
        del self._pieces[piece.key]
        for block in piece.blocks:
            there = self._by_block[block]
            del there[piece.key]
            if not there:
                del self._by_block[block]

    def _lose(self, piece: Piece) -> None:
        """Its blocks hold something else."""
        self._drop(piece)
        if piece.saved:
            return
        left = self._left(piece)
        self._counts["lost_tokens", ""] += (piece.pages - left) * self._page_tokens
        if left and not self._part_of_another(piece, left):
            size, end = left * self._page_blocks, piece.first + left
            blocks, contents = piece.blocks[:size], piece.contents[:size]
            self._add(Piece(piece.keys, piece.first, end, blocks, contents, piece.places, piece.step))

    def _part_of_another(self, piece: Piece, pages: int) -> bool:
        """Whether the first pages of a piece begin another one, too."""
        others = (self._pieces[key] for key in self._by_block.get(piece.blocks[0], ()))
        end = piece.first + pages
        return any(
            each.first == piece.first and each.end >= end and each.keys[end - 1] == piece.keys[end - 1]
            for each in others
        )

    def _left(self, piece: Piece) -> int:
        """Pages from its start on that are still in their blocks."""
        contents = zip(piece.blocks, piece.contents, strict=True)
        there = next(
            (number for number, (block, content) in enumerate(contents) if self._memory.content(block) != content),
            len(piece.blocks),
        )
        return there // self._page_blocks

    def doubt(self) -> None:
        """Of what the last steps have computed some is nonsense: all that was learned in them is forgotten."""
        for piece in list(self._pieces.values()):
            if piece.step >= self._steps - 2:  # one may be under way that was planned before it was known
                self._drop(piece)

    def clear(self) -> None:
        """Forget all."""
        self._pieces.clear()
        self._by_block.clear()

    # How fast

    def took(self, pages: int) -> None:
        """The engine has taken so many pages for the step that is being planned, whatever for: also for a request that
        uses again what is in them."""
        self._taken_now += pages

    def ended(self) -> None:
        """A step has ended."""
        if not self._in_flight:
            return  # it computed nothing
        now = self._clock()
        self._in_flight -= 1
        self._busy.add(1, now - self._since)
        self._taken.add(self._taken_now, now - self._since)
        self._taken_now = 0
        self._since = now

    def gathered(self, pages: int, seconds: float) -> None:
        """A worker has copied so many pages out of blocks."""
        self._copied.add(pages, seconds)

    def _choose_size(self) -> None:
        """Blocks that must be looked at so that no more is lost than may be: whole bursts of what a step takes."""
        burst = max(1, math.ceil(self._burst))
        taken, copied = self._taken.value, self._copied.value
        pages: int | None = 2 * burst
        if taken is not None and copied is not None:
            pages = smallest_window(taken, copied, self._losses, burst=burst, waits=False)
        least = burst * self._page_blocks
        most = max(least, self._memory.blocks // 2)
        self._blocks = most if pages is None else min(max(least, pages * self._page_blocks), most)

    def _most_pages(self) -> int:
        """Pages that may be copied in one step: what can be in a part of its time, and at least as many as a step
        takes, which is what storing at once would copy."""
        steps, copied = self._busy.value, self._copied.value
        in_time = 0 if steps is None or copied is None else int(SHARE * copied / steps)
        return max(self._chunk_pages, math.ceil(self._burst), in_time)

    # What is stored

    def plan(self, nonsense: Set[int]) -> list[Piece]:
        """Pieces to store behind the step that is being planned. Each is told of by `stored` or `failed` later.

        Args:
            nonsense: Blocks that the engine takes for what they are not.
        """
        if not self._in_flight:
            self._since = self._clock()
        self._in_flight += 1
        self._steps += 1
        self._burst = max(float(self._taken_now), float(self._fewest), self._burst * (1 - 1 / LONG))
        if self._steps % EVERY == 1 or self._burst * self._page_blocks > self._blocks:
            self._choose_size()
        self._look()
        pieces: list[Piece] = []
        room = self._most_pages()
        while room > 0 and (offered := self._window.offer(1)):
            (key,) = offered
            piece = self._pieces[key]
            if self._left(piece) < piece.pages or not nonsense.isdisjoint(piece.blocks):
                self._window.failed(key)
                self._lose(piece)  # what is left of it is another piece, which the next step finds
                continue
            room -= piece.pages
            pieces.append(piece)
        return pieces

    def _look(self) -> None:
        """Look at pieces with a block among those that the engine takes next. If it has fewer free ones than the window
        looks at, any request that ends gives it some that may be taken before the next step is planned: then all pieces
        are looked at, first those that have been there longest."""
        there = list(islice(self._memory.free(), self._blocks))
        pieces = dict.fromkeys(key for block in there for key in self._by_block.get(block, ()))
        if len(there) < self._blocks:
            pieces |= dict.fromkeys(self._pieces)
        self._window.size = max(self._blocks, len(pieces))
        self._window.look(pieces)

    def stored(self, piece: Piece) -> None:
        """A piece is in the node's memory."""
        self._window.copied(piece.key)
        there = self._pieces.get(piece.key)
        if there is not None:
            there.saved = True

    def failed(self, piece: Piece) -> None:
        """A piece could not be stored. It is not tried again before it has been used."""
        self._window.failed(piece.key)
