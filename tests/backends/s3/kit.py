"""What the S3 tests share: options for a server, and its objects past the code under test."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import obstore
from obstore.store import S3Store

from lmcache_backends.s3 import S3Options
from lmcache_backends.s3.names import Names
from lmcache_core.protocols import ChunkKey
from tests.backends.s3.conftest import BUCKET
from tests.servers.s3 import ACCESS_KEY, SECRET_KEY, Server

KIB, MIB = 2**10, 2**20


def options(server: Server, **changes: Any) -> S3Options:
    """Options with which that server can be used."""
    known = {"bucket": BUCKET, "endpoint": server.url, "access_key": ACCESS_KEY, "secret_key": SECRET_KEY}
    return S3Options(**(known | changes))


class Raw:
    """Objects of a prefix, by another client. Blocks."""

    def __init__(self, server: Server, prefix: str, bucket: str = BUCKET) -> None:
        self._names = Names(f"{prefix}/")
        self._store = S3Store(
            bucket,
            endpoint=server.url,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            region="us-east-1",
            client_options={"allow_http": True, "timeout": timedelta(seconds=20)},
        )

    def read(self, key: ChunkKey) -> bytes | None:
        try:
            return bytes(obstore.get(self._store, self._names.chunk(key)).bytes())
        except FileNotFoundError:
            return None

    def write(self, key: ChunkKey, value: bytes | memoryview) -> None:
        obstore.put(self._store, self._names.chunk(key), value, use_multipart=False)

    def cut(self, key: ChunkKey) -> None:
        """Leave the first half of a value."""
        value = self.read(key)
        assert value is not None
        self.write(key, value[: len(value) // 2])
