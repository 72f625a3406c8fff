"""`Client`: what connectors hold to talk to a node, whether it lives in their process or in another.

Keys travel, never tokens; bytes travel never: they are copied by whoever owns them, from and to slots of the pool that
the client sees. All methods answer at once and from any thread; what takes time is a `Future`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lmcache_core.arguments import kind, shown
from lmcache_core.errors import UsageError
from lmcache_core.namespace import Namespace
from lmcache_core.protocols import CopyBack, DirectChunk, ReadResult

AHEAD = 8
"""Chunks that are read from tiers ahead of the one being copied."""


KEY_BYTES = 32


def check_keys(keys: object) -> None:
    """Refuse what can't be the keys of a prompt's pages: at a glance, since they come with each call.

    Raises:
        UsageError: They are no list or tuple of keys of 32 bytes.
    """
    if not isinstance(keys, list | tuple):
        raise UsageError(f"keys are a list of bytes, one a page, as `Cache.prompt(tokens).keys`; not {kind(keys)}")
    for key in (keys[0], keys[-1]) if keys else ():
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise UsageError(f"the key of a page is {KEY_BYTES} bytes, not {shown(key)}")


def check_places(places: object) -> None:
    """Refuse what can't be names of tiers.

    Raises:
        UsageError: They are no sequence of names.
    """
    if places is None:
        return
    if not isinstance(places, list | tuple) or not all(isinstance(name, str) for name in places):
        raise UsageError(f"places are a list of tiers' names, or None for all; not {shown(places)}")


class Model(Protocol):
    """A namespace that has been registered with a node."""

    @property
    def namespace(self) -> Namespace:
        """What was registered."""
        ...


@dataclass(frozen=True, slots=True)
class Boundary:
    """Answer to a lookup.

    Args:
        pages: Whole pages that can be restored.
        tiers: How many of them by tier, the fastest that holds each; `cpu` is the host pool.
        pending: A tier that cannot tell at once is being asked; ask again, the answer may be larger.
    """

    pages: int
    tiers: Mapping[str, int]
    pending: bool = False


class Part(NamedTuple):
    """A run of pages of one group that one chunk holds."""

    group: int
    first: int
    pages: int


def counted_group(groups: Sequence[int]) -> int:
    """The group whose pages are a prompt's, where the parts of a lease are of several: that of the most parts."""
    return groups[0] if groups[0] == groups[-1] else max(sorted(set(groups)), key=groups.count)


@dataclass(eq=False, slots=True)
class Held:
    """A lease on what a lookup found, and the parts in the order in which they are to be copied."""

    pages: int
    parts: Sequence[Part]
    asked: Future[Any] | None = None
    """Done when tiers that cannot tell at once have been asked for more; then hold again."""
    handle: Any = None


class Grant(NamedTuple):
    """Access to one part: its bytes, or the future that tells when to ask again (True) or to give up (False)."""

    source: memoryview | None
    """`pages * page_bytes` bytes that stay valid until the part is consumed; read only."""
    tier: str
    wait: Future[bool] | None = None
    offset: int = -1
    """Where in the pool `source` lies."""


class PastHost(NamedTuple):
    """Where a part can be read from into a device's memory, past the pool."""

    tier: str
    number: int
    """Of the tier."""
    chunk: DirectChunk
    shard: int
    pages: int
    """From the chunk's first page on."""

    @property
    def nbytes(self) -> int:
        """Of them."""
        return self.pages * self.chunk.page_bytes


class DirectReading(NamedTuple):
    """A read past the pool under way."""

    answered: Future[bool]
    """Whether it has ended in time; done at the deadline of the tier's reads at the latest."""
    ended: Future[list[ReadResult]]
    """Done when nothing writes to the device's memory any more, however late."""


@runtime_checkable
class ReadsPastHost(Protocol):
    """What a client can do besides, in the node's process or with openings of its own of the node's tiers."""

    @property
    def reads_past_host(self) -> bool:
        """Whether there is a tier now that can do that, as far as is known."""
        ...

    def past_host(self, held: Held, number: int) -> PastHost | None:
        """Where part `number` of a lease can be read from past the pool. None if it is in the pool or on its way there,
        or its tier cannot do that."""
        ...

    def read_past_host(self, found: PastHost, address: int, back: CopyBack) -> DirectReading:
        """Read it to `address`. `DeviceDirect` says what `ended` holds, and it fails as that does.

        Raises:
            BackendError: Its tier cannot be read like that any more.
            ClosedError: The node or this client has been closed.
        """
        ...

    def count(self, name: str, label: str, amount: float = 1) -> None:
        """See `Client`."""
        ...


@dataclass(eq=False, slots=True)
class Room:
    """A chunk to be filled: write `pages` pages from page `first` of `group` into `target`, then report it; from then
    on `target` is not yours any more."""

    part: Part
    target: memoryview
    handle: Any = None
    offset: int = -1
    """Where in the pool `target` lies."""


@dataclass(eq=False, slots=True)
class Storing:
    """A store under way: fill each room, report it, then finish. Keep it until all copying has ended: one that is let
    go of is finished without what is not filled."""

    rooms: Sequence[Room]
    present: int
    dropped: int
    handle: Any = None


@dataclass(frozen=True, slots=True)
class Finished:
    """Outcome of a store: pages that are readable now, and the future of their arrival on the tiers they go to."""

    pages: int
    written: Future[bool]


@dataclass(frozen=True, slots=True)
class TierStats:
    """State of one tier; sizes in bytes."""

    name: str
    backend: str
    up: bool
    used: int
    capacity: int | None
    chunks: int
    queued: int
    quarantined: int
    counters: Mapping[str, int] = field(default_factory=dict)
    why: str = ""
    """Why it is not up: its last failure."""
    shared: bool = False
    """Others store there too, of which the node knows what it has looked up."""
    read_latency: float | None = None
    """Seconds that a read takes whatever its size, as learned; None while nothing is known."""
    read_bandwidth: float | None = None
    """Bytes a second of a read besides."""


@dataclass(frozen=True, slots=True)
class OwnerStats:
    """What one owner holds; sizes in bytes."""

    kind: str
    """`tenant`, `model`, or `unclaimed` for chunks found on tiers whose model nobody has named yet."""
    name: str
    nbytes: Mapping[str, int]
    """By place, staged chunks and those being read or written too."""
    idle: bool = False
    """It has used nothing for so long that its chunks are the first to go."""


@dataclass(frozen=True, slots=True)
class KeptStats:
    """What pins hold that outlive who asked for them; sizes in bytes."""

    chunks: int = 0
    nbytes: int = 0
    most: int = 0
    """Bytes that they may hold."""


@dataclass(frozen=True, slots=True)
class Stats:
    """State of a node; sizes in bytes."""

    pool_capacity: int
    pool_usable: int
    pool_used: int
    slots: int
    chunks: int
    leases: int
    pinned: int
    staged: int
    loop_lag: float
    tiers: Sequence[TierStats]
    counts: Mapping[str, Mapping[str, float]]
    frozen: bool = False
    owners: Sequence[OwnerStats] = ()
    kept: KeptStats = field(default_factory=KeptStats)
    standalone: bool = False
    """It is a process of its own, which ends once it is drained."""


@dataclass(frozen=True, slots=True)
class SpaceStats:
    """What a node holds of one group of one namespace; sizes in bytes."""

    digest: bytes
    manifest: bytes
    """Of the namespace, as tiers keep it; empty while neither an engine nor a tier has told."""
    chunks: int
    pages: int
    pinned: int
    leased: int
    nbytes: Mapping[str, int]
    """By place."""


class Client(Protocol):
    """See the module. `places` are names of tiers, `cpu` for the host pool; None means all.

    Every method raises `ClosedError` once the node has been closed, and `ConfigError` for a tier it doesn't have.
    """

    chunk_tokens: int
    page_tokens: int
    retention_tokens: int
    shard: int
    """The part of each chunk that this client copies: that of its rank."""
    tenant: str
    """Whose the chunks are that this client stores; empty for the model's."""

    @property
    def memory(self) -> memoryview | None:
        """The host pool as this process sees it: what `Grant.source` and `Room.target` lie in. None while the node is
        not there."""
        ...

    def register(self, namespace: Namespace) -> Model:
        """Make a namespace known to the node.

        Raises:
            LayoutError: It doesn't fit the node's chunks.
        """
        ...

    def lookup(
        self, model: Model, keys: Sequence[bytes], places: Sequence[str] | None = None, *, quiet: bool = False
    ) -> Boundary:
        """How many pages of a prompt can be restored. Keeps nothing, renews nothing. A `quiet` lookup is no request's:
        it isn't counted and asks no tier."""
        ...

    def hold(
        self, model: Model, keys: Sequence[bytes], places: Sequence[str] | None = None, *, counted: bool = False
    ) -> Held:
        """Look up and keep what was found until it is consumed, released or the lease has run out. If it is `counted`,
        it counts as a lookup, unless this client has looked such a prompt up before and not held it since."""
        ...

    def grant(self, held: Held, start: int, ahead: int) -> list[Grant]:
        """Access to parts from number `start` on: those in the pool, and loads of at most `ahead` others. Ends early
        where a part cannot be had; empty when that is part `start`."""
        ...

    def consume(self, held: Held, parts: int) -> None:
        """The next `parts` parts have been copied."""
        ...

    def release(self, held: Held) -> None:
        """End the lease and all access. Idempotent."""
        ...

    def begin_store(
        self,
        model: Model,
        keys: Sequence[bytes],
        at: Sequence[int] = (),
        first_page: int = 0,
        places: Sequence[str] | None = None,
        *,
        prompt_pages: int = 0,
    ) -> Storing:
        """Reserve room for what a prompt lacks; `at` are boundaries in pages at which a later prompt can stop. Keys may
        be a run of a prompt that has `prompt_pages`, if that is more."""
        ...

    def filled(self, room: Room) -> None:
        """The bytes of a room are in place: from now on others can read them, and they are being written to tiers."""
        ...

    def finish_store(self, storing: Storing) -> Finished:
        """End a store; rooms that are not filled are given back."""
        ...

    def share(self, work: Held | Storing) -> int:
        """A number by which the clients of other ranks can join a lease or a store, until it has ended."""
        ...

    def join_hold(self, number: int) -> Held | None:
        """A lease of this client's own on what the lease `number` holds, for the shard of its rank (of what all ranks
        share, the whole). None if that has ended."""
        ...

    def join_store(self, number: int) -> Storing | None:
        """The rooms of the store `number`, for the shard of this client's rank: fill and report them, then finish. A
        chunk can be read once all shards are in place; whoever began the store ends it. None if that has ended."""
        ...

    def prefetch(
        self, model: Model, keys: Sequence[bytes], source: Sequence[str] | None, destination: str
    ) -> Future[int]:
        """Bring chunks of a prompt to a tier; the future tells how many pages are there."""
        ...

    def pin(self, model: Model, keys: Sequence[bytes]) -> int:
        """Keep the restorable prefix where it is until unpinned. Returns its pages."""
        ...

    def unpin(self, model: Model, keys: Sequence[bytes]) -> int:
        """Undo one `pin`. Returns the pages of chunks that are pinned no longer."""
        ...

    def evict(self, model: Model, keys: Sequence[bytes], places: Sequence[str] | None = None) -> int:
        """Take chunks of a prompt out of tiers, unless pinned or leased. Returns how many chunks."""
        ...

    def clear(self, model: Model | None = None, places: Sequence[str] | None = None) -> int:
        """Take all chunks (of a namespace) out of tiers, pinned and leased ones too. Returns how many.

        All that can be read when it is called is gone when it returns. Others have their turns meanwhile: what they
        store anew stays, and what a store of theirs has found present may be gone after it.
        """
        ...

    def count(self, name: str, label: str, amount: float = 1) -> None:
        """Add to one of the node's counters."""
        ...

    def stats(self) -> Stats:
        """State of the node now."""
        ...

    def spaces(self) -> list[SpaceStats]:
        """What the node holds, by namespace and group."""
        ...

    def freeze(self, on: bool) -> None:
        """Have the node store nothing new, or go on. What is there is served."""
        ...

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being written or read. Returns whether that came in time.

        Raises:
            UsageError: `timeout` is no number, or a negative one.
        """
        ...

    def close(self) -> None:
        """Let go of the node."""
        ...
