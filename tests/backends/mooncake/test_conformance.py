"""The Mooncake backend against the suite that every backend inherits, on a store of this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import settings

from lmcache_backends.mooncake import MooncakeBackend, MooncakeOptions
from lmcache_core.names import object_name
from lmcache_core.protocols import Chunk, ChunkKey
from lmcache_core.testing import (
    MODEL_SETTINGS,
    BackendFactory,
    RawCorrupt,
    RawRead,
    RawWrite,
    StorageBackendTests,
    run_model,
)

DIGEST = 16
FEWER = settings(MODEL_SETTINGS, max_examples=40 if os.environ.get("OBJECTS_TESTS") == "all" else 2)
"""Sequences of calls: each closes a client of the library or more, which takes a second."""


class Raw:
    """Objects of a prefix, by the library alone. Blocks."""

    def __init__(self, where: str, prefix: str) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._prefix = prefix
        self.store = MooncakeDistributedStore()
        assert self.store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", where) == 0

    def _name(self, key: ChunkKey) -> str:
        return f"{self._prefix}/{object_name(key)}"

    def read(self, key: ChunkKey) -> bytes | None:
        size = self.store.get_size(self._name(key))
        if size < 0:
            return None
        into = np.empty(size, np.uint8)
        assert self.store.get_into(self._name(key), into.ctypes.data, size) == size
        value = into.tobytes()
        assert value[-DIGEST:] == xxhash.xxh3_128_digest(value[:-DIGEST])
        return value[:-DIGEST]

    def write(self, key: ChunkKey, value: bytes | memoryview) -> None:
        self.store.remove(self._name(key), True)
        assert self.store.put(self._name(key), bytes(value) + xxhash.xxh3_128_digest(value)) == 0

    def cut(self, key: ChunkKey) -> None:
        """Leave the first half of a value."""
        value = self.read(key)
        assert value is not None
        self.write(key, value[: len(value) // 2])


class TestMooncake(StorageBackendTests):
    persistent = True

    @pytest.mark.slow
    async def test_behaves_like_a_dict(self, backend_factory: BackendFactory) -> None:
        await asyncio.to_thread(run_model, backend_factory, persistent=self.persistent, settings=FEWER)

    @pytest.fixture
    def backend_factory(self, master: str, prefix: str) -> BackendFactory:
        return lambda: MooncakeBackend(MooncakeOptions(master=master, prefix=prefix))

    @pytest.fixture
    def raw(self, master: str, prefix: str) -> Iterator[Raw]:
        raw = Raw(master, prefix)
        yield raw
        raw.store.close()

    @pytest.fixture
    def raw_read(self, raw: Raw) -> RawRead:
        return raw.read

    @pytest.fixture
    def raw_write(self, raw: Raw) -> RawWrite:
        def write(chunk: Chunk) -> None:
            raw.write(chunk.key, chunk.data)

        return write

    @pytest.fixture
    def raw_corrupt(self, raw: Raw) -> RawCorrupt:
        return raw.cut
