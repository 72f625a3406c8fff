"""Connections to one server, each used by one job at a time, on threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from lmcache_backends.redis.connecting import Connector
from lmcache_backends.redis.options import Address
from lmcache_backends.redis.resp import ConnectionLost, RespSocket
from lmcache_core.errors import BackendError, ClosedError
from lmcache_core.iothreads import IoThreads, ended

T = TypeVar("T")


class Connections:
    """At most `limit` connections to a server, made when they are needed and kept. To be used on one event loop."""

    def __init__(self, connector: Connector, where: Address, limit: int) -> None:
        self.where = where
        self.made = 0
        self.lost = 0
        self.sent = 0
        self.received = 0
        self._connector = connector
        self._threads = IoThreads("lmcache-redis", limit)
        self._turns = asyncio.Semaphore(limit)
        self._idle: list[RespSocket] = []
        self._closed = False

    async def run(self, job: Callable[[RespSocket], T]) -> T:
        """Return what `job` does with a connection, on a thread. A job whose connection turns out to have been closed
        by the server before anything was answered is run once more, on a new one.

        When the coroutine is cancelled the connection is, and it ends when `job` has: nothing touches its memory then.

        Raises:
            BackendError: There is no connection, or it ended.
            ConfigError: There can never be one.
            ClosedError: `close` was called.
        """
        async with self._turns:
            while True:
                kept = bool(self._idle)
                connection = self._idle.pop() if kept else await self._connect()
                try:
                    return await self._work(job, connection)
                except ConnectionLost as error:
                    self.lost += 1
                    if not (kept and error.unanswered):
                        raise BackendError(f"redis at {self.where}: {error}") from error
                    for other in self._idle:  # they have probably been closed with it
                        other.close()
                    self._idle.clear()

    async def _connect(self) -> RespSocket:
        if self._closed:
            raise ClosedError(f"the connections to {self.where} have been closed")
        arriving = _Arriving(self._connector, self.where)
        try:
            connection = await self._threads.run(arriving.connect)
        except BaseException:  # whatever it was, a connection that nobody knows of must not stay open
            arriving.give_up()
            raise
        self.made += 1
        return connection

    async def _work(self, job: Callable[[RespSocket], T], connection: RespSocket) -> T:
        good = False
        try:
            future = self._threads.submit(job, connection)
            try:
                result = await asyncio.shield(future)
            except asyncio.CancelledError:
                connection.abort()
                await ended([future])
                raise
            good = True
            return result
        finally:
            self.sent += connection.sent
            self.received += connection.received
            connection.sent = connection.received = 0
            if good and not self._closed:
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Close what is idle, and the rest once its job has ended. Idempotent."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
        self._threads.close()


class _Arriving:
    """A connection that is being made on a thread, and that nobody may want any more when it is there."""

    def __init__(self, connector: Connector, where: Address) -> None:
        self._connector = connector
        self._where = where
        self._lock = threading.Lock()
        self._wanted = True
        self._made: RespSocket | None = None

    def connect(self) -> RespSocket:
        made = self._connector.connect(self._where)
        with self._lock:
            if self._wanted:
                self._made = made
                return made
        made.close()
        raise ConnectionLost("nobody wants it any more")

    def give_up(self) -> None:
        with self._lock:
            self._wanted = False
        if self._made is not None:
            self._made.close()
