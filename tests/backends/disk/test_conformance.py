"""The disk backend against the suite that every backend inherits."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_backends.disk import DiskBackend, DiskOptions
from lmcache_backends.disk.inspection import inspect_path
from lmcache_core.protocols import ChunkKey, StorageBackend
from lmcache_core.testing import StorageBackendTests

MIB = 2**20


class TestDisk(StorageBackendTests):
    persistent = True

    @pytest.fixture
    def backend_factory(self, tmp_path: Path) -> Callable[[], StorageBackend]:
        return lambda: DiskBackend(DiskOptions(path=str(tmp_path / "cache"), capacity=256 * MIB, min_free=0))

    @pytest.fixture
    def bounded_factory(self, tmp_path: Path) -> Callable[[], StorageBackend]:
        return lambda: DiskBackend(DiskOptions(path=str(tmp_path / "bounded"), capacity=4 * MIB, min_free=0))

    @pytest.fixture
    def raw_read(self, tmp_path: Path) -> Callable[[ChunkKey], bytes | None]:
        def read(key: ChunkKey) -> bytes | None:
            found = [entry for entry in inspect_path(tmp_path / "cache").entries() if entry.stored.key == key]
            if not found:
                return None
            (entry,) = found
            with open(entry.file, "rb") as file:
                return os.pread(file.fileno(), entry.stored.nbytes, entry.offset)

        return read

    @pytest.fixture
    def raw_corrupt(self, tmp_path: Path) -> Callable[[ChunkKey], None]:
        def damage_its_record(key: ChunkKey) -> None:
            (entry,) = [entry for entry in inspect_path(tmp_path / "cache").entries() if entry.stored.key == key]
            log = entry.file.with_name("log")
            content = bytearray(log.read_bytes())
            content[content.index(key.page)] ^= 1
            log.write_bytes(content)

        return damage_its_record
