"""The kit is the test. What the kit cannot know of SQLite is below it."""

import sqlite3
from pathlib import Path

import pytest
from lmcache_backend_sqlite import SqliteBackend, SqliteOptions

from lmcache_core.errors import BackendError
from lmcache_core.protocols import ChunkKey
from lmcache_core.testing import BackendFactory, RawCorrupt, StorageBackendTests, opened


class TestSqliteBackend(StorageBackendTests):
    persistent = True

    @pytest.fixture
    def backend_factory(self, tmp_path: Path) -> BackendFactory:
        return lambda: SqliteBackend(SqliteOptions(path=f"{tmp_path}/new/kv.sqlite"))

    @pytest.fixture
    def bounded_factory(self, tmp_path: Path) -> BackendFactory:
        return lambda: SqliteBackend(SqliteOptions(path=f"{tmp_path}/bounded.sqlite", capacity=1 << 20))

    @pytest.fixture
    def raw_corrupt(self, tmp_path: Path) -> RawCorrupt:
        return lambda key: truncate(tmp_path / "new/kv.sqlite", key)


def truncate(path: Path, key: ChunkKey) -> None:
    database = sqlite3.connect(path)
    with database:
        database.execute("UPDATE chunks SET data = substr(data, 1, 4096) WHERE space = ? AND page = ?", key)
    database.close()


async def test_a_file_that_is_no_database_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "kv.sqlite"
    path.write_bytes(b"not a database" * 1000)
    backend = SqliteBackend(SqliteOptions(path=str(path)))
    with pytest.raises(BackendError, match=r"kv\.sqlite: file is not a database"):
        await backend.open()
    path.unlink()
    async with opened(backend):  # the same instance, once its medium is back
        assert await backend.contains([]) == []
    await backend.close()
