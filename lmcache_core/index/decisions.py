"""What the index decides: plain records that the node carries out and answers with events."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lmcache_core.protocols import ChunkKey

if TYPE_CHECKING:
    from lmcache_core.hostpool import Slot
    from lmcache_core.index.entries import Entry, Space
    from lmcache_core.index.shares import Owner


class Refusal(enum.Enum):
    """Why a chunk is not stored. Values are the `reason` label of the drop counter."""

    POOL_FULL = "pool_full"
    QUOTA = "quota"
    FROZEN = "frozen"
    NO_PARENT = "no_parent"
    QUEUE_FULL = "queue_full"
    TIER_FULL = "tier_full"
    TIER_DOWN = "tier_down"
    WRITE_FAILED = "write_failed"
    WRITE_LATE = "write_late"
    ABORTED = "aborted"


class Piece(NamedTuple):
    """The first `pages` pages of a chunk, which are pages `[first, first + pages)` of a prompt."""

    group: int
    entry: Entry
    first: int
    pages: int


@dataclass(slots=True)
class Found:
    """What a lookup found: a prompt's first `pages` pages can be restored from `pieces`."""

    pages: int
    pieces: list[Piece]


@dataclass(eq=False, slots=True)
class Lease:
    """Keeps what a lookup found until it is released or `expires` has passed (seconds of the index's clock)."""

    number: int
    found: Found
    expires: float
    active: bool = True
    used: int = 0
    """Pieces from the front that are kept no longer, since they have been copied."""


@dataclass(eq=False, slots=True)
class Reservation:
    """Room for one chunk that is being stored; commit or abort it."""

    entry: Entry
    slot: Slot
    group: int
    first: int
    missing: set[int]
    """Shards that are not filled yet."""
    open: bool = True
    published: bool = False
    """Its chunk can be read, or could before it was taken away again."""


@dataclass(eq=False, slots=True)
class StorePlan:
    """What a store has to do: fill `reservations`. `present` pages are stored or being stored already."""

    reservations: list[Reservation]
    touched: list[Entry]
    places: int
    """Places the prompt shall be stored in."""
    present: int = 0
    """Pages that need no work, over all groups."""
    dropped: int = 0
    """Pages that found no room."""
    keys: Sequence[bytes] = ()
    first_page: int = 0
    tenant: str = ""
    """Whose the chunks will be; the model's without one."""
    rest: deque[tuple[Space, int, int, int]] = field(default_factory=deque)
    """Chunks that have not been planned yet: the space and number of the group, the first page, and how many."""


@dataclass(eq=False, slots=True)
class Load:
    """One chunk that is being read from a tier into a slot, for all who want it."""

    entry: Entry
    slot: Slot
    tier: int
    late: bool = False
    """Nobody waits for it any more, since its deadline has passed; its slot is used by nobody else until it ends."""
    doomed: bool = False
    """What it reads has been cleared meanwhile."""
    twin: Load | None = None
    """Reads the same chunk from another tier into another slot; the first of the two to have it is the one used."""
    beaten_of: Owner | None = None
    """The other one has been used, or is waited for instead: whatever becomes of this one changes nothing, and its slot
    counts for that owner until it has ended."""
    waiters: list[Callable[[bool], None]] = field(default_factory=list)

    @property
    def wanted(self) -> bool:
        """Whether anybody has a use for it."""
        return not (self.late or self.doomed or self.beaten_of)


class Read(NamedTuple):
    """Read `load.entry` from tier `load.tier` into `load.slot`."""

    load: Load


@dataclass(eq=False, slots=True)
class Write:
    """Delete `evict` from a tier, then write `entry` from `slot` to it."""

    tier: int
    entry: Entry
    slot: Slot
    evict: list[ChunkKey]
    last_try: bool = False
    late: bool = False
    """Nobody waits for it any more, since its deadline has passed."""
    waiters: list[Callable[[bool], None]] = field(default_factory=list)


class Delete(NamedTuple):
    """Remove chunks from a tier."""

    tier: int
    keys: Sequence[ChunkKey]


class Touch(NamedTuple):
    """Tell a tier what was used, last the most recent."""

    tier: int
    keys: Sequence[ChunkKey]


class Describe(NamedTuple):
    """Tell a tier what a space is."""

    tier: int
    space: Space


Decision = Read | Write | Delete | Touch | Describe
