"""The gds backend against the suite that every backend inherits: as it is on this machine, with KvikIO's stand-in for
host memory, and with KvikIO itself in a process that has a driver (`test_driven.py` runs that)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import settings

from lmcache_backends.gds import GdsBackend
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
from tests.backends.gds.kit import file_of, options

FEWER = settings(MODEL_SETTINGS, max_examples=10)


class GdsTests(StorageBackendTests):
    persistent = True

    @pytest.fixture
    def raw_read(self, path: Path) -> RawRead:
        def read(key: ChunkKey) -> bytes | None:
            try:
                return file_of(path, key).read_bytes()
            except FileNotFoundError:
                return None

        return read

    @pytest.fixture
    def raw_write(self, path: Path) -> RawWrite:
        def write(chunk: Chunk) -> None:
            file = file_of(path, chunk.key)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(chunk.data)

        return write

    @pytest.fixture
    def raw_corrupt(self, path: Path) -> RawCorrupt:
        def cut(key: ChunkKey) -> None:
            file = file_of(path, key)
            os.truncate(file, file.stat().st_size // 2)

        return cut

    async def test_behaves_like_a_dict(self, backend_factory: BackendFactory) -> None:
        await asyncio.to_thread(run_model, backend_factory, persistent=self.persistent, settings=FEWER)


@pytest.mark.usefixtures("real")
class TestAsItIsHere(GdsTests):
    """Without a driver, as nearly everywhere where this runs."""

    @pytest.fixture
    def backend_factory(self, path: Path) -> BackendFactory:
        return lambda: GdsBackend(options(path))


@pytest.mark.usefixtures("device")
class TestByKvikio(GdsTests):
    @pytest.fixture
    def backend_factory(self, path: Path) -> BackendFactory:
        return lambda: GdsBackend(options(path, host_memory="kvikio", threads=4))
