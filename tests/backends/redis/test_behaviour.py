"""What a server does by itself, and what that is here: expiry, eviction, restarts, freezes, what it is asked."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.redis import RedisBackend, RedisOptions
from lmcache_backends.redis.resp import RespSocket
from lmcache_core.errors import BackendError, ClosedError
from lmcache_core.protocols import ReadResult, WriteResult
from lmcache_core.testing import aligned_buffer, make_key
from tests.backends.redis.kit import KIB, MIB, chunks, get, name, opened, put, until
from tests.servers import redis as servers

HIT, MISS, CORRUPT = ReadResult.HIT, ReadResult.MISS, ReadResult.CORRUPT


async def test_a_chunk_that_the_server_has_evicted_is_a_miss(tmp_path: Path) -> None:
    """The data goes as a whole: there is nothing beside it that still says it is there."""
    with servers.valkey(tmp_path / "v", "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru") as server:
        async with opened(server.url) as backend:
            values = chunks(16, MIB)
            for value in values:
                await put(backend, [value])
            results = await get(backend, values)
            assert MISS in results
            assert results[-1] is HIT
            assert await backend.contains([value.key for value in values]) == [each is HIT for each in results]


async def test_a_full_server_that_evicts_nothing_says_full_and_serves_on(tmp_path: Path) -> None:
    with servers.valkey(tmp_path / "v", "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        async with opened(server.url) as backend:
            values = chunks(12, MIB)
            results = [result for value in values for result in await backend.write([value])]
            stored = results.count(WriteResult.STORED)
            assert results == [WriteResult.STORED] * stored + [WriteResult.FULL] * (12 - stored)
            assert 0 < stored < 12
            assert backend.counters()["full"] == 12 - stored
            assert await get(backend, values) == [HIT] * stored + [MISS] * (12 - stored)


async def test_chunks_expire_and_a_look_renews_nothing(valkey: servers.Valkey, prefix: str) -> None:
    (value,) = chunks(1)
    async with opened(valkey.url, prefix, ttl=3600.0) as backend:
        await put(backend, [value])
        key = name(prefix, value.key)
        assert 0 < valkey.run("PTTL", key) <= 3_600_000
        valkey.run("PEXPIRE", key, 60_000)
        assert await backend.contains([value.key]) == [True]
        assert await get(backend, [value]) == [HIT]
        assert 0 < valkey.run("PTTL", key) <= 60_000
        valkey.run("PEXPIRE", key, 1)
        await until(lambda: not valkey.run("EXISTS", key))
        assert await get(backend, [value]) == [MISS]
    async with opened(valkey.url, prefix) as backend:
        await put(backend, [value])
        assert valkey.run("PTTL", key) == -1


async def test_a_look_does_not_count_as_a_use(tmp_path: Path) -> None:
    with servers.valkey(tmp_path / "v", "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lfu") as server:
        (value,) = chunks(1)
        async with opened(server.url) as backend:
            await put(backend, [value])
            key = name("test", value.key)
            before = server.run("OBJECT FREQ", key)
            for _ in range(2000):
                assert await backend.contains([value.key] * 10) == [True] * 10
            assert server.run("OBJECT FREQ", key) == before
            for _ in range(200):
                await get(backend, [value])
            assert server.run("OBJECT FREQ", key) > before


async def test_a_prompt_of_512_chunks_is_asked_for_in_one_round_trip(
    valkey: servers.Valkey, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sends: list[int] = []
    send = RespSocket.send

    def counting(self: RespSocket, parts: Any) -> None:
        sends.append(len(parts))
        send(self, parts)

    async with opened(valkey.url, prefix) as backend:
        await put(backend, chunks(256))
        await backend.contains([])
        monkeypatch.setattr(RespSocket, "send", counting)
        keys = [value.key for value in chunks(512)]
        assert await backend.contains(keys) == [True] * 256 + [False] * 256
        assert sends[-1:] == [512]
        assert len(sends) <= 2, "logging in is the other one, where there was no connection yet"


async def test_large_batches_are_spread_over_connections_and_small_ones_are_not(
    valkey: servers.Valkey, prefix: str
) -> None:
    async with opened(valkey.url, prefix, connections=3) as backend:
        await put(backend, chunks(8, 16 * KIB))
        assert backend.counters()["connections"] == 1
        values = chunks(12, MIB, first=100)
        await put(backend, values)
        assert backend.counters()["connections"] == 3
        assert await get(backend, values) == [HIT] * 12
        assert backend.counters()["connections"] == 3
        assert backend.counters()["bytes_received"] > 12 * MIB


async def test_a_server_that_was_restarted_is_used_on(own_valkey: servers.Valkey) -> None:
    async with opened(own_valkey.url) as backend:
        value, *_ = values = chunks(4)
        await put(backend, values)
        assert await backend.contains([value.key]) == [True]
        own_valkey.process.restart()
        assert await get(backend, values) == [MISS] * 4
        assert await backend.contains([value.key]) == [False]
        await put(backend, values)
        assert await get(backend, values) == [HIT] * 4
        assert backend.counters()["connections_lost"] > 0


async def test_a_server_that_is_gone_is_a_failure_that_says_so(own_valkey: servers.Valkey) -> None:
    async with opened(own_valkey.url) as backend:
        values = chunks(2)
        await put(backend, values)
        own_valkey.process.kill()
        for call in (
            lambda: backend.contains([values[0].key]),
            lambda: get(backend, values),
            lambda: put(backend, values),
        ):
            with pytest.raises(BackendError, match="nothing listens there; is the server started"):
                await call()
        own_valkey.process.restart()
        await put(backend, values)


async def test_a_frozen_server_costs_the_deadline_and_nothing_arrives_late(own_valkey: servers.Valkey) -> None:
    async with opened(own_valkey.url) as backend:
        values = chunks(3, 4 * MIB)
        await put(backend, values)
        buffers = [aligned_buffer(4 * MIB) for _ in values]
        own_valkey.process.freeze()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await backend.read([value.key for value in values], buffers)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await backend.write(values)
        marks = [bytes(buffer) for buffer in buffers]
        own_valkey.process.thaw()
        assert await get(backend, values) == [HIT] * 3
        assert [bytes(buffer) for buffer in buffers] == marks


async def test_a_server_that_freezes_at_the_first_word_costs_no_more_than_connecting_may(
    own_valkey: servers.Valkey,
) -> None:
    own_valkey.process.freeze()
    backend = RedisBackend(RedisOptions(url=own_valkey.url, connect_timeout=0.1))
    with pytest.raises(BackendError, match="cannot be reached in time"):
        await backend.open()
    own_valkey.process.thaw()
    await backend.open()
    await backend.close()


async def test_a_value_of_another_size_is_damaged_and_reading_goes_on(valkey: servers.Valkey, prefix: str) -> None:
    values = chunks(3)
    async with opened(valkey.url, prefix) as backend:
        await put(backend, values)
        valkey.run("SET", name(prefix, values[0].key), bytes(values[0].data) * 2)
        valkey.run("SET", name(prefix, values[1].key), b"")
        assert await get(backend, values) == [CORRUPT, CORRUPT, HIT]


async def test_a_key_of_another_kind_is_no_chunk_and_can_be_written_over(valkey: servers.Valkey, prefix: str) -> None:
    one, other = chunks(2)
    async with opened(valkey.url, prefix) as backend:
        await put(backend, [other])
        valkey.run("HSET", name(prefix, one.key), "a", "b")
        assert await get(backend, [one, other]) == [CORRUPT, HIT]
        await put(backend, [one])
        assert await get(backend, [one]) == [HIT]


async def test_after_its_end_every_verb_says_so(valkey: servers.Valkey, prefix: str) -> None:
    async with opened(valkey.url, prefix) as backend:
        pass
    for call in (
        lambda: backend.contains([make_key(1)]),
        lambda: backend.delete([make_key(1)]),
        lambda: get(backend, chunks(1)),
        lambda: backend.write(chunks(1)),
    ):
        with pytest.raises(ClosedError):
            await call()


async def test_nothing_grows_with_use(valkey: servers.Valkey, prefix: str) -> None:
    async with opened(valkey.url, prefix) as backend:
        values = chunks(4, 256 * KIB)
        await put(backend, values)

        async def use() -> None:
            for _ in range(60):
                await get(backend, values)
                await backend.contains([value.key for value in values])

        await use()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            await use()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert grown < 256 * KIB
        assert backend.counters()["connections"] <= 6


async def test_keys_that_move_between_nodes_are_followed(cluster: list[servers.Valkey], prefix: str) -> None:
    """A slot is moved from one node to another while it is used: `ASK` on the way, `MOVED` afterwards."""
    source, target, third = cluster
    async with opened(third.url, prefix) as backend:
        values = chunks(60)
        await put(backend, values)
        slot_of = {value.key: int(source.run("CLUSTER KEYSLOT", name(prefix, value.key))) for value in values}
        owned = {int(each): server for server in cluster for each in _slots(server)}
        moved = next(value for value in values if owned[slot_of[value.key]] is source)
        slot, key = slot_of[moved.key], name(prefix, moved.key)
        ids = [str(_text(server.run("CLUSTER MYID"))) for server in cluster]
        target.run(f"CLUSTER SETSLOT {slot} IMPORTING {ids[0]}")
        source.run(f"CLUSTER SETSLOT {slot} MIGRATING {ids[1]}")
        source.run("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
        assert await get(backend, values) == [HIT] * 60, "asked for at the node it is going to"
        await put(backend, [moved])
        for server in cluster:
            server.run(f"CLUSTER SETSLOT {slot} NODE {ids[1]}")
        assert await get(backend, values) == [HIT] * 60
        assert await backend.contains([value.key for value in values]) == [True] * 60
        await backend.delete([moved.key])
        assert await get(backend, [moved]) == [MISS]


def _slots(server: servers.Valkey) -> range:
    own = _text(server.run("CLUSTER MYID"))
    for line in _lines(server.run("CLUSTER NODES")):
        if line[0] == own:
            low, _, high = line[8].partition("-")
            return range(int(low), int(high or low) + 1)
    raise AssertionError("a node that does not know itself")


def _lines(told: Any) -> list[list[str]]:
    if isinstance(told, dict):  # as redis-py puts it
        return [
            [each["node_id"], "", "", "", "", "", "", "", "-".join(each["slots"][0]) if each["slots"] else "0"]
            for each in told.values()
        ]
    return [line.split() for line in _text(told).splitlines()]


def _text(told: Any) -> str:
    return told.decode() if isinstance(told, bytes) else str(told)


async def test_another_primary_is_followed_when_sentinels_have_chosen_it(tmp_path: Path) -> None:
    with servers.sentinels(tmp_path / "s") as found:
        async with opened(found.url, service=found.service) as backend:
            values = chunks(8)
            await put(backend, values)
            await until(lambda: found.replica.run("DBSIZE") == 8)
            found.primary.process.kill()
            with pytest.raises(BackendError):
                await get(backend, values)
            await until(lambda: found.primary_port() == found.replica.port)
            await until(lambda: found.replica.run("INFO", "replication")["role"] == "master")
            assert await get(backend, values) == [HIT] * 8
            await put(backend, values)
            assert backend.counters()["topology_changes"] == 1
