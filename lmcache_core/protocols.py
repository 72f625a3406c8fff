"""The contracts: what a storage backend, a transfer and a view of an engine's KV must do.

`StorageBackend` has the verbs every backend has. What only some can do is a `Protocol` of its own below; the node asks
for it by `isinstance`, and no backend has methods that raise `NotImplementedError`. Everything is batched: a batch of
one is the special case.

Memory belongs to the node. A backend may touch the buffers it is given only until the coroutine it was given them in
has ended; it never keeps them. Buffers start at a multiple of 4096 in memory and their length is a multiple of 4096,
so `O_DIRECT` and registered memory work without a bounce.

Coroutines run on the node's event loop and must not block it: blocking I/O goes to `lmcache_core.iothreads`.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from lmcache_core.namespace import Encoding

__all__ = [
    "Abortable",
    "Advises",
    "Chunk",
    "ChunkKey",
    "CopyBack",
    "CostlyProbes",
    "CountsEvents",
    "Describes",
    "DeviceDirect",
    "DirectChunk",
    "DirectRead",
    "DirectWrite",
    "KVView",
    "Listed",
    "Lists",
    "ReadResult",
    "ReadsBeside",
    "ReadsShorter",
    "RegisteredKV",
    "RemembersUse",
    "ReportsUsage",
    "Scannable",
    "StorageBackend",
    "Stored",
    "Transfer",
    "Usage",
    "WriteResult",
]


class ChunkKey(NamedTuple):
    """Identity of a stored chunk.

    `space` is the 32-byte digest of namespace and group (what the numbers mean and how the bytes lie), `page` the
    32-byte key of the chunk's last page, which stands for all tokens up to its end.
    """

    space: bytes
    page: bytes


class Chunk(NamedTuple):
    """One chunk to write. Backends that are not `Scannable` need no more than `key` and `data`."""

    key: ChunkKey
    data: memoryview
    """The value: bytes to give back exactly. Read only."""
    pages: tuple[bytes, ...]
    """Keys of the pages it holds, in order; the last is `key.page`."""
    parent: bytes
    """Key of the page in front of its first page; empty at the start of a prompt."""


class ReadResult(enum.Enum):
    """Outcome of reading one chunk."""

    HIT = "hit"
    MISS = "miss"
    CORRUPT = "corrupt"
    """There is a value but it is not of the size asked for, or its checksum is wrong. The caller deletes it."""


class WriteResult(enum.Enum):
    """Outcome of writing one chunk."""

    STORED = "stored"
    FULL = "full"
    """There is no room for it. Nothing was stored; the caller may delete something and try again."""


class Stored(NamedTuple):
    """One chunk found by a scan, least recently used first."""

    key: ChunkKey
    pages: tuple[bytes, ...]
    """Keys of the pages it holds, in order; the last is `key.page`."""
    nbytes: int
    """Size of the value as `read` must be given it: the whole frame, padding included."""
    parent: bytes
    """Key of the page in front of its first page; empty at the start of a prompt."""


class Usage(NamedTuple):
    """What a backend holds."""

    chunks: int
    nbytes: int
    """Bytes of its capacity that are taken, by this owner."""
    capacity: int | None
    """Bytes this owner may hold now; None when unbounded. May change while running, as other owners come and go."""


@runtime_checkable
class StorageBackend(Protocol):
    """Keeps chunks as opaque values of exact size under a `ChunkKey`.

    All verbs may be called concurrently, also for one key. A value is visible to `contains` and `read` only when it
    is complete, and a `read` that reports HIT has filled its buffer with exactly the bytes of one earlier `write`.

    A coroutine that is cancelled ends only when nothing of it touches the buffers any more, unless the backend is
    `Abortable`. After `close` every verb raises `ClosedError` or `BackendError`.
    """

    async def open(self) -> None:
        """Connect, create what is missing and learn what is stored. May be called again after `close`, on an open
        instance (which loses nothing by it), and on one whose medium failed, to try whether it is back.

        Raises:
            BackendError: The medium cannot be used now.
            ConfigError: The options can never work; the message says what to change.
        """
        ...

    async def close(self) -> None:
        """Finish what is under way and let go of all resources. Idempotent; never raises `BackendError`."""
        ...

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Tell for each key whether a `read` is expected to hit. Renews nothing.

        Raises:
            BackendError: It cannot be told.
        """
        ...

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        """Fill `into[i]` with the value of `keys[i]`. A buffer whose result isn't HIT may hold anything.

        Raises:
            BackendError: The medium failed. No buffer of the call may be used.
        """
        ...

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        """Store `chunk.data` under `chunk.key` for each chunk, replacing what is there. STORED means that it survives
        a crash of this process if the backend is persistent at all. FULL leaves an older value of that key in place.
        A write counts as a use.

        Raises:
            BackendError: The medium failed. Any of the keys may or may not be stored; the caller deletes them.
        """
        ...

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove values. An absent key is not an error.

        Raises:
            BackendError: The medium failed. Each key may or may not be there.
        """
        ...


@runtime_checkable
class ReadsShorter(Protocol):
    """Can read a value without knowing its size. Without this a tier's chunks cannot be compressed."""

    async def read_any(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | ReadResult]:
        """Put the value of `keys[i]` at the start of `into[i]`, which may be larger than it, and return its length;
        MISS if there is none, CORRUPT if it is larger than the buffer. What lies behind the value may hold anything
        afterwards; so may all of a buffer whose result isn't a length. A value is never empty.

        Raises:
            BackendError: The medium failed. No buffer of the call may be used.
        """
        ...


@runtime_checkable
class Scannable(Protocol):
    """Has a complete list of what it holds, at no cost of a round trip per chunk. The node indexes it at start and
    trusts its own index from then on, so nobody else may write the same keys."""

    def scan(self) -> AsyncIterator[Sequence[Stored]]:
        """Yield everything stored in batches, least recently used first. Only after `open`."""
        ...


class Listed(NamedTuple):
    """A value that is there, as a backend that knows no more of it lists it."""

    key: ChunkKey
    nbytes: int


@runtime_checkable
class Lists(Protocol):
    """Can go through all that it holds, at a cost: for tools such as `lmcache-core copy`, never for a request. Others
    may read and write meanwhile."""

    def listing(self) -> AsyncIterator[Sequence[Listed]]:
        """Yield what is stored in batches, in any order. What is stored or removed meanwhile may be among it or not,
        and a key may come twice; all else comes. Only after `open`.

        Raises:
            BackendError: The medium failed.
        """
        ...


@runtime_checkable
class RemembersUse(Protocol):
    """Keeps the order of use over restarts."""

    async def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Record that `keys` were used, the last of them most recently. Absent keys are passed over.

        Raises:
            BackendError: The medium failed.
        """
        ...


@runtime_checkable
class ReportsUsage(Protocol):
    """Can tell how full it is."""

    def usage(self) -> Usage:
        """What is held now. Answers at once, without I/O."""
        ...


@runtime_checkable
class CountsEvents(Protocol):
    """Counts what is worth an operator's attention, such as fallbacks to buffered I/O."""

    def counters(self) -> Mapping[str, int]:
        """Monotonic counters by name (`[a-z_]+`). Answers at once, without I/O."""
        ...


@runtime_checkable
class Advises(Protocol):
    """Knows what an operator should change about its medium, beyond what stops it from working."""

    def advice(self) -> Sequence[str]:
        """What to change, a line each that says why and what to write; none where all is well. Only after `open`.
        Answers at once, without I/O, and without secrets."""
        ...


@runtime_checkable
class Describes(Protocol):
    """Keeps a readable description of each space beside its chunks, for people who look at the medium."""

    async def describe(self, space: bytes, manifest: bytes) -> None:
        """Keep `manifest` (UTF-8 JSON) for `space`, replacing an older one.

        Raises:
            BackendError: The medium failed.
        """
        ...

    async def manifests(self) -> dict[bytes, bytes]:
        """All descriptions by space.

        Raises:
            BackendError: The medium failed.
        """
        ...


@runtime_checkable
class Abortable(Protocol):
    """Cancelling one of its coroutines ends the I/O: nothing is written to a buffer afterwards. Without this the node
    keeps a buffer out of use until a coroutine that is past its deadline has really ended."""

    abortable: bool


@runtime_checkable
class CostlyProbes(Protocol):
    """Its `contains` costs a round trip, and perhaps money, for every key: the node asks for a few chunks of a prompt
    and concludes from them where the stored prefix ends. A wrong conclusion is found out by the read."""

    costly_probes: bool


class DirectChunk(NamedTuple):
    """What a stored frame must be, told by whoever will not see it in host memory. Its header says the same."""

    key: ChunkKey
    pages: tuple[bytes, ...]
    """Keys of the pages it holds, in order; the last is `key.page`."""
    parent: bytes
    """Key of the page in front of its first page; empty at the start of a prompt."""
    shards: int
    page_bytes: int
    """Bytes of one page of one shard."""


class DirectRead(NamedTuple):
    """Pages of one shard of a chunk, and where they shall go."""

    chunk: DirectChunk
    shard: int
    first: int
    """Number of the first of them in the chunk."""
    pages: int
    """How many."""
    address: int
    """Start of `pages * page_bytes` bytes of a device's memory."""


class DirectWrite(NamedTuple):
    """A whole chunk to write, from a device's memory."""

    chunk: DirectChunk
    addresses: tuple[int, ...]
    """For each shard the start of its pages, which lie one behind the other."""
    sums: tuple[bytes, ...] = ()
    """xxh3-128 of every page of every shard, in the order of the payload, where the caller has them (as from a hash on
    the device). Without them they are made from copies in host memory."""


class CopyBack(Protocol):
    """Copies a device's memory to the host. Blocks; called from any thread, and from several at once."""

    def __call__(self, address: int, into: memoryview) -> None:
        """Fill `into` with what is at `address`, once everything is that was written there. May raise anything: it is
        as if the bytes were wrong, and `BackendError` says why."""
        ...


@runtime_checkable
class DeviceDirect(Protocol):
    """Moves payloads between its medium and a device's memory, past host memory.

    **What is verified.** Always, on the host: a frame's header (its own checksum; that it is of the very chunk that was
    asked for) and its length. A payload that is never in host memory cannot be checked against the checksums of its
    pages there. So each page is copied `back` from the device and its checksum compared, unless an operator has told
    the backend to trust what lies between medium and device. What is damaged there is not found then: the KV may be
    wrong. The padding behind a payload is not looked at. Coded frames (compressed, encrypted) cannot be moved like
    this, and nothing that a node puts around a backend is around these verbs.

    **Whose memory.** The device's memory is the caller's until the coroutine that it was given to has ended, and only
    after that it may be used or freed: I/O that is under way cannot be called back, and a coroutine that is cancelled
    ends when its I/O has, however late. Memory that must be given back sooner, as an engine's own pages, must not be
    handed in: read into memory of the caller's own, and copy from there after a hit. A caller that gives up at a
    deadline keeps that memory out of use meanwhile, as the node does with slots.

    A write counts as a use, a read does not.
    """

    @property
    def has_device(self) -> bool:
        """Whether there is a device here, as it was found when the backend was opened. If not, nothing is asked of the
        verbs."""
        ...

    async def read_direct(self, reads: Sequence[DirectRead], back: CopyBack) -> list[ReadResult]:
        """Read pages into a device's memory. What is there afterwards may be anything unless it is a HIT. MISS also for
        a frame that is coded: it can still be read through host memory. CORRUPT for one that is not what it shall be.

        Raises:
            BackendError: The medium or the device failed, or there is no device. None of the pages may be used.
            UsageError: Such pages cannot be; the message says which.
        """
        ...

    async def write_direct(self, writes: Sequence[DirectWrite], back: CopyBack) -> list[WriteResult]:
        """Store whole chunks as plain frames, each seen by others only when it is complete. With STORED the checksums
        in the header are those of what was in the device's memory, and unless the way is trusted what is on the medium
        has been compared with them.

        Raises:
            BackendError: The medium or the device failed, or there is no device. Nothing of those chunks was stored
                whose write has not ended before; the caller deletes them.
            UsageError: Such a chunk cannot be; the message says which.
        """
        ...


@runtime_checkable
class ReadsBeside(Protocol):
    """A `DeviceDirect` that other processes of the host can read beside the one whose backend it is: engines' workers
    read to devices of their own. They are told the tier's settings, these options among them, by the node's socket."""

    def reader(self) -> StorageBackend:
        """A backend of the same options that is a `DeviceDirect` too, not open yet. Nothing but `read_direct` is asked
        of it between `open` and `close`, and it leaves alone what one process does for all, as cleaning up. This one
        need not be open."""
        ...


@runtime_checkable
class Transfer(Protocol):
    """Describes and copies the KV of engines on one kind of device."""

    def register(
        self,
        layers: Sequence[Any],
        *,
        dims: str,
        page_tokens: int,
        block_tokens: int | None = None,
        layout: Literal["native", "canonical"] = "native",
    ) -> RegisteredKV:
        """Learn where the KV of one cache group lies.

        Args:
            layers: For each layer its tensor, or its K and V tensors.
            dims: Names of the tensors' axes, one letter each: `b`lock, `t`oken, `h`ead, `d`im, `2` (K and V), `1` (an
                axis of size one), `o`paque.
            page_tokens: Tokens of a page.
            block_tokens: Tokens of a block, where the axes don't tell.
            layout: How pages shall lie in chunks.

        Raises:
            LayoutError: These don't fit together.
        """
        ...


class RegisteredKV(Protocol):
    """The KV of one cache group of an engine."""

    @property
    def page_layer_bytes(self) -> int:
        """Bytes of one page of one layer."""
        ...

    def encoding(self, engine: str, *, backend: str = "", isa: str = "") -> Encoding:
        """How the bytes of its pages lie, for the namespace: KV that lies in another order is not found under it.

        Args:
            engine: Name of the engine. It, `backend` and `isa` are no part of a canonical encoding.
            backend: Name of its attention backend.
            isa: Instruction set of the CPU, where the content of blocks depends on it.

        Raises:
            LayoutError: A name is not text, or the engine has none.
        """
        ...

    def view(self, block_ids: Any) -> KVView:
        """The KV of one request, by its block table.

        Raises:
            LayoutError: There is no such block.
        """
        ...


@runtime_checkable
class KVView(Protocol):
    """KV of one request as it lies in an engine's memory, seen as pages.

    Page `i` of a view holds tokens `[i * page_tokens, (i + 1) * page_tokens)` of the request. Buffers are one shard
    of a chunk's payload: `[page][layer][bytes]`, C order, starting at a multiple of 64 in memory.
    """

    def gather(self, group: int, first_page: int, pages: int, into: memoryview) -> None:
        """Copy pages `[first_page, first_page + pages)` of cache group `group` from the engine to `into`.

        Raises:
            LayoutError: The pages are not in the view, or `into` is not of their size.
        """
        ...

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        """Copy `source` to those pages of the engine. `source` is read only.

        Raises:
            LayoutError: The pages are not in the view, or `source` is not of their size.
        """
        ...
