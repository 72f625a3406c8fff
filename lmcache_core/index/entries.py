"""What the index knows of one chunk (`Entry`) and of all chunks of one group of one namespace (`Space`).

Where a chunk can be read is a bit mask: bit 0 is the host pool, bit i + 1 tier i. A chunk that is being stored for the
first time is staged: only its reservation knows it, nobody can find it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_core.errors import LayoutError
from lmcache_core.frame import FrameShape, shape
from lmcache_core.index.chains import Chains, Line, Table
from lmcache_core.index.shares import Owner
from lmcache_core.index.watching import Watch
from lmcache_core.namespace import GroupKind
from lmcache_core.protocols import ChunkKey

if TYPE_CHECKING:
    from lmcache_core.hostpool import Slot
    from lmcache_core.index.decisions import Load

POOL = 1


def tier_bit(number: int) -> int:
    """Bit of tier `number` in a mask of places."""
    return 2 << number


class Entry:
    """One chunk. Compared and hashed by identity."""

    __slots__ = (
        "doomed",
        "key",
        "leases",
        "line",
        "load",
        "nbytes",
        "owner",
        "pages",
        "parent",
        "pins",
        "slot",
        "space",
        "where",
        "writing",
    )

    def __init__(
        self, space: Space, pages: tuple[bytes, ...], parent: bytes, nbytes: int, owner: Owner | None = None
    ) -> None:
        self.space = space
        self.owner = space.owner if owner is None else owner
        """Who it counts for."""
        self.key = pages[-1]
        self.pages = pages
        self.parent = parent
        self.nbytes = nbytes
        self.slot: Slot | None = None
        self.where = 0
        """Places it can be read from."""
        self.writing = 0
        """Tiers that are being written."""
        self.doomed = 0
        """Tiers whose write must be undone when it has ended."""
        self.load: Load | None = None
        self.leases = 0
        self.pins = 0
        self.line: Line | None = None
        """See `Chains`."""

    @property
    def ident(self) -> tuple[bytes, bytes]:
        """Identity that outlives the object."""
        return (self.space.digest, self.key)

    def readable(self, places: int) -> bool:
        """Whether it can be read from one of `places` in time: not while a read of it is past its deadline."""
        where = self.where & places
        return bool(where) and (self.load is None or not self.load.late or bool(where & POOL))

    @property
    def chunk_key(self) -> ChunkKey:
        """Name of the chunk for backends."""
        return ChunkKey(self.space.digest, self.key)

    @property
    def form(self) -> FrameShape:
        """Sizes of its frame. Only for spaces whose geometry is known."""
        return self.space.form(len(self.pages))

    def __repr__(self) -> str:
        return f"<Entry {self.key.hex()[:12]} pages={len(self.pages)} where={self.where:b}>"


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the index has to know of a group to size its chunks and to tell hits.

    Args:
        kind: The rule by which a prefix can be restored.
        page_bytes: Bytes of one page of one shard, all layers.
        shards: Shards of a chunk.
        chunk_pages: Pages of a full chunk (1 for state groups).
        window_pages: Pages that cover a sliding window (window groups only).
        shareable: Whether chunks may leave this host.
        manifest: Readable description for tiers that keep one.
    """

    kind: GroupKind
    page_bytes: int
    shards: int
    chunk_pages: int
    window_pages: int = 0
    shareable: bool = True
    manifest: bytes = b""


class Space:
    """Chunks of one group of one namespace, by the keys of their pages."""

    def __init__(self, digest: bytes, geometry: Geometry | None = None) -> None:
        self.digest = digest
        self.owner = Owner()
        """Of chunks that no tenant has stored."""
        self.geometry = geometry
        """None for chunks found on a tier whose model nobody has named yet; they cannot be read, only evicted."""
        self.chunks: dict[bytes, Entry] = {}
        self.staged: dict[bytes, Entry] = {}
        self._holders = Table()
        self._forms: dict[int, FrameShape] = {}
        self.chains = Chains(self.chunks, self.staged)
        """Which chunks need which."""
        self.watches: list[Watch] = []

    def tell(self, entry: Entry, place: int, there: bool) -> None:
        """Tell those who watch that a chunk has come to a place or left it."""
        for watch in self.watches:
            watch.changed(entry.pages, place, there)

    @property
    def known(self) -> Geometry:
        """The geometry of a space that has been registered.

        Raises:
            LayoutError: It has not been.
        """
        if self.geometry is None:
            raise LayoutError("the namespace has not been registered with the node")
        return self.geometry

    @property
    def kind(self) -> GroupKind:
        """The rule by which a prefix can be restored."""
        return self.known.kind

    def form(self, pages: int) -> FrameShape:
        """Sizes of a frame of `pages` pages."""
        form = self._forms.get(pages)
        if form is None:
            geometry = self.known
            form = self._forms[pages] = shape(pages, geometry.shards, geometry.page_bytes)
        return form

    def enter(self, entry: Entry) -> None:
        """Make an entry findable."""
        self.chunks[entry.key] = entry
        self._holders.add_all(entry.pages[:-1], entry)

    def leave(self, entry: Entry) -> None:
        """Undo `enter`, and note that it needs no other any more."""
        if self.chunks.get(entry.key) is entry:
            del self.chunks[entry.key]
            self._holders.discard_all(entry.pages[:-1], entry)
        self.chains.orphan(entry)

    def holding(self, page: bytes) -> Iterator[Entry]:
        """Chunks that hold a page, the one it ends first."""
        entry = self.chunks.get(page)
        if entry is not None:
            yield entry
        yield from self._holders.of(page)

    def run(self, keys: Sequence[bytes], first: int, places: int) -> tuple[Entry, int] | None:
        """The longest run of pages `keys[first:]` inside one window that one readable chunk starts with: the chunk
        and the number of pages. `first` is the start of a window, `places` a mask of places that can be read."""
        size = self.known.chunk_pages
        full = first + size
        if full <= len(keys):
            entry = self.chunks.get(keys[full - 1])
            if entry is not None and len(entry.pages) == size and entry.readable(places):
                return entry, size
        for last in range(min(full, len(keys)) - 1, first - 1, -1):
            length = last - first + 1
            entry = self.holder(keys[last], length, places)
            if entry is not None:
                return entry, length
        return None

    def holder(self, page: bytes, pages: int, places: int) -> Entry | None:
        """A readable chunk whose first `pages` pages end with `page`."""
        if page not in self.chunks and page not in self._holders:
            return None
        for entry in self.holding(page):
            if len(entry.pages) >= pages and entry.pages[pages - 1] == page and entry.readable(places):
                return entry
        return None
