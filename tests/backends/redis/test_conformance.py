"""The redis backend against the suite that every backend inherits, on each kind of server."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from lmcache_backends.redis import RedisBackend, RedisOptions
from lmcache_core.protocols import Chunk, ChunkKey, StorageBackend
from lmcache_core.testing import StorageBackendTests
from tests.servers.redis import Sentinels, Tls, Valkey


class RedisTests(StorageBackendTests):
    persistent = True

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        raise NotImplementedError

    def connect(self, request: pytest.FixtureRequest) -> Any:
        """redis-py's client, which knows where a key is."""
        raise NotImplementedError

    @pytest.fixture
    def client(self, request: pytest.FixtureRequest) -> Iterator[Any]:
        with contextlib.closing(self.connect(request)) as client:
            yield client

    @pytest.fixture
    def backend_factory(self, options: dict[str, Any], prefix: str) -> Callable[[], StorageBackend]:
        return lambda: RedisBackend(RedisOptions(prefix=prefix, **options))

    @pytest.fixture
    def raw_read(self, client: Any, prefix: str) -> Callable[[ChunkKey], bytes | None]:
        def read(key: ChunkKey) -> bytes | None:
            found: bytes | None = client.get(name(prefix, key))
            return found

        return read

    @pytest.fixture
    def raw_write(self, client: Any, prefix: str) -> Callable[[Chunk], None]:
        return lambda chunk: client.set(name(prefix, chunk.key), bytes(chunk.data))

    @pytest.fixture
    def raw_corrupt(self, client: Any, prefix: str) -> Callable[[ChunkKey], None]:
        def cut(key: ChunkKey) -> None:
            client.set(name(prefix, key), client.get(name(prefix, key))[:-1])

        return cut


def name(prefix: str, key: ChunkKey) -> str:
    return f"{prefix}:{key.space.hex()}:{key.page.hex()}"


class TestValkey(RedisTests):
    @pytest.fixture
    def options(self, valkey: Valkey) -> dict[str, Any]:
        return {"url": f"valkey://127.0.0.1:{valkey.port}/3"}

    def connect(self, request: pytest.FixtureRequest) -> Any:
        return request.getfixturevalue("valkey").client(db=3)


class TestUnixSocket(RedisTests):
    @pytest.fixture
    def options(self, valkey: Valkey) -> dict[str, Any]:
        return {"url": f"unix://{valkey.socket}", "connections": 1}

    def connect(self, request: pytest.FixtureRequest) -> Any:
        return request.getfixturevalue("valkey").client()


class TestRedisWithTlsAndUsers(RedisTests):
    @pytest.fixture
    def options(self, redis7: Valkey, tls: Tls) -> dict[str, Any]:
        files = {"tls_ca": str(tls.ca), "tls_cert": str(tls.certificate), "tls_key": str(tls.key)}
        return {"url": f"rediss://kv@localhost:{redis7.port}", "password": "pa:ss@wo%rd", **files}

    def connect(self, request: pytest.FixtureRequest) -> Any:
        return request.getfixturevalue("redis7").client()


class TestCluster(RedisTests):
    @pytest.fixture
    def options(self, cluster: list[Valkey]) -> dict[str, Any]:
        return {"url": cluster[1].url, "connections": 2}

    def connect(self, request: pytest.FixtureRequest) -> Any:
        return redis.RedisCluster("127.0.0.1", request.getfixturevalue("cluster")[0].port)


class TestPrimaryThatSentinelsName(RedisTests):
    @pytest.fixture
    def options(self, sentinels: Sentinels) -> dict[str, Any]:
        return {"url": sentinels.url, "service": sentinels.service}

    def connect(self, request: pytest.FixtureRequest) -> Any:
        return request.getfixturevalue("sentinels").primary.client()
