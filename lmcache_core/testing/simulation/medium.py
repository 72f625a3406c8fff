"""What is left when a process ends: values by key. Several backends, also of several nodes, may keep theirs on one."""

from __future__ import annotations

from typing import NamedTuple

from lmcache_core.protocols import Chunk, ChunkKey, Stored

__all__ = ["Medium", "Value"]


class Value(NamedTuple):
    """One stored chunk."""

    stored: Stored
    data: bytes


class Medium:
    """Values, least recently used first."""

    def __init__(self, name: str, capacity: int | None = None) -> None:
        self.name = name
        self.capacity = capacity
        self.values: dict[ChunkKey, Value] = {}
        self.manifests: dict[bytes, bytes] = {}
        self.harmed: set[ChunkKey] = set()
        """Keys whose value may be gone or wrong, through no fault of the product's."""

    @property
    def used(self) -> int:
        """Bytes of all values."""
        return sum(len(value.data) for value in self.values.values())

    def may_hold(self, key: ChunkKey) -> bool:
        """Whether a value is there, or nobody is to blame if not."""
        return key in self.values or key in self.harmed

    def put(self, chunk: Chunk, data: bytes) -> bool:
        """Store a value. Returns whether there was room."""
        older = self.values.get(chunk.key)
        if self.capacity is not None:
            freed = len(older.data) if older is not None else 0
            if self.used - freed + len(data) > self.capacity:
                return False
        self.values.pop(chunk.key, None)
        self.values[chunk.key] = Value(Stored(chunk.key, chunk.pages, len(data), chunk.parent), data)
        self.harmed.discard(chunk.key)
        return True

    def lose(self, key: ChunkKey) -> None:
        """A value is gone, and nobody is told."""
        self.values.pop(key, None)
        self.harmed.add(key)

    def touch(self, key: ChunkKey) -> None:
        """A value has been used."""
        if key in self.values:
            self.values[key] = self.values.pop(key)
