"""What the suites share: the fixtures an author gives, and how to open, read and compare."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, Scannable, StorageBackend, Stored, WriteResult
from lmcache_core.testing.data import GuardedBuffer

__all__ = ["BackendCase", "BackendFactory", "RawCorrupt", "RawRead", "RawWrite", "opened", "read_all", "scan_all"]

BackendFactory = Callable[[], StorageBackend]
RawRead = Callable[[ChunkKey], bytes | None]
RawWrite = Callable[[Chunk], None]
RawCorrupt = Callable[[ChunkKey], None]


class BackendCase:
    """The fixtures of a suite. A subclass must give `backend_factory`; the others are optional."""

    persistent: ClassVar[bool] = False
    """Whether a backend made later by the same factory finds what an earlier one stored."""
    deadline: ClassVar[float] = 60.0
    """Seconds after which a call that should have returned counts as hanging."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, test in list(vars(cls).items()):
            if name.startswith("test") and inspect.iscoroutinefunction(test):
                pytest.mark.asyncio(test)  # for projects that run pytest-asyncio in strict mode

    @pytest.fixture
    def backend_factory(self) -> BackendFactory:
        """Return a function that makes backends, not opened yet, all on one medium that is empty at first and is
        this test's own, with room for 64 MiB. No two of them are open at the same time."""
        pytest.fail(f"{type(self).__name__} needs a fixture backend_factory", pytrace=False)

    @pytest.fixture
    def bounded_factory(self) -> BackendFactory | None:
        """The same for backends that are full after a few MiB (64 KiB at least, 64 MiB at most)."""
        return None

    @pytest.fixture
    def raw_read(self) -> RawRead | None:
        """Return a function that gets the value of a key from the medium without the code under test, None if there
        is none. It runs on a thread and may block, as do the two below."""
        return None

    @pytest.fixture
    def raw_write(self) -> RawWrite | None:
        """Return a function that puts a chunk on the medium without the code under test. No backend is open then."""
        return None

    @pytest.fixture
    def raw_corrupt(self) -> RawCorrupt | None:
        """Return a function that damages the value of a key on the medium in a way that the backend promises to
        notice, at least by cutting it short. No backend is open then."""
        return None

    @pytest_asyncio.fixture(loop_scope="function")
    async def backend(self, backend_factory: BackendFactory) -> AsyncIterator[StorageBackend]:
        async with opened(backend_factory()) as backend:
            yield backend


@asynccontextmanager
async def opened(backend: StorageBackend) -> AsyncIterator[StorageBackend]:
    """The backend between its `open` and `close`."""
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()


async def read_all(
    backend: StorageBackend, keys: Sequence[ChunkKey], sizes: int | Sequence[int]
) -> list[bytes | ReadResult]:
    """Read each key: its bytes where it hit, else the result. Buffers lie between canaries."""
    sizes = [sizes] * len(keys) if isinstance(sizes, int) else sizes
    buffers = [GuardedBuffer(size) for size in sizes]
    results = await backend.read(keys, [buffer.view for buffer in buffers])
    for buffer in buffers:
        buffer.assert_intact()
    assert len(results) == len(keys), f"{len(keys)} keys were read, {len(results)} results came back"
    assert all(isinstance(result, ReadResult) for result in results), f"read returned {results}"
    return [
        bytes(buffer.view) if result is ReadResult.HIT else result
        for buffer, result in zip(buffers, results, strict=True)
    ]


async def write_all(backend: StorageBackend, chunks: Sequence[Chunk]) -> None:
    """Write chunks that must all be stored."""
    results = await backend.write(chunks)
    assert results == [WriteResult.STORED] * len(chunks)


async def assert_holds(backend: StorageBackend, chunks: Sequence[Chunk]) -> None:
    """Each of the chunks is contained, and reads as it was written."""
    keys = [chunk.key for chunk in chunks]
    assert await backend.contains(keys) == [True] * len(keys)
    values = await read_all(backend, keys, [chunk.data.nbytes for chunk in chunks])
    for value, chunk in zip(values, chunks, strict=True):
        assert_value(value, chunk)


async def assert_lacks(backend: StorageBackend, keys: Sequence[ChunkKey], nbytes: int) -> None:
    """None of the keys is contained or read."""
    assert await backend.contains(keys) == [False] * len(keys)
    assert await read_all(backend, keys, nbytes) == [ReadResult.MISS] * len(keys)


def assert_value(value: bytes | ReadResult, chunk: Chunk) -> None:
    """`value`, from `read_all`, is the chunk's. Says where bytes differ, not megabytes of them."""
    assert isinstance(value, bytes), f"{chunk.key.page.hex()[:8]} was stored, but reading it gave {value}"
    assert len(value) == chunk.data.nbytes, f"{len(value)} bytes instead of {chunk.data.nbytes} were a hit"
    if value != chunk.data:
        first = next(i for i, (got, wrote) in enumerate(zip(value, chunk.data, strict=True)) if got != wrote)
        pytest.fail(f"{chunk.key.page.hex()[:8]}: byte {first} of {len(value)} is not what was written")


async def scan_all(backend: Scannable) -> list[Stored]:
    """Everything a scan yields."""
    return [stored async for batch in backend.scan() for stored in batch]


async def finished(*calls: asyncio.Future[Any], deadline: float) -> None:
    """Wait until the calls have ended, in whatever way."""
    _, pending = await asyncio.wait(calls, timeout=deadline)
    assert not pending, f"{len(pending)} of {len(calls)} calls did not return within {deadline} s"
