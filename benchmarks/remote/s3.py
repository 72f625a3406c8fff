"""The S3 tier, beside raw sockets, plain obstore and plain aioboto3 on the same server in memory.

All move the same values between the same slots and the server, so many at once. Raw sockets are the limit: blocking
threads that send from a slot and receive into one, with a request head that is made once. Ours and obstore send the
checksum that the tier has by default (a tenth of the time); aioboto3 sends none. Ours also reads large values in parts.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

import obstore
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from obstore.store import S3Store

from benchmarks.harness import Row, Scale
from benchmarks.remote.moving import MIB, Contestant, Values, Work, names_of, ours, take_turns
from lmcache_backends.s3 import S3Backend, S3Options
from tests.servers import s3 as servers

__all__ = ["ROWS", "s3_rows"]

SIZES = (8, 32)
AT_ONCE = 4
_BUCKET = "bench"
ROWS = names_of("s3", SIZES, ["obstore", "aioboto3"])


def s3_rows(scale: Scale) -> Iterator[Row]:
    """Rows `s3.*`."""
    if lacking := servers.lacking():
        raise SystemExit(lacking)
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as directory, servers.memory(Path(directory)) as server:
        for size in SIZES:
            yield from asyncio.run(_measured(server, size, scale.rounds))


async def _measured(server: servers.Server, size: int, rounds: int) -> list[Row]:
    values = Values(size * MIB)
    async with AsyncExitStack() as stack:
        contestants = [await make(server, values, stack) for make in (_ours, _raw, _obstore, _aioboto3)]
        return await take_turns("s3", contestants, values, rounds)


async def _ours(server: servers.Server, values: Values, stack: AsyncExitStack) -> Contestant:
    known = {"endpoint": server.url, "access_key": servers.ACCESS_KEY, "secret_key": servers.SECRET_KEY}
    backend = S3Backend(S3Options(bucket=_BUCKET, prefix="ours", connections=AT_ONCE, conditional=False, **known))  # type: ignore[arg-type]
    return await ours(values, stack, backend)


async def _obstore(server: servers.Server, values: Values, stack: AsyncExitStack) -> Contestant:
    store = S3Store(
        _BUCKET,
        endpoint=server.url,
        access_key_id=servers.ACCESS_KEY,
        secret_access_key=servers.SECRET_KEY,
        region="us-east-1",
        unsigned_payload=True,
        checksum_algorithm="CRC64NVME",
        client_options={"allow_http": True, "timeout": timedelta(seconds=60)},
    )

    async def put(number: int) -> None:
        await obstore.put_async(store, f"obstore/{number}", values.chunks[number].data, use_multipart=False)

    async def get(number: int) -> None:
        found = await obstore.get_async(store, f"obstore/{number}")
        values.slots[number][:] = memoryview(await found.bytes_async())

    return Contestant("obstore", _each(put, values), _each(get, values))


async def _aioboto3(server: servers.Server, values: Values, stack: AsyncExitStack) -> Contestant:
    config = AioConfig(
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path", "payload_signing_enabled": False},
    )
    client = await stack.enter_async_context(
        AioSession().create_client(
            "s3",
            endpoint_url=server.url,
            region_name="us-east-1",
            aws_access_key_id=servers.ACCESS_KEY,
            aws_secret_access_key=servers.SECRET_KEY,
            config=config,
        )
    )

    async def put(number: int) -> None:
        body = bytes(values.chunks[number].data)
        await client.put_object(Bucket=_BUCKET, Key=f"aioboto3/{number}", Body=body)

    async def get(number: int) -> None:
        answer = await client.get_object(Bucket=_BUCKET, Key=f"aioboto3/{number}")
        async with answer["Body"] as body:
            values.slots[number][:] = await body.read()

    return Contestant("aioboto3", _each(put, values), _each(get, values))


def _each(move: Callable[[int], Awaitable[None]], values: Values) -> Work:
    """Move all values, `AT_ONCE` at once."""

    async def all_of_them() -> None:
        left = list(range(len(values.chunks)))

        async def some() -> None:
            while left:
                await move(left.pop())

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))

    return all_of_them


async def _raw(server: servers.Server, values: Values, stack: AsyncExitStack) -> Contestant:
    links = [stack.enter_context(RawLink(server.port)) for _ in range(AT_ONCE)]
    threads = stack.enter_context(ThreadPoolExecutor(AT_ONCE))

    def work(move: Callable[[RawLink, int], None]) -> Work:
        async def all_of_them() -> None:
            left = list(range(len(values.chunks)))

            def some(link: RawLink) -> None:
                while left:
                    move(link, left.pop())

            loop = asyncio.get_running_loop()
            await asyncio.gather(*(loop.run_in_executor(threads, some, link) for link in links))

        return all_of_them

    return Contestant(
        "raw",
        work(lambda link, number: link.put(f"raw/{number}", values.chunks[number].data)),
        work(lambda link, number: link.get(f"raw/{number}", values.slots[number])),
    )


class RawLink:
    """A connection that does no more than HTTP asks for."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = bytearray(4096)

    def __enter__(self) -> RawLink:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    def put(self, name: str, data: memoryview) -> None:
        head = f"PUT /{_BUCKET}/{name} HTTP/1.1\r\nHost: a\r\nContent-Length: {data.nbytes}\r\n\r\n".encode()
        parts: Sequence[memoryview] = [memoryview(head), data]
        while parts:
            sent = self._socket.sendmsg(parts)
            while parts and sent >= parts[0].nbytes:
                sent -= parts[0].nbytes
                parts = parts[1:]
            if sent:
                parts = [parts[0][sent:], *parts[1:]]
        self._answer()

    def get(self, name: str, into: memoryview) -> None:
        self._socket.sendall(f"GET /{_BUCKET}/{name} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        self._answer()
        done = 0
        while done < into.nbytes:
            count = self._socket.recv_into(into[done:], into.nbytes - done, socket.MSG_WAITALL)
            if not count:
                raise ConnectionError(f"the server ended {name} after {done} bytes")
            done += count

    def _answer(self) -> None:
        while True:
            count = self._socket.recv_into(self._head, len(self._head), socket.MSG_PEEK)
            end = self._head.find(b"\r\n\r\n", 0, count)
            if end >= 0:
                self._socket.recv_into(self._head, end + 4, socket.MSG_WAITALL)
                assert self._head.startswith(b"HTTP/1.1 200")
                return
            if not count:
                raise ConnectionError("the server has gone")
