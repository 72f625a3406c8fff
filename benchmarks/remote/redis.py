"""The redis tier, beside plain sockets and redis-py's asyncio client, on the same Valkey server.

All move the same values between the same slots and the server over so many connections. Plain sockets are the limit:
blocking threads that send from a slot and receive into one, with commands that are made once, and that check nothing.
redis.asyncio is the fastest of the usual clients for large values, with hiredis; what it returns is copied to the slot.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import redis.asyncio

from benchmarks.harness import Row, Scale
from benchmarks.remote.moving import MIB, TOTAL, Contestant, Values, Work, names_of, ours, take_turns
from lmcache_backends.redis import RedisBackend, RedisOptions
from tests.servers import redis as servers

__all__ = ["ROWS", "redis_rows"]

SIZES = (1, 8, 32)
CONNECTIONS = 4
ROWS = names_of("redis", SIZES, ["redis_asyncio"])


def redis_rows(scale: Scale) -> Iterator[Row]:
    """Rows `redis.*`."""
    if lacking := servers.lacking("valkey"):
        raise SystemExit(lacking)
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as directory, servers.valkey(Path(directory)) as server:
        for size in SIZES:
            rows = asyncio.run(_measured(server, size, scale.rounds))
            yield from rows
            if scale.lmcache_python is not None:
                server.run("FLUSHALL")
                yield from _lmcache(scale.lmcache_python, server, size, max(1, scale.rounds // 3), rows)


def _lmcache(python: Path, server: servers.Valkey, size: int, rounds: int, ours: Sequence[Row]) -> Iterator[Row]:
    """Rows of LMCache's connectors, right after ours, beside the same values."""
    count = TOTAL // (size * MIB)
    work = {"port": server.port, "size": size * MIB, "count": count, "rounds": rounds, "connections": CONNECTIONS}
    words = [str(python), "-m", "benchmarks.peers.lmcache_redis", json.dumps(work)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(words, cwd=Path(__file__).parents[2], env=env, stdout=subprocess.PIPE, check=False)
    if ran.returncode:
        raise SystemExit(f"{python} could not measure LMCache")
    for name, took in json.loads(ran.stdout.splitlines()[-1]).items():
        for verb in ("put", "get"):
            (row,) = [row for row in ours if row.name == f"redis.{verb}.{size}"]
            value = TOTAL / 1e9 / statistics.median(took[verb])
            yield Row(f"peer.{row.name}.lmcache_{name}", value, "GB/s", row.value, value / row.value)


async def _measured(server: servers.Valkey, size: int, rounds: int) -> list[Row]:
    values = Values(size * MIB)
    async with AsyncExitStack() as stack:
        contestants = [await make(server, values, stack) for make in (_ours, _sockets, _redis_asyncio)]
        return await take_turns("redis", contestants, values, rounds)


async def _ours(server: servers.Valkey, values: Values, stack: AsyncExitStack) -> Contestant:
    backend = RedisBackend(RedisOptions(url=server.url, prefix="ours", connections=CONNECTIONS))
    return await ours(values, stack, backend)


async def _redis_asyncio(server: servers.Valkey, values: Values, stack: AsyncExitStack) -> Contestant:
    clients = [redis.asyncio.Redis(host="127.0.0.1", port=server.port) for _ in range(CONNECTIONS)]
    for client in clients:
        stack.push_async_callback(client.aclose)

    def work(move: Callable[[Any, int], Any]) -> Work:
        async def all_of_them() -> None:
            left = list(range(len(values.chunks)))

            async def some(client: Any) -> None:
                while left:
                    await move(client, left.pop())

            await asyncio.gather(*(some(client) for client in clients))

        return all_of_them

    async def put(client: Any, number: int) -> None:
        await client.set(f"asyncio:{number}", values.chunks[number].data)

    async def get(client: Any, number: int) -> None:
        values.slots[number][:] = await client.get(f"asyncio:{number}")

    return Contestant("redis_asyncio", work(put), work(get))


async def _sockets(server: servers.Valkey, values: Values, stack: AsyncExitStack) -> Contestant:
    links = [stack.enter_context(_Link(server.port, values.size)) for _ in range(CONNECTIONS)]
    threads = stack.enter_context(ThreadPoolExecutor(CONNECTIONS))

    def work(move: Callable[[_Link, Sequence[int]], None]) -> Work:
        async def all_of_them() -> None:
            loop = asyncio.get_running_loop()
            count = len(values.chunks)
            parts = [range(number * count // CONNECTIONS, (number + 1) * count // CONNECTIONS) for number in range(4)]
            moves = [loop.run_in_executor(threads, move, *pair) for pair in zip(links, parts, strict=True)]
            await asyncio.gather(*moves)

        return all_of_them

    def put(link: _Link, numbers: Sequence[int]) -> None:
        link.put([(b"plain:%08d" % number, values.chunks[number].data) for number in numbers])

    def get(link: _Link, numbers: Sequence[int]) -> None:
        link.get([(b"plain:%08d" % number, values.slots[number]) for number in numbers])

    return Contestant("sockets", work(put), work(get))


class _Link:
    """A connection that does no more than the protocol asks for, with values of a known size."""

    def __init__(self, port: int, size: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._size = b"$%d\r\n" % size
        self._head = memoryview(bytearray(len(self._size)))
        self._end = memoryview(bytearray(2))

    def __enter__(self) -> _Link:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    def put(self, values: Sequence[tuple[bytes, memoryview]]) -> None:
        parts: list[memoryview] = []
        for key, value in values:
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n%b" % (len(key), key, self._size)
            parts += [memoryview(head), value, memoryview(b"\r\n")]
        while parts:
            sent = self._socket.sendmsg(parts[:512])
            while parts and sent >= parts[0].nbytes:
                sent -= parts[0].nbytes
                del parts[0]
            if sent:
                parts[0] = parts[0][sent:]
        answers = memoryview(bytearray(5 * len(values)))
        self._receive(answers)
        assert answers == b"+OK\r\n" * len(values)

    def get(self, values: Sequence[tuple[bytes, memoryview]]) -> None:
        self._socket.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key, _ in values))
        for _, into in values:
            self._receive(self._head)
            self._receive(into)
            self._receive(self._end)

    def _receive(self, into: memoryview) -> None:
        done = 0
        while done < into.nbytes:
            done += self._socket.recv_into(into[done:], into.nbytes - done, socket.MSG_WAITALL)
