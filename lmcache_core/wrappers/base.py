"""What wrappers share: forwarding every verb, and exactly the capabilities of what is wrapped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from lmcache_core.protocols import (
    Abortable,
    Advises,
    Chunk,
    ChunkKey,
    CostlyProbes,
    CountsEvents,
    Describes,
    Listed,
    Lists,
    ReadResult,
    ReadsShorter,
    RemembersUse,
    ReportsUsage,
    Scannable,
    StorageBackend,
    Stored,
    Usage,
    WriteResult,
)

__all__ = ["DATA_VERBS", "Wrapper"]

DATA_VERBS = frozenset({"contains", "read", "read_any", "write", "delete", "scan", "touch", "describe", "manifests"})
"""Every verb but `open` and `close`, by the names that `Wrapper.around` is given."""

T = TypeVar("T")
A = TypeVar("A", bound=int | ReadResult)
"""What is answered for one key."""


class Wrapper:
    """A backend that hands everything on to `inner`. A subclass overrides `around`, or a verb.

    Capabilities are asked for by `isinstance`, so a wrapper must have the methods of a capability if `inner` has them
    and must lack them if not. Making a wrapper therefore makes an instance of a subclass that has the forwarding
    methods of just those capabilities: `isinstance(Slow(disk), Scannable)` is `isinstance(disk, Scannable)`.
    """

    inner: StorageBackend

    def __new__(cls, inner: StorageBackend, *args: Any, **kwargs: Any) -> Self:
        made: Self = object.__new__(_class_with(cls, *(c for c, _ in _FORWARDING if isinstance(inner, c))))
        return made

    def __init__(self, inner: StorageBackend) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    async def around(self, verb: str, nbytes: int, call: Callable[[], Awaitable[T]]) -> T:
        """Make one call of `inner`; `nbytes` is how much it may move. Of a scan this is its start."""
        return await call()

    async def open(self) -> None:
        await self.around("open", 0, self.inner.open)

    async def close(self) -> None:
        await self.around("close", 0, self.inner.close)

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await self.around("contains", 0, lambda: self.inner.contains(keys))

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        return await self.reading("read", keys, into, lambda: self.inner.read(keys, into))

    async def reading(
        self,
        verb: str,
        keys: Sequence[ChunkKey],
        into: Sequence[memoryview],
        call: Callable[[], Awaitable[list[A]]],
    ) -> list[A]:
        """Make one call of `inner` that reads; of `read_any` too, where there is one."""
        return await self.around(verb, sum(buffer.nbytes for buffer in into), call)

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        nbytes = sum(chunk.data.nbytes for chunk in chunks)
        return await self.around("write", nbytes, lambda: self.inner.write(chunks))

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        await self.around("delete", 0, lambda: self.inner.delete(keys))


class _Forwards:
    """Mixed into a wrapper's class."""

    inner: Any
    around: Any
    reading: Any


class _ForwardsReadAny(_Forwards):
    async def read_any(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | ReadResult]:
        found: list[int | ReadResult] = await self.reading(
            "read_any", keys, into, lambda: self.inner.read_any(keys, into)
        )
        return found


class _ForwardsScan(_Forwards):
    async def scan(self) -> AsyncIterator[Sequence[Stored]]:
        await self.around("scan", 0, _nothing)
        async for batch in self.inner.scan():
            yield batch


class _ForwardsListing(_Forwards):
    async def listing(self) -> AsyncIterator[Sequence[Listed]]:
        await self.around("listing", 0, _nothing)
        async for batch in self.inner.listing():
            yield batch


class _ForwardsTouch(_Forwards):
    async def touch(self, keys: Sequence[ChunkKey]) -> None:
        await self.around("touch", 0, lambda: self.inner.touch(keys))


class _ForwardsUsage(_Forwards):
    def usage(self) -> Usage:
        usage: Usage = self.inner.usage()
        return usage


class _ForwardsCounters(_Forwards):
    def counters(self) -> Mapping[str, int]:
        counters: Mapping[str, int] = self.inner.counters()
        return counters


class _ForwardsAdvice(_Forwards):
    def advice(self) -> Sequence[str]:
        advice: Sequence[str] = self.inner.advice()
        return advice


class _ForwardsDescriptions(_Forwards):
    async def describe(self, space: bytes, manifest: bytes) -> None:
        await self.around("describe", 0, lambda: self.inner.describe(space, manifest))

    async def manifests(self) -> dict[bytes, bytes]:
        manifests: dict[bytes, bytes] = await self.around("manifests", 0, lambda: self.inner.manifests())
        return manifests


class _ForwardsAbort(_Forwards):
    @property
    def abortable(self) -> bool:
        return bool(self.inner.abortable)


class _ForwardsCost(_Forwards):
    @property
    def costly_probes(self) -> bool:
        return bool(self.inner.costly_probes)


async def _nothing() -> None: ...


_FORWARDING: tuple[tuple[Any, type[_Forwards]], ...] = (
    (ReadsShorter, _ForwardsReadAny),
    (Scannable, _ForwardsScan),
    (Lists, _ForwardsListing),
    (RemembersUse, _ForwardsTouch),
    (ReportsUsage, _ForwardsUsage),
    (CountsEvents, _ForwardsCounters),
    (Advises, _ForwardsAdvice),
    (Describes, _ForwardsDescriptions),
    (Abortable, _ForwardsAbort),
    (CostlyProbes, _ForwardsCost),
)


_classes: dict[tuple[type, ...], Any] = {}


def _class_with(cls: type[Wrapper], *capabilities: type) -> Any:
    """The subclass of `cls` that forwards these capabilities; always the same one."""
    key = (cls, *capabilities)
    if key not in _classes:
        mixins = [forwards for capability, forwards in _FORWARDING if capability in capabilities]
        namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
        _classes[key] = type(cls.__name__, (cls, *mixins), namespace)
    return _classes[key]
