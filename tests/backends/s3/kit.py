"""What the S3 tests share: options for a server, and its objects past the code under test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import obstore
from obstore.store import S3Store

from lmcache_backends.objects.names import Names
from lmcache_backends.s3 import S3Options
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


class Link:
    """A way to a server on which what comes back may be held up, or arrive a byte at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._serving: set[asyncio.Task[None]] = set()
        self.drips = False
        """Send single bytes."""
        self.held = asyncio.Event()
        """Set once `hold_after` bytes have come back; the rest waits until `flow`."""
        self.hold_after: int | None = None
        self.flow = asyncio.Event()
        self.ended = asyncio.Event()
        """Set when a client has gone while something was held."""
        self.passed = 0

    async def open(self) -> str:
        """The URL at which the server can now be reached."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        for each in self._serving:
            each.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        writers = [writer]
        try:
            upstream, to_server = await asyncio.open_connection("127.0.0.1", self._port)
            writers.append(to_server)
            there = asyncio.ensure_future(self._pump(reader, to_server, back=False))
            back = asyncio.ensure_future(self._pump(upstream, writer, back=True))
            try:
                await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
                if there.done() and self.held.is_set():
                    self.ended.set()
            finally:
                for pump in (there, back):
                    pump.cancel()
                await asyncio.gather(there, back, return_exceptions=True)
        finally:
            for each in writers:
                each.transport.abort()
            await asyncio.gather(*(each.wait_closed() for each in writers), return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(64 * KIB):
                if not back:
                    writer.write(data)
                    await writer.drain()
                    continue
                if self.hold_after is not None and self.passed + len(data) > self.hold_after:
                    self.held.set()
                    await self.flow.wait()
                self.passed += len(data)
                for first in range(0, len(data), 1 if self.drips else len(data)):
                    writer.write(data[first : first + 1] if self.drips else data)
                    await writer.drain()


@asynccontextmanager
async def link(server: Server) -> AsyncIterator[tuple[Link, str]]:
    """A way to a server, and its URL."""
    made = Link(server.port)
    url = await made.open()
    try:
        yield made, url
    finally:
        await made.close()
