"""What the backend needs of a client of S3. There are two: `rust` (obstore) and `aws` (aiobotocore)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from lmcache_core.protocols import ReadResult

__all__ = ["DIGEST", "Client", "Head", "Page", "Part"]

DIGEST = "xxh3"
"""Metadata of an object: the xxh3-128 of its value. Tells whether what is there is what would be written."""


class Part(NamedTuple):
    """What came of reading a part of an object."""

    result: ReadResult
    etag: str = ""
    """Another for each value that an object had."""
    size: int = 0
    """Bytes of the whole object."""


class Head(NamedTuple):
    """What is known of an object without reading it."""

    nbytes: int
    metadata: Mapping[str, str]


class Page(NamedTuple):
    """A part of a listing."""

    objects: list[tuple[str, int]]
    """Names, and bytes."""
    more: str
    """What the next part begins behind; empty if there is none."""


class Client(Protocol):
    """One request a verb, none of them repeated. Cancelling one ends its I/O: when it has ended nothing of it touches
    a buffer. All raise `Fault`."""

    async def close(self) -> None:
        """Let go of all connections."""
        ...

    async def get(self, name: str, into: memoryview, first: int, total: int, *, exact: bool = True) -> Part:
        """Fill `into` with the bytes of an object from `first` on. CORRUPT if the object hasn't `total` bytes, which is
        known before one of them lands. Unless it is to be `exact` the object may be smaller, and ends within `into` or
        in front of it, which is CORRUPT too."""
        ...

    async def probe(self, name: str) -> None:
        """Ask for an object that is absent. Anything but the protocol's word for that is a fault."""
        ...

    async def fetch(self, name: str, most: int) -> bytes | None:
        """A small object, None if it is absent or larger than `most` bytes."""
        ...

    async def head(self, name: str) -> Head | None:
        """What is known of an object, None if it is absent."""
        ...

    async def put(self, name: str, data: memoryview, digest: str, *, create: bool) -> bool:
        """Write an object, only where there is none if `create`. Whether it was written."""
        ...

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects, at most 1000, in one request. An absent one is as good as deleted."""
        ...

    async def delete_one(self, name: str) -> None:
        """Delete an object."""
        ...

    async def page(self, prefix: str, more: str = "", most: int = 1000) -> Page:
        """Objects whose names begin with `prefix`, at most so many: the first, or those that follow on another part."""
        ...
