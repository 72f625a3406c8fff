"""The NIXL backend against the suite that every backend inherits, by its POSIX plugin."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import settings

from lmcache_backends.nixl import NixlBackend, NixlOptions
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

FEWER = settings(MODEL_SETTINGS, max_examples=10)


@pytest.mark.usefixtures("nixl")
class TestNixl(StorageBackendTests):
    persistent = True

    async def test_behaves_like_a_dict(self, backend_factory: BackendFactory) -> None:
        await asyncio.to_thread(run_model, backend_factory, persistent=self.persistent, settings=FEWER)

    @pytest.fixture
    def backend_factory(self, tmp_path: Path) -> BackendFactory:
        return lambda: NixlBackend(NixlOptions(path=str(tmp_path)))

    @pytest.fixture
    def raw_read(self, tmp_path: Path) -> RawRead:
        def read(key: ChunkKey) -> bytes | None:
            file = tmp_path / object_name(key)
            return file.read_bytes() if file.exists() else None

        return read

    @pytest.fixture
    def raw_write(self, tmp_path: Path) -> RawWrite:
        def write(chunk: Chunk) -> None:
            file = tmp_path / object_name(chunk.key)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(chunk.data)

        return write

    @pytest.fixture
    def raw_corrupt(self, tmp_path: Path) -> RawCorrupt:
        def cut(key: ChunkKey) -> None:
            file = tmp_path / object_name(key)
            os.truncate(file, file.stat().st_size // 2)

        return cut
