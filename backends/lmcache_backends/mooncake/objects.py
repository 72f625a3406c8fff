"""Chunks as objects of the store. Blocks.

The store hands out places of memory, which a reader then reads by itself: what is replaced or evicted meanwhile reads
as a mixture of two values. So a value has its digest behind it, which every reader compares, and which tells a writer
whether what is there is what it would write.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any

import xxhash

from lmcache_backends.mooncake.errors import ABSENT, BUSY, FULL, NOT_FOUND, TOO_SMALL, TRANSFER, failed
from lmcache_backends.mooncake.memory import Memory
from lmcache_backends.mooncake.options import MooncakeOptions
from lmcache_backends.mooncake.tally import Tally
from lmcache_core.names import object_name
from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, WriteResult

__all__ = ["Objects"]

_DIGEST = 16
_ATTEMPTS = 3
"""Times that a value is read before it counts that the digest is wrong."""
_LOCKS = 64
_REMOVALS = (0.0, 0.01, 0.05, 0.2)
"""Seconds before each attempt to remove what somebody is writing."""


class Objects:
    """Of one opening. All methods may be called from many threads at once, and raise `BackendError`."""

    def __init__(self, store: Any, config: Any, options: MooncakeOptions, tally: Tally) -> None:
        self._store = store
        self._config = config
        self._master = options.master
        self._prefix = options.prefix
        self._tally = tally
        self._memory = Memory(store, options.master)
        self._locks = [threading.Lock() for _ in range(_LOCKS)]

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        found = self._store.batch_is_exist([self._name(key) for key in keys])
        for code in found:
            if code < 0:
                raise failed(code, self._master, "looking for chunks")
        return [code == 1 for code in found]

    def read(self, key: ChunkKey, into: memoryview) -> ReadResult:
        result = self._read(self._name(key), into)
        return ReadResult.HIT if isinstance(result, int) else result

    def read_any(self, key: ChunkKey, into: memoryview) -> int | ReadResult:
        name = self._name(key)
        size = self._size(name)
        if size is None:
            return ReadResult.MISS
        if not 0 < size - _DIGEST <= into.nbytes:
            self._tally.add("values_of_another_size")
            return ReadResult.CORRUPT
        return self._read(name, into[: size - _DIGEST])

    def _read(self, name: str, into: memoryview) -> int | ReadResult:
        page, address = self._memory.scratch()
        wanted, code = into.nbytes + _DIGEST, 0
        with self._memory.lent(into) as start:
            for _ in range(_ATTEMPTS):
                (code,) = self._store.batch_get_into_multi_buffers([name], [[start, address]], [[into.nbytes, _DIGEST]])
                if code in ABSENT:
                    return ReadResult.MISS
                if code == wanted and xxhash.xxh3_128_digest(into) == page[:_DIGEST]:
                    self._tally.add("bytes_read", into.nbytes)
                    return into.nbytes
                if code < 0 and code not in (TOO_SMALL, TRANSFER):
                    break
                size = self._size(name)
                if size is None:
                    return ReadResult.MISS
                if size != wanted:
                    self._tally.add("values_of_another_size")
                    return ReadResult.CORRUPT
                self._tally.add("torn_reads")  # or a host that is gone, which it is the next time too
        if code < 0:
            raise failed(code, self._master, "reading a chunk")
        return ReadResult.CORRUPT

    def write(self, chunk: Chunk) -> WriteResult:
        name, data = self._name(chunk.key), chunk.data
        digest = xxhash.xxh3_128_digest(data)
        page, address = self._memory.scratch()
        with self._memory.lent(data) as start, self._lock(name):
            size = self._store.get_size(name)
            if size == data.nbytes + _DIGEST and self._digest(name, data.nbytes) == digest:
                self._tally.add("writes_spared")
                return WriteResult.STORED
            if size != NOT_FOUND:  # it is another value, or one that is being written
                self._tally.add("objects_replaced")
                self._remove(name)
            page[:_DIGEST] = digest
            (code,) = self._store.batch_put_from_multi_buffers(
                [name], [[start, address]], [[data.nbytes, _DIGEST]], self._config
            )
        if code == FULL:
            self._tally.add("full")
            return WriteResult.FULL
        if code:
            raise failed(code, self._master, "writing a chunk")
        self._tally.add("bytes_written", data.nbytes)
        return WriteResult.STORED

    def delete(self, key: ChunkKey) -> None:
        name = self._name(key)
        with self._lock(name):
            self._remove(name)

    def _remove(self, name: str) -> None:
        code = 0
        for pause in _REMOVALS:
            time.sleep(pause)
            code = self._store.remove(name, True)  # readers find out by the digest
            if code not in BUSY:
                break
        if code not in (0, NOT_FOUND):
            raise failed(code, self._master, "removing a chunk")

    def _size(self, name: str) -> int | None:
        size: int = self._store.get_size(name)
        if size in ABSENT:
            return None
        if size < 0:
            raise failed(size, self._master, "looking at a chunk")
        return size

    def _digest(self, name: str, behind: int) -> bytes:
        """Of the value that is there; empty if it cannot be had."""
        page, address = self._memory.scratch()
        found = self._store.get_into_ranges([address], [[name]], [[[0]]], [[[behind]]], [[[_DIGEST]]])
        return page[:_DIGEST] if found == [[[_DIGEST]]] else b""

    def _name(self, key: ChunkKey) -> str:
        return f"{self._prefix}/{object_name(key)}" if self._prefix else object_name(key)

    def _lock(self, name: str) -> threading.Lock:
        return self._locks[zlib.crc32(name.encode()) % _LOCKS]
