"""A bad network: a TCP relay in front of a server that delays, throttles, cuts, damages or refuses, as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Chaos", "chaos"]

_PIECE = 1 << 16


class Chaos:
    """What the network does now. Attributes may be set at any time, from any thread."""

    def __init__(self, upstream: int) -> None:
        self.latency = 0.0
        """Seconds that each piece waits, in each direction."""
        self.bytes_per_second: float | None = None
        """Of each connection and direction."""
        self.cut_after: int | None = None
        """Reset a connection after it has carried so many bytes."""
        self.damage = 0.0
        """Share of the large pieces of which a byte is changed on its way from the server."""
        self.refuse = False
        """Reset those who connect."""
        self.silent = False
        """Take everything and pass nothing on."""
        self.answer: bytes | None = None
        """Answer each request of HTTP with this, in place of the server."""
        self.port = 0
        self._upstream = upstream
        self._random = random.Random(1)
        self._links: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)

        async def serve() -> asyncio.Server:
            return await asyncio.start_server(self._accept, "127.0.0.1", 0)

        server = self._loop.run_until_complete(serve())
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def well(self) -> None:
        """No more of anything."""
        self.latency = self.damage = 0.0
        self.bytes_per_second = self.cut_after = self.answer = None
        self.refuse = self.silent = False

    def cut(self) -> None:
        """Reset all connections."""
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for link in list(self._links):
            for writer in link:
                _reset(writer)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._cut)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            _reset(writer)
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:
            _reset(writer)
            return
        link = (writer, far_writer)
        self._links.add(link)
        carried = [0]
        ways = [
            asyncio.ensure_future(self._pass_on(reader, far_writer, carried, link, out=True)),
            asyncio.ensure_future(self._pass_on(far_reader, writer, carried, link, out=False)),
        ]
        try:
            with contextlib.suppress(asyncio.CancelledError):  # the relay ends
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            self._links.discard(link)
            for each in link:
                each.close()

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        carried: list[int],
        link: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
        *,
        out: bool,
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE):
                while self.silent:  # noqa: ASYNC110  another thread sets it
                    await asyncio.sleep(0.02)
                if self.latency:
                    await asyncio.sleep(self.latency)
                if self.bytes_per_second:
                    await asyncio.sleep(len(piece) / self.bytes_per_second)
                if out and self.answer is not None:
                    if b"\r\n\r\n" in piece:
                        link[0].write(self.answer)
                    continue
                if not out and len(piece) > 4096 and self._random.random() < self.damage:
                    damaged = bytearray(piece)
                    damaged[self._random.randrange(1000, len(piece))] ^= 0x55
                    piece = bytes(damaged)
                carried[0] += len(piece)
                if self.cut_after is not None and carried[0] > self.cut_after:
                    for each in link:
                        _reset(each)
                    return
                writer.write(piece)
                await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        sock = writer.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextmanager
def chaos(upstream: int) -> Iterator[Chaos]:
    """A relay in front of the server at a port of this host."""
    made = Chaos(upstream)
    try:
        yield made
    finally:
        made.close()
