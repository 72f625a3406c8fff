"""A cluster of which a part has no server: what lies there are misses, and the rest is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lmcache_backends.redis import RedisBackend
from lmcache_backends.redis.routing import AGAIN, Router
from lmcache_core.errors import BackendError
from lmcache_core.protocols import Chunk, ReadResult, WriteResult
from tests.backends.redis.kit import chunks, get, name, opened, put, until
from tests.servers import redis as servers

HIT, MISS = ReadResult.HIT, ReadResult.MISS
LACKING = servers.lacking("valkey")
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING or "-")

VALUES = chunks(60)


@pytest.fixture
def parted(tmp_path: Path) -> Iterator[list[servers.Valkey]]:
    """A cluster that serves what it has."""
    with servers.cluster(tmp_path / "c", "--cluster-require-full-coverage", "no") as found:
        yield found


@pytest.fixture
async def backend(parted: list[servers.Valkey]) -> AsyncIterator[RedisBackend]:
    async with opened(parted[0].url) as made:
        await put(made, VALUES)
        yield made


def holder(value: Chunk, cluster: Sequence[servers.Valkey]) -> int:
    """Number of the server that has a key."""
    slot = int(cluster[0].run("CLUSTER KEYSLOT", name("test", value.key)))
    return next(number for number in range(3) if slot <= 16384 * (number + 1) // 3 - 1)


async def attempt(backend: RedisBackend) -> list[ReadResult]:
    """What reading says; nothing where it fails."""
    try:
        return await get(backend, VALUES)
    except BackendError:
        return []


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.05)


async def settled(backend: RedisBackend, expected: list[ReadResult]) -> None:
    """Wait until reading says this."""

    async def says_so() -> bool:
        return await attempt(backend) == expected

    await eventually(says_so)


async def writable(backend: RedisBackend) -> bool:
    try:
        return WriteResult.FULL not in await backend.write(VALUES)
    except BackendError:  # a node that has just come back says for a moment that the cluster is down
        return False


async def test_chunks_of_a_node_that_is_gone_are_misses_and_the_others_are_served(
    parted: list[servers.Valkey], backend: RedisBackend
) -> None:
    """As soon as the cluster has given the node up. The one that is gone is the one that the options name."""
    gone = [holder(value, parted) == 0 for value in VALUES]
    assert 0 < sum(gone) < 60
    parted[0].process.kill()
    await settled(backend, [MISS if each else HIT for each in gone])
    keys = [value.key for value in VALUES]
    assert await backend.contains(keys) == [not each for each in gone]
    written = await backend.write(VALUES)
    assert written == [WriteResult.FULL if each else WriteResult.STORED for each in gone]
    await backend.delete(keys[:20])
    assert await backend.contains(keys) == [not each and number >= 20 for number, each in enumerate(gone)]
    assert backend.counters()["unserved"] >= 3 * sum(gone)
    await put(backend, [value for value, each in zip(VALUES, gone, strict=True) if not each])
    parted[0].process.restart()
    await settled(backend, [MISS if each else HIT for each in gone])  # it has forgotten what it had
    await eventually(lambda: writable(backend))
    assert await get(backend, VALUES) == [HIT] * 60


async def test_slots_that_nobody_has_are_misses(parted: list[servers.Valkey], backend: RedisBackend) -> None:
    """Known at once, by what the node says that had them."""
    lost = next(value for value in VALUES if holder(value, parted) == 1)
    slot = int(parted[0].run("CLUSTER KEYSLOT", name("test", lost.key)))
    for server in parted:
        server.run("CLUSTER DELSLOTS", slot)
    expected = [MISS if value is lost else HIT for value in VALUES]
    await settled(backend, expected)
    assert await backend.write([lost]) == [WriteResult.FULL]
    async with opened(parted[2].url) as other:  # and for those that come then
        assert await get(other, VALUES) == expected


async def test_it_is_asked_again_now_and_then_whether_all_is_served(
    parted: list[servers.Valkey], backend: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at each call, and beside what is done."""
    for server in parted:
        server.run("CLUSTER DELSLOTS", 0)
    await backend.open()
    router = backend._opened()
    asked: list[float] = []
    find = Router.find

    async def counting(self: Router) -> None:
        asked.append(0.0)
        await find(self)

    monkeypatch.setattr(Router, "find", counting)
    for _ in range(5):
        await get(backend, VALUES)
    assert asked == []
    router._found -= AGAIN
    await get(backend, VALUES)
    await until(lambda: len(asked) == 1)
    for server in parted:
        server.run("CLUSTER ADDSLOTS", 0)


async def test_a_cluster_that_wants_all_its_slots_is_down_without_one(tmp_path: Path) -> None:
    with servers.cluster(tmp_path / "c", "--cluster-require-full-coverage", "yes") as cluster:
        async with opened(cluster[1].url) as backend:
            await put(backend, VALUES)
            for server in cluster:
                server.run("CLUSTER DELSLOTS", 0)
            await until(lambda: "fail" in str(cluster[1].run("CLUSTER INFO")["cluster_state"]))
            with pytest.raises(BackendError, match=r"its cluster is down|has no server now"):
                await get(backend, VALUES)
