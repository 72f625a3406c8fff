"""A storage backend for lmcache-core that keeps chunks in one SQLite file.

One connection on one thread: calls run one after another, each in a transaction, so that a value is seen whole or not
at all, and survives a crash of the process once its `write` has returned.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from sqlite3 import Connection, Error, connect
from typing import Concatenate, ParamSpec, TypeVar

import msgspec

from lmcache_core.errors import BackendError, ClosedError
from lmcache_core.hookspecs import hookimpl
from lmcache_core.iothreads import IoThreads
from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, StorageBackend, Stored, Usage, WriteResult
from lmcache_core.units import ByteSize

P = ParamSpec("P")
R = TypeVar("R")

SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS chunks (space BLOB, page BLOB, pages BLOB, parent BLOB, nbytes INTEGER,
    used INTEGER DEFAULT 0, data BLOB, UNIQUE (space, page));
CREATE INDEX IF NOT EXISTS by_use ON chunks (used);
CREATE TABLE IF NOT EXISTS total AS SELECT count(*) AS chunks, 0 AS nbytes FROM chunks;
CREATE TRIGGER IF NOT EXISTS more AFTER INSERT ON chunks
    BEGIN UPDATE total SET chunks = chunks + 1, nbytes = nbytes + NEW.nbytes; END;
CREATE TRIGGER IF NOT EXISTS less AFTER DELETE ON chunks
    BEGIN UPDATE total SET chunks = chunks - 1, nbytes = nbytes - OLD.nbytes; END;
"""
THE_CHUNK = "FROM chunks WHERE space = ? AND page = ?"
USE = "UPDATE chunks SET used = (SELECT max(used) + 1 FROM chunks) WHERE space = ? AND page = ?"
LIST = "SELECT used, space, page, pages, nbytes, parent FROM chunks WHERE used > ? ORDER BY used LIMIT 1000"


class SqliteOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may stand beside `backend: sqlite`."""

    path: str
    """The file, absolute or relative to where the process started. It and its directory are made when missing."""
    capacity: ByteSize | None = None
    """Bytes of chunks it may hold; the file is a little larger. Unbounded if not given."""


class SqliteBackend:
    """Besides a `StorageBackend` it is `Scannable`, `RemembersUse` and `ReportsUsage`."""

    def __init__(self, options: SqliteOptions) -> None:
        self._path = Path(options.path)
        self._usage = Usage(0, 0, options.capacity)
        self._threads: IoThreads | None = None
        self._database: Connection | None = None

    async def open(self) -> None:
        await self.close()  # an instance whose medium failed connects anew
        self._threads = IoThreads("sqlite", threads=1)
        await self._run(_delete, [])

    async def close(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            await threads.finish(self._disconnect)  # queued behind the calls that are under way
            threads.close()

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await self._run(_contains, keys)

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        return await self._run(_read, keys, into)

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        return await self._run(_write, chunks, self._usage.capacity)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        await self._run(_delete, keys)

    async def scan(self) -> AsyncIterator[Sequence[Stored]]:
        used = 0
        while batch := await self._run(_list, used):
            yield list(batch.values())
            used = max(batch)

    async def touch(self, keys: Sequence[ChunkKey]) -> None:
        await self._run(_touch, keys)

    def usage(self) -> Usage:
        return self._usage

    async def _run(self, call: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a call on the thread. Even when cancelled, this ends only when the call has: until then it uses the
        caller's buffers."""
        if self._threads is None:
            raise ClosedError(f"{self._path} is not open")
        try:
            return await self._threads.finish(self._transaction, lambda database: call(database, *args, **kwargs))
        except (OSError, Error) as error:
            raise BackendError(f"{self._path}: {error}") from error

    def _transaction(self, call: Callable[[Connection], R]) -> R:
        if self._database is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._database = connect(self._path)
            self._database.executescript(SCHEMA)
        with self._database as database:  # commits, or rolls back what raised
            result = call(database)
            chunks, nbytes = database.execute("SELECT chunks, nbytes FROM total").fetchone()
        self._usage = Usage(chunks, nbytes, self._usage.capacity)
        return result

    def _disconnect(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


def _contains(database: Connection, keys: Sequence[ChunkKey]) -> list[bool]:
    return [database.execute(f"SELECT 1 {THE_CHUNK}", key).fetchone() is not None for key in keys]


def _read(database: Connection, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
    results = []
    for key, buffer in zip(keys, into, strict=True):
        row = database.execute(f"SELECT data {THE_CHUNK}", key).fetchone()
        fits = row is not None and len(row[0]) == buffer.nbytes
        if fits:
            buffer[:] = row[0]
        results.append(ReadResult.HIT if fits else ReadResult.MISS if row is None else ReadResult.CORRUPT)
    return results


def _write(database: Connection, chunks: Sequence[Chunk], capacity: int | None) -> list[WriteResult]:
    results = []
    for chunk in chunks:
        (taken,) = database.execute("SELECT nbytes FROM total").fetchone()
        (freed,) = database.execute(f"SELECT coalesce(sum(nbytes), 0) {THE_CHUNK}", chunk.key).fetchone()
        if capacity is not None and taken - freed + chunk.data.nbytes > capacity:
            results.append(WriteResult.FULL)
            continue
        _delete(database, [chunk.key])
        row = (*chunk.key, b"".join(chunk.pages), chunk.parent, chunk.data.nbytes, chunk.data)
        database.execute("INSERT INTO chunks (space, page, pages, parent, nbytes, data) VALUES (?, ?, ?, ?, ?, ?)", row)
        _touch(database, [chunk.key])
        results.append(WriteResult.STORED)
    return results


def _delete(database: Connection, keys: Sequence[ChunkKey]) -> None:
    database.executemany(f"DELETE {THE_CHUNK}", keys)


def _touch(database: Connection, keys: Sequence[ChunkKey]) -> None:
    database.executemany(USE, keys)


def _list(database: Connection, used: int) -> dict[int, Stored]:
    found = {}
    for use, space, page, pages, nbytes, parent in database.execute(LIST, (used,)):
        split = tuple(pages[i : i + 32] for i in range(0, len(pages), 32))
        found[use] = Stored(ChunkKey(space, page), split, nbytes, parent)
    return found


@hookimpl
def lmcache_backend_options() -> type[SqliteOptions]:
    """The options, as a type that checks what stands in the YAML."""
    return SqliteOptions


@hookimpl
def lmcache_create_backend(options: SqliteOptions) -> StorageBackend:
    """A backend for one tier."""
    return SqliteBackend(options)
