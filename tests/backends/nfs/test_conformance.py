"""The nfs backend against the suite that every backend inherits: on a plain directory, and on GlusterFS, where what is
read and put past the code under test goes by another mount. What two backends on two mounts see of each other, and
when, is in test_hosts.py: it is later than a dict would have it."""

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import settings

from lmcache_backends.nfs import NfsBackend
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
from tests.backends.nfs.kit import Two, file_of, options

ALL = "NFS_TESTS"
THOUSANDS = {"test_a_batch_of_thousands", "test_keys_that_are_alike_do_not_collide"}
"""Tests that say no more on a network than on a plain directory, and are long there."""
FEWER = settings(MODEL_SETTINGS, max_examples=6)
"""Sequences of calls, where each call is some round trips."""


class NfsTests(StorageBackendTests):
    persistent = True

    @pytest.fixture
    def other_side(self, tmp_path: Path) -> Path:
        """The directory as another host sees it."""
        raise NotImplementedError

    @pytest.fixture
    def raw_read(self, other_side: Path) -> RawRead:
        def read(key: ChunkKey) -> bytes | None:
            try:
                return file_of(other_side, key).read_bytes()
            except FileNotFoundError:
                return None

        return read

    @pytest.fixture
    def raw_write(self, other_side: Path) -> RawWrite:
        def write(chunk: Chunk) -> None:
            file = file_of(other_side, chunk.key)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(chunk.data)

        return write

    @pytest.fixture
    def raw_corrupt(self, other_side: Path) -> RawCorrupt:
        def cut(key: ChunkKey) -> None:
            file = file_of(other_side, key)
            os.truncate(file, file.stat().st_size - 1)

        return cut


class TestDirectory(NfsTests):
    @pytest.fixture
    def other_side(self, tmp_path: Path) -> Path:
        return tmp_path / "kv"

    @pytest.fixture
    def backend_factory(self, other_side: Path) -> BackendFactory:
        return lambda: NfsBackend(options(other_side))


class TestDirectoryThroughThePageCache(TestDirectory):
    @pytest.fixture
    def backend_factory(self, other_side: Path) -> BackendFactory:
        return lambda: NfsBackend(options(other_side, direct="never", fsync=True, threads=2))


@pytest.mark.needs_root
class TestGluster(NfsTests):
    @pytest.fixture(autouse=True)
    def time_enough(self, request: pytest.FixtureRequest) -> None:
        if request.function.__name__ in THOUSANDS and os.environ.get(ALL) != "all":
            pytest.skip(f"time is missing: {ALL}=all runs this on GlusterFS too")

    @pytest.fixture
    def other_side(self, shared: Two) -> Path:
        return shared.true

    @pytest.fixture
    def backend_factory(self, shared: Two) -> BackendFactory:
        return lambda: NfsBackend(options(shared.one, must_be_mounted=True))

    async def test_behaves_like_a_dict(self, backend_factory: BackendFactory) -> None:
        await asyncio.to_thread(run_model, backend_factory, persistent=self.persistent, settings=FEWER)
