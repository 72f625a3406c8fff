"""Objects on the emulators: what becomes of chunks, how often that asks the server, and what others do to them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.objects.backend import ObjectBackend
from lmcache_core import Cache
from lmcache_core.errors import BackendError
from lmcache_core.protocols import ChunkKey, ReadResult, WriteResult
from lmcache_core.testing import aligned_buffer, make_chunk, make_key
from tests.backends.objects.kit import KIB, MIB, Place, Raw, azure_place, gcs_place
from tests.node.kv import CHUNK_FRAME, CHUNK_TOKENS, PAGE_TOKENS, namespace, open_cache, retrieve, store, until
from tests.servers import azure, gcs

STORED = WriteResult.STORED
ROOT = Path(__file__).parents[3]
DEADLINE = 0.5

MakeBackend = Callable[..., Any]


@pytest.fixture
async def opened(place: Place, prefix: str) -> AsyncIterator[MakeBackend]:
    """Opens backends on one prefix."""
    async with AsyncExitStack() as stack:

        async def make(**changes: Any) -> ObjectBackend:
            backend = place.backend(prefix=prefix, **changes)
            await backend.open()
            stack.push_async_callback(backend.close)
            return backend

        yield make


async def value_of(backend: ObjectBackend, key: ChunkKey, nbytes: int) -> bytes | ReadResult:
    buffer = aligned_buffer(nbytes)
    (result,) = await backend.read([key], [buffer])
    return bytes(buffer) if result is ReadResult.HIT else result


async def test_a_value_that_is_there_already_is_not_written_twice(opened: MakeBackend) -> None:
    one, other = await opened(), await opened()
    chunk = make_chunk(make_key(1), 64 * KIB)
    assert await one.write([chunk]) == [STORED]
    assert await other.write([chunk]) == [STORED]
    counts = other.counters()
    assert (counts["writes_spared"], counts["bytes_sent"], counts["objects_replaced"]) == (1, 0, 0)
    assert (counts["requests_put"], counts["requests_head"]) == (1, 1)


async def test_what_is_there_and_is_something_else_is_replaced(opened: MakeBackend, raw: Raw) -> None:
    backend = await opened()
    old, new = make_chunk(make_key(1), 16 * KIB), make_chunk(make_key(1), 16 * KIB, version=1)
    assert await backend.write([old]) == [STORED]
    assert await backend.write([new]) == [STORED]
    assert await value_of(backend, new.key, 16 * KIB) == bytes(new.data)
    await asyncio.to_thread(raw.write, new.key, old.data)  # of the same size, and without a digest
    assert await backend.write([new]) == [STORED]
    assert await value_of(backend, new.key, 16 * KIB) == bytes(new.data)
    assert backend.counters()["objects_replaced"] == 2


async def test_a_large_value_is_read_in_parts(opened: MakeBackend) -> None:
    backend = await opened()
    chunk = make_chunk(make_key(1), 32 * MIB)
    assert await backend.write([chunk]) == [STORED]
    before = backend.counters()["requests_get"]
    value = await value_of(backend, chunk.key, 32 * MIB)
    assert isinstance(value, bytes)
    assert value == bytes(chunk.data)
    assert backend.counters()["requests_get"] - before == 4


@pytest.mark.parametrize("part", [64 * KIB, 8 * MIB])
async def test_a_value_that_was_cut_is_corrupt_and_then_a_miss(opened: MakeBackend, raw: Raw, part: int) -> None:
    backend = await opened(part=part)
    chunk = make_chunk(make_key(1), 256 * KIB)
    assert await backend.write([chunk]) == [STORED]
    await asyncio.to_thread(raw.cut, chunk.key)
    assert await value_of(backend, chunk.key, 256 * KIB) is ReadResult.CORRUPT
    assert backend.counters()["values_of_another_size"] == 1
    await backend.delete([chunk.key, make_key(2)])
    assert await value_of(backend, chunk.key, 256 * KIB) is ReadResult.MISS
    assert await backend.write([chunk]) == [STORED]
    assert await value_of(backend, chunk.key, 256 * KIB) == bytes(chunk.data)


async def test_a_place_that_is_removed_is_no_miss(place: Place) -> None:
    server = place.server
    if isinstance(server, azure.Azurite):
        server.make_container("removed-soon")
        backend = place.backend(container="removed-soon")
    else:
        assert isinstance(server, gcs.Server)
        server.make_bucket("removed-soon")
        backend = place.backend(bucket="removed-soon")
    await backend.open()
    remove = server.remove_container if isinstance(server, azure.Azurite) else server.remove_bucket
    await asyncio.to_thread(remove, "removed-soon")
    with pytest.raises(BackendError, match=r"there is no such (container|bucket); create it, or correct"):
        await backend.read([make_key(1)], [aligned_buffer(4 * KIB)])
    with pytest.raises(BackendError, match=r"there is no such (container|bucket); create it, or correct"):
        await backend.write([make_chunk(make_key(1))])
    await backend.close()


async def test_a_signature_for_one_container_is_enough(azurite: Place, prefix: str) -> None:
    shared = azure.shared_access("kv-tests")
    backend = azurite.backend(prefix=prefix, access_key="", sas_token=f"?{shared}")
    await backend.open()
    chunks = [make_chunk(make_key(number), 64 * KIB) for number in range(3)]
    assert await backend.write(chunks) == [STORED] * 3
    assert await value_of(backend, chunks[1].key, 64 * KIB) == bytes(chunks[1].data)
    await backend.describe(chunks[0].key.space, b"{}")
    assert await backend.manifests() == {chunks[0].key.space: b"{}"}
    await backend.delete([chunk.key for chunk in chunks])
    assert await backend.contains([chunk.key for chunk in chunks]) == [False] * 3
    await backend.close()


@pytest.fixture(scope="module", params=["azure", "gcs"])
def mortal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A place on a server that tests may end."""
    directory = tmp_path_factory.mktemp("mortal")
    if lacking := azure.lacking() if request.param == "azure" else gcs.lacking():
        pytest.skip(lacking)
    if request.param == "azure":
        with azure.azurite(directory) as server:
            yield azure_place(server)
    else:
        with gcs.serving(directory) as front:
            yield gcs_place(front)


def test_a_server_that_dies_or_freezes_costs_its_deadlines_and_serves_again(mortal: Place, prefix: str) -> None:
    mortal.make()
    tier = {"read_timeout": DEADLINE, "write_timeout": 2.0}
    with open_cache(mortal.backend(prefix=prefix, connect_timeout=DEADLINE), tiers=[tier]) as cache:
        assert store(cache, "abcd")
        cache.clear(["cpu"])
        assert retrieve(cache, "abcd") == 4
        mortal.server.kill()
        cache.clear(["cpu"])
        started = time.monotonic()
        for letters in ("abcd", "efgh", "ijkl", "mnop"):
            assert retrieve(cache, letters) == 0
        assert time.monotonic() - started < 4 * DEADLINE + 1
        mortal.server.restart()
        mortal.make()
        until(lambda: store(cache, "qrst") and cache.stats().tiers[0].up)
        cache.clear(["cpu"])
        until(lambda: retrieve(cache, "qrst") == 4)
        mortal.server.freeze()
        try:
            cache.clear(["cpu"])
            started = time.monotonic()
            assert retrieve(cache, "qrst") == 0
            assert time.monotonic() - started < 2 * DEADLINE + 0.5  # a lookup and a read at most
        finally:
            mortal.server.thaw()
        cache.clear(["cpu"])
        until(lambda: retrieve(cache, "qrst") == 4)


STORES = """
import sys
from lmcache_core import Cache
from tests.node.kv import namespace, store
with Cache.open(sys.argv[1], namespace()) as cache:
    assert store(cache, "abcdefghij")
"""


def test_what_one_process_stores_another_finds(
    place: Place, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "access_key" if place.door == "azure" else "token"
    written = place.known | {"endpoint": place.url, "prefix": prefix, secret: "${env:SECRET}"}
    file = tmp_path / "node.yaml"
    file.write_text(
        f"chunk_tokens: {CHUNK_TOKENS}\n"
        f"page_tokens: {PAGE_TOKENS}\n"
        f"cpu: {{capacity: {max(2**20, 16 * CHUNK_FRAME)}}}\n"
        "tiers:\n"
        f"  - backend: {place.door}\n" + "".join(f"    {name}: {value}\n" for name, value in written.items())
    )
    monkeypatch.setenv("SECRET", place.known[secret])
    subprocess.run([sys.executable, "-c", STORES, str(file)], check=True, cwd=ROOT, timeout=60)
    with Cache.open(file, namespace()) as cache:
        assert retrieve(cache, "abcdefghij") == 10
        assert retrieve(cache, "abcdxy") == 4
        assert retrieve(cache, "zz") == 0
