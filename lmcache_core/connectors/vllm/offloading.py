"""KV that is stored late: not when it has been computed, but before the engine gives its blocks to others.

What an engine has computed it keeps for a while and finds again itself. Stored at once, all of that is in two memories;
stored just before it goes, little is. Here is known what is in which blocks, chunk by chunk, and the engine's free
blocks are looked at, the one that it takes next first: chunks with a block within a window of them are stored. The
window follows from measured rates and from how much may be lost, see `lmcache_core.planning`. Where so few are free
that a request which ends may be overtaken by one that takes its blocks, all is stored as it is computed.

What is in a block is as the engine has it: a chunk is stored as long as its blocks hold what the engine would find
again in them. An engine does not wait for a store. What it takes before is lost, and counted.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from lmcache_core.connectors.vllm.counters import Counts
from lmcache_core.planning.stalls import smallest_window
from lmcache_core.planning.window import OffloadWindow

__all__ = ["Memory", "Offloading", "Piece", "Rate", "runs"]

SHARE = 0.5
"""Of the time of a step, for which stores of free blocks may copy."""
LATEST = 64
"""Steps, or copies, that count for a rate."""
LONG = 4096
"""Steps in which the most that one of them has taken is forgotten: prompts come after many steps that take little."""
MOST = 32
"""Bursts in a window: more are looked at in no time that would be worth it. Where no window is enough, four."""
EVERY = 32
"""Steps after which the window's size is chosen anew, and after which what could not be stored is tried again."""


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

    keys: tuple[bytes, ...]
    """Of its pages."""
    parent: bytes
    """Key of the page in front of it; empty at the start of a prompt."""
    first: int
    """Of the prompt's pages, its first."""
    blocks: tuple[int, ...]
    contents: tuple[Any, ...]
    places: Sequence[str] | None
    """Tiers that it is stored to."""
    step: int
    """When it was learned of last."""
    epoch: int
    """How often all had been forgotten by then."""

    @property
    def key(self) -> bytes:
        """That of its last page, which stands for all in front of it too."""
        return self.keys[-1]

    @property
    def pages(self) -> int:
        """How many."""
        return len(self.keys)

    @property
    def end(self) -> int:
        """Of the prompt's pages, where it ends."""
        return self.first + len(self.keys)

    def begins(self, other: Piece) -> bool:
        """Whether all of it is the beginning of another."""
        return self.first == other.first and self.pages <= other.pages and other.keys[self.pages - 1] == self.key


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
        self._fewest = max(1, -(-step_tokens // page_tokens))
        """Pages that a step may take, whatever steps have taken so far."""
        self._epoch = 0
        self._clear()
        self._steps = 0
        self._in_flight = 0
        self._since = 0.0
        self._busy = Rate()
        """Steps by their time, in place of pages."""
        self._taken = Rate()
        self._copied = Rate()
        self._taken_now = 0
        self._burst = float(self._fewest)
        self._blocks = 1
        """Size of the window."""

    def _clear(self) -> None:
        self._pieces: dict[bytes, Piece] = {}
        """By the key of their last page."""
        self._by_block: dict[int, dict[bytes, int]] = {}
        """Of each block, pieces with it and its place in each."""
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        """Keys of pieces that have been stored, as many as there are blocks."""
        self._new: dict[bytes, None] = {}
        """Of pieces that have been learned of, and are neither stored nor being stored."""
        self._early: set[bytes] = set()
        """Of pieces that are being stored while their blocks are in use."""
        self._refused: deque[tuple[int, bytes]] = deque()
        """Those that could not be stored, and from which step on they are tried again."""
        self._window: OffloadWindow[bytes] = OffloadWindow(1)
        self._waiting = False
        """There may be something in the window to store."""
        self._short = False
        """Fewer blocks are free than must be ready."""
        self._ahead = 0
        """Blocks that can be taken before the free ones must be looked at again."""

    @property
    def blocks(self) -> int:
        """Free blocks that are kept ready."""
        return self._blocks

    @property
    def most_pages(self) -> int:
        """Pages that may be in blocks and not stored yet."""
        return self._memory.blocks // self._page_blocks

    # What is where

    def learn(
        self, keys: Sequence[bytes], first: int, end: int, blocks: Sequence[int], places: Sequence[str] | None
    ) -> None:
        """Pages `[first, end)` of a prompt will be in these blocks when this step has ended; `first` begins a chunk.
        `keys` are those of the prompt."""
        for start in range(first, end, self._chunk_pages):
            stop = min(start + self._chunk_pages, end)
            ids = tuple(blocks[(start - first) * self._page_blocks : (stop - first) * self._page_blocks])
            contents = tuple(self._memory.content(block) for block in ids)
            known = next((number for number, each in enumerate(contents) if each is None), len(ids))
            pages = known // self._page_blocks
            if pages:
                mine, parent = tuple(keys[start : start + pages]), keys[start - 1] if start else b""
                size = pages * self._page_blocks
                self._add(Piece(mine, parent, start, ids[:size], contents[:size], places, self._steps, self._epoch))

    def _add(self, piece: Piece) -> None:
        key = piece.key
        old = self._pieces.get(key)
        if old is not None:
            piece.places = _all_of(old.places, piece.places)
            self._drop(old)
            # It was used again: what there is of it in the node may have gone meanwhile.
            self._window.forget([key])
            self._stored.pop(key, None)
            self._waiting = True
        self._pieces[key] = piece
        self._new[key] = None
        for place, block in enumerate(piece.blocks):
            self._by_block.setdefault(block, {})[key] = place
        for block, content in zip(piece.blocks, piece.contents, strict=True):
            for other_key, place in list(self._by_block.get(block, {}).items()):
                other = self._pieces.get(other_key)
                if other is None or other_key == key:
                    continue
                if other.contents[place] != content:
                    self._lose(other)
                elif other.begins(piece):
                    self._drop(other)

    def _drop(self, piece: Piece) -> None:
        key = piece.key
        del self._pieces[key]
        self._new.pop(key, None)
        for block in piece.blocks:
            there = self._by_block[block]
            del there[key]
            if not there:
                del self._by_block[block]

    def _lose(self, piece: Piece) -> None:
        """Its blocks hold something else."""
        self._drop(piece)
        if piece.key in self._stored:
            return
        left = self._left(piece)
        self._counts["lost_tokens", ""] += (piece.pages - left) * self._page_tokens
        if left:
            size = left * self._page_blocks
            rest = Piece(
                piece.keys[:left],
                piece.parent,
                piece.first,
                piece.blocks[:size],
                piece.contents[:size],
                piece.places,
                piece.step,
                piece.epoch,
            )
            if not any(rest.begins(self._pieces[key]) for key in self._by_block.get(rest.blocks[0], ())):
                self._add(rest)

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
        """Forget all. What is being stored is told of as before, and of no account any more."""
        self._epoch += 1
        self._clear()

    # How fast

    def took(self, pages: int, *, hits: int = 0) -> None:
        """The engine has taken so many pages for the step that is being planned, and uses `hits` again. Of the latter
        not all count: they are seldom next in turn."""
        self._taken_now += pages + min(hits, self._fewest)

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
        """Blocks that must be ready so that no more is lost than may be: whole bursts of what a step takes."""
        burst = max(1, math.ceil(self._burst))
        taken, copied = self._taken.value, self._copied.value
        pages = 2 * burst
        if taken is not None and copied is not None:
            pages = smallest_window(taken, copied, self._losses, burst=burst, waits=False) or 4 * burst
        pages = min(max(burst, pages), MOST * burst)
        self._blocks = min(pages * self._page_blocks, max(burst * self._page_blocks, self._memory.blocks // 2))

    def _most_pages(self) -> int:
        """Pages that may be copied in one step: what can be in a part of its time, and at least as many as a step
        computes, which is what storing at once would copy."""
        steps, copied = self._busy.value, self._copied.value
        in_time = 0 if steps is None or copied is None else int(SHARE * copied / steps)
        return max(self._chunk_pages, self._fewest, in_time)

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
        self._ahead -= self._taken_now * self._page_blocks
        if self._refused and self._refused[0][0] <= self._steps:
            self._try_again()
        if self._ahead <= 0:
            self._look()
        pieces = self._next_taken(nonsense) if self._waiting else []
        if self._short:
            pieces += self._in_use(self._most_pages() - sum(piece.pages for piece in pieces), nonsense)
        return pieces

    def _look(self) -> None:
        """Look at pieces with a block among those that the engine takes next: at twice as many as must be ready, so
        that it need not be done in every step."""
        there = list(islice(self._memory.free(), 2 * self._blocks))
        self._window.size = 2 * self._blocks
        self._window.look(dict.fromkeys(key for block in there for key in self._by_block.get(block, ())))
        self._waiting = True
        self._short = len(there) < self._blocks
        self._ahead = len(there) if self._short else len(there) - self._blocks

    def _next_taken(self, nonsense: Set[int]) -> list[Piece]:
        """What is to be stored of the window."""
        room = self._most_pages()
        pieces: list[Piece] = []
        offered = self._window.offer(room)
        self._waiting = len(offered) == room
        for key in offered:
            if room <= 0 or key in self._early:
                self._window.withdraw(key)
                self._waiting = True
            elif piece := self._checked(key, nonsense):
                room -= piece.pages
                pieces.append(piece)
            else:
                self._window.failed(key)
        return pieces

    def _in_use(self, room: int, nonsense: Set[int]) -> list[Piece]:
        """What is to be stored of all others: a request that ends gives the engine blocks that it may take before the
        next step is planned."""
        pieces: list[Piece] = []
        for key in list(islice(self._new, max(0, room))):
            if room <= 0:
                break
            if key in self._early:  # somebody uses it again while it is being stored
                del self._new[key]
            elif piece := self._checked(key, nonsense):
                self._early.add(key)
                room -= piece.pages
                pieces.append(piece)
        return pieces

    def _checked(self, key: bytes, nonsense: Set[int]) -> Piece | None:
        """A piece that is stored now, if it is what it was."""
        piece = self._pieces.get(key)
        if piece is None:
            return None
        if not nonsense.isdisjoint(piece.blocks):
            self._drop(piece)
            return None
        if self._left(piece) < piece.pages:
            self._lose(piece)  # what is left of it is another piece, which is looked at with the others
            self._ahead = 0
            return None
        self._new.pop(key, None)
        return piece

    def _try_again(self) -> None:
        keys = []
        while self._refused and self._refused[0][0] <= self._steps:
            keys.append(self._refused.popleft()[1])
        self._window.forget(keys)
        self._waiting = True
        self._new |= {key: None for key in keys if key in self._pieces and key not in self._early}

    def stored(self, piece: Piece) -> None:
        """A piece is in the node's memory."""
        if self._ended(piece, self._window.copied):
            self._new.pop(piece.key, None)
            self._stored[piece.key] = None
            self._stored.move_to_end(piece.key)
            if len(self._stored) > self._memory.blocks:
                self._stored.popitem(last=False)

    def failed(self, piece: Piece) -> None:
        """A piece could not be stored. It is tried again after some steps."""
        if self._ended(piece, self._window.failed):
            self._new.pop(piece.key, None)
            self._refused.append((self._steps + EVERY, piece.key))

    def _ended(self, piece: Piece, tell: Callable[[bytes], object]) -> bool:
        """Whether what has ended is of any account."""
        if piece.epoch != self._epoch:
            return False
        if piece.key in self._early:
            self._early.remove(piece.key)
        else:
            tell(piece.key)
        return True


def _all_of(some: Sequence[str] | None, others: Sequence[str] | None) -> Sequence[str] | None:
    """Tiers that are in either; None is all of them."""
    return None if some is None or others is None else list(dict.fromkeys([*some, *others]))


def runs(pieces: Sequence[Piece], chunk_pages: int) -> list[list[Piece]]:
    """Pieces that follow each other in one prompt together, each run from its start on: they are stored at once."""
    behind: dict[bytes, Piece] = {}
    for piece in pieces:
        if piece.parent:
            behind.setdefault(piece.parent, piece)
    following: dict[bytes, Piece] = {}
    for piece in pieces:
        next_one = behind.get(piece.key)
        if next_one is not None and piece.pages == chunk_pages and next_one.places == piece.places:
            following[piece.key] = next_one
    inside = {piece.key for piece in following.values()}
    found = [[piece] for piece in pieces if piece.key not in inside]
    for run in found:
        while (next_one := following.get(run[-1].key)) is not None:
            run.append(next_one)
    return found
