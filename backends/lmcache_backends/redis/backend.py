"""`RedisBackend`: what the verbs are as commands."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from lmcache_backends.redis import problems
from lmcache_backends.redis.connecting import Connector
from lmcache_backends.redis.options import Address, RedisOptions
from lmcache_backends.redis.resp import ErrorReply, Reply, RespSocket, command, set_command
from lmcache_backends.redis.routing import Command, Parse, Router
from lmcache_core.errors import BackendError, ClosedError
from lmcache_core.protocols import Chunk, ChunkKey, Listed, ReadResult, WriteResult

T = TypeVar("T")
_MANIFESTS = b"spaces"


class RedisBackend:
    """Chunks as values of a Redis or Valkey server, of a cluster of them, or of the primary that sentinels name.

    The key of a chunk is `<prefix>:<space>:<page>`, in hex. A value is one string, so a chunk is there as a whole or
    not at all, whatever the server evicts.
    """

    abortable = True

    def __init__(self, options: RedisOptions) -> None:
        self._connector = Connector(options)
        self._prefix = f"{options.prefix}:".encode()
        self._ttl_ms = 0 if options.ttl is None else int(options.ttl * 1000)
        self._router: Router | None = None
        self._counts = dict.fromkeys(
            ("connections", "connections_lost", "bytes_sent", "bytes_received", "topology_changes", "full", "unserved"),
            0,
        )

    async def open(self) -> None:
        router = self._router or Router(self._connector)
        try:
            await router.find()
        except BaseException:  # whatever it was, the threads must not stay
            if router is not self._router:
                router.close()
            raise
        self._router = router

    async def close(self) -> None:
        router, self._router = self._router, None
        if router is not None:
            self._count(router)
            router.close()

    def _opened(self) -> Router:
        if self._router is None:
            raise ClosedError("this redis backend is not open")
        return self._router

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        replies = await self._ask([_of(b"EXISTS", self._name(key)) for key in keys], unserved=0)
        return [reply == 1 for reply in replies]

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        parses = [_into(view) for view in into]
        return await self._opened().run(self._gets(keys, into), parses, data=True, unserved=ReadResult.MISS)

    async def read_any(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | ReadResult]:
        """Makes this a `ReadsShorter`."""
        parses = [_within(view) for view in into]
        return await self._opened().run(self._gets(keys, into), parses, data=True, unserved=ReadResult.MISS)

    def _gets(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[Command]:
        names = [self._name(key) for key in keys]
        return [Command(name, [command(b"GET", name)], view.nbytes) for name, view in zip(names, into, strict=True)]

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        self._opened()
        if len({chunk.key for chunk in chunks}) < len(chunks):  # one after the other: the last of a key is to stay
            return [result for chunk in chunks for result in await self._write([chunk])]
        return await self._write(chunks)

    async def _write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        commands = []
        for chunk in chunks:
            name = self._name(chunk.key)
            commands.append(Command(name, set_command(name, chunk.data, self._ttl_ms), chunk.data.nbytes))
        results = await self._opened().run(commands, [_written] * len(commands), data=True, unserved=WriteResult.FULL)
        self._counts["full"] += results.count(WriteResult.FULL)
        return results

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        await self._ask([_of(b"UNLINK", self._name(key)) for key in keys], unserved=0)

    async def listing(self) -> AsyncIterator[Sequence[Listed]]:
        """Makes this a `Lists`: `SCAN` of each server, and the sizes of what it finds."""
        router = self._opened()
        for where in router.holders():
            cursor = b"0"
            while True:
                cursor, names = await router.ask(where, partial(scan, cursor, self._prefix, where))
                keys = [key for key in map(self._key, names) if key is not None]
                sizes = await self._sizes(router, where, keys)
                yield [Listed(key, size) for key, size in zip(keys, sizes, strict=True) if size > 0]
                if cursor == b"0":
                    break

    async def _sizes(self, router: Router, where: Address, keys: Sequence[ChunkKey]) -> list[int]:
        """0 for what is no value, or not there any more."""
        commands = [command(b"STRLEN", self._name(key)) for key in keys]

        def ask(connection: RespSocket) -> list[Reply]:
            connection.send(commands)
            return [connection.reply() for _ in commands]

        return [reply if isinstance(reply, int) else 0 for reply in await router.ask(where, ask)] if commands else []

    def _key(self, name: bytes) -> ChunkKey | None:
        """The key whose name this is, if it is one's."""
        digits = name.removeprefix(self._prefix)
        if len(digits) != 129 or not name.startswith(self._prefix) or digits[64:65] != b":":
            return None
        try:
            key = ChunkKey(bytes.fromhex(digits[:64].decode()), bytes.fromhex(digits[65:].decode()))
        except ValueError:
            return None
        return key if self._name(key) == name else None

    async def describe(self, space: bytes, manifest: bytes) -> None:
        """Makes this a `Describes`: the field `<space>` of the hash `<prefix>:spaces`."""
        name = self._prefix + _MANIFESTS
        await self._ask([Command(name, [command(b"HSET", name, space.hex().encode(), manifest)])])

    async def manifests(self) -> dict[bytes, bytes]:
        name = self._prefix + _MANIFESTS
        (found,) = await self._ask([Command(name, [command(b"HGETALL", name)])])
        if not isinstance(found, list) or len(found) % 2:
            raise BackendError(f"redis: {name.decode()} is not what describes models; choose another prefix")
        manifests = {}
        for space, manifest in zip(found[::2], found[1::2], strict=True):
            with contextlib.suppress(ValueError):  # not ours
                if isinstance(space, bytes) and isinstance(manifest, bytes):
                    manifests[bytes.fromhex(space.decode("ascii", "replace"))] = manifest
        return manifests

    def counters(self) -> Mapping[str, int]:
        """Makes this a `CountsEvents`."""
        if self._router is not None:
            self._count(self._router)
        return dict(self._counts)

    def advice(self) -> list[str]:
        """Makes this an `Advises`: what the server does when it is full."""
        policy = self._opened().policy
        if policy == "unbounded":
            return ["redis: the server has no maxmemory, and grows until the system ends it; set maxmemory there"]
        if policy == "noeviction":
            return ["redis: the server refuses chunks once it is full; set maxmemory-policy allkeys-lru there"]
        if policy.startswith("volatile-") and not self._ttl_ms:
            return [
                f"redis: maxmemory-policy {policy} evicts only what has a ttl, and chunks have none: the server "
                "refuses them once it is full; set maxmemory-policy allkeys-lru there, or write ttl: 7d"
            ]
        return []

    def _count(self, router: Router) -> None:
        self._counts["topology_changes"] += router.changes
        self._counts["unserved"] += router.unserved
        router.changes = router.unserved = 0
        for pool in router.pools():
            self._counts["connections"] += pool.made
            self._counts["connections_lost"] += pool.lost
            self._counts["bytes_sent"] += pool.sent
            self._counts["bytes_received"] += pool.received
            pool.made = pool.lost = pool.sent = pool.received = 0

    def _name(self, key: ChunkKey) -> bytes:
        return b"%b%b:%b" % (self._prefix, key.space.hex().encode(), key.page.hex().encode())

    async def _ask(self, commands: Sequence[Command], unserved: Reply = None) -> list[Reply]:
        parses: list[Parse[Reply]] = [RespSocket.reply] * len(commands)
        return await self._opened().run(commands, parses, data=False, unserved=unserved)


def scan(cursor: bytes, prefix: bytes, where: Address, connection: RespSocket) -> tuple[bytes, list[bytes]]:
    """One step through the keys of a server: where to go on, and names that begin with `prefix`.

    Raises:
        BackendError: It refuses, or its answer is none.
        ConfigError: It always will.
    """
    connection.send([command(b"SCAN", cursor, b"MATCH", prefix + b"*", b"COUNT", b"1000")])
    reply = connection.reply()
    if isinstance(reply, ErrorReply):
        raise problems.of_reply(where, reply)
    if isinstance(reply, list) and len(reply) == 2:
        then, names = reply
        if isinstance(then, bytes) and then.isdigit() and isinstance(names, list):
            return then, [name for name in names if isinstance(name, bytes)]
    raise BackendError(f"redis at {where} answers SCAN with {reply!r:.60}")


def _of(verb: bytes, name: bytes) -> Command:
    return Command(name, [command(verb, name)])


def _into(view: memoryview) -> Parse[ReadResult]:
    return lambda connection: _of_a_value(connection.value_into(view))


def _within(view: memoryview) -> Parse[int | ReadResult]:
    return lambda connection: _of_a_value(connection.value_within(view))


def _of_a_value(found: T | ErrorReply) -> T | ReadResult | ErrorReply:
    """A list or a hash in a chunk's place is no chunk."""
    return ReadResult.CORRUPT if isinstance(found, ErrorReply) and found.code == "WRONGTYPE" else found


def _written(connection: RespSocket) -> WriteResult | ErrorReply:
    reply = connection.reply()
    if isinstance(reply, ErrorReply):
        return WriteResult.FULL if reply.code == "OOM" else reply
    return WriteResult.STORED
